//! A mail server (`tests/smtp/server.py`, on aiosmtpd, which `scripts/setup test` installs), and requests for e-mails.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use chrono::{DateTime, TimeDelta, Utc};
use contracts::email::{Email, EmailRequested};
use contracts::identity;
use pillarbox::log::{BLANKED, Post, Source, post};
use runtime::secret::Secret;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use server::settings::Settings;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::eventually;
use uuid::Uuid;

use crate::support::DEADLINE;

const PYTHON: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin/python");
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/smtp/server.py");

/// A mail server in a process of its own. It is stopped, and its folder is removed, when it is dropped.
pub(crate) struct SmtpServer {
    folder: PathBuf,
    options: Vec<String>,
    port: u16,
    process: Option<Child>,
}

/// An e-mail that the server has received completely, whether it has accepted it or not.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ReceivedMail {
    pub(crate) from: String,
    pub(crate) to: Vec<String>,
    /// The parameters of the command `MAIL`.
    pub(crate) options: Vec<String>,
    headers: Vec<(String, String)>,
    pub(crate) text: String,
    pub(crate) html: String,
    pub(crate) is_encrypted: bool,
    pub(crate) has_login: bool,
}

impl ReceivedMail {
    /// All values of a header.
    pub(crate) fn headers(&self, name: &str) -> Vec<&str> {
        let has_name = |(other, _): &&(String, String)| other.eq_ignore_ascii_case(name);
        self.headers.iter().filter(has_name).map(|(_, value)| value.as_str()).collect()
    }

    /// The value of a header that exists once.
    pub(crate) fn header(&self, name: &str) -> &str {
        match self.headers(name)[..] {
            [value] => value,
            ref other => panic!("{name}: {other:?}"),
        }
    }
}

impl SmtpServer {
    pub(crate) async fn start() -> SmtpServer {
        SmtpServer::start_with(&[]).await
    }

    /// Starts the server with options of its command line.
    pub(crate) async fn start_with(options: &[&str]) -> SmtpServer {
        let mut server = SmtpServer::prepare();
        server.options = options.iter().map(|option| (*option).to_owned()).collect();
        server.resume().await;
        server
    }

    /// A folder for a server that is started later.
    pub(crate) fn prepare() -> SmtpServer {
        let folder = std::env::temp_dir().join(format!("pillarbox-smtp-{}", Uuid::new_v4()));
        std::fs::create_dir(&folder).unwrap();
        SmtpServer { folder, options: Vec::new(), port: 0, process: None }
    }

    /// Starts the server again, on the same port.
    pub(crate) async fn resume(&mut self) {
        let port_file = self.folder.join("port");
        let _ = std::fs::remove_file(&port_file);
        let mut command = Command::new(PYTHON);
        command.arg(SERVER).arg(&self.folder).args(["--port", &self.port.to_string()]).args(&self.options);
        // The server ends with its standard input, and so with the test.
        let log = std::fs::File::create(self.folder.join("log")).unwrap();
        let process =
            command.stdin(Stdio::piped()).stderr(log).spawn().expect("`scripts/setup test` installs aiosmtpd");
        self.process = Some(process);
        self.port = eventually("the mail server listens", DEADLINE, async || {
            std::fs::read_to_string(&port_file).ok().and_then(|text| text.parse::<u16>().ok())
        })
        .await;
    }

    pub(crate) fn kill(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        let _ = process.kill();
        process.wait().unwrap();
    }

    /// Waits until the process has ended by itself.
    pub(crate) async fn wait_for_end(&mut self) {
        let process = self.process.as_mut().unwrap();
        eventually("the mail server ends", DEADLINE, async || process.try_wait().unwrap().is_some()).await;
        self.process = None;
    }

    /// How the server replies from now on; see `tests/smtp/server.py`.
    pub(crate) fn set_rules(&self, rules: &Value) {
        let temporary = self.folder.join("rules.new");
        std::fs::write(&temporary, rules.to_string()).unwrap();
        std::fs::rename(temporary, self.folder.join("rules.json")).unwrap();
    }

    /// All e-mails so far, in the order of their arrival at each process of the server.
    pub(crate) fn mails(&self) -> Vec<ReceivedMail> {
        let entries = std::fs::read_dir(self.folder.join("mails")).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()).collect()
    }

    /// To how many e-mails the server has replied, or does so at once.
    pub(crate) fn replies(&self) -> usize {
        std::fs::metadata(self.folder.join("replies")).map_or(0, |file| file.len() as usize)
    }

    /// How often each Message-ID has arrived.
    pub(crate) fn arrivals(&self) -> BTreeMap<String, usize> {
        let mut arrivals = BTreeMap::new();
        for mail in self.mails() {
            *arrivals.entry(mail.header("Message-ID").to_owned()).or_default() += 1;
        }
        arrivals
    }

    pub(crate) fn url(&self) -> String {
        let is_tls = self.options.iter().any(|option| option == "--tls");
        format!("{}://127.0.0.1:{}", if is_tls { "smtps" } else { "smtp" }, self.port)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for SmtpServer {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Settings that send to this server, with short pauses.
pub(crate) fn send_to(server: &SmtpServer) -> impl FnOnce(&mut Settings) + use<> {
    let url = server.url();
    move |settings| {
        settings.smtp_url = Some(Secret::new(url));
        settings.mail.from = "Pillarbox <no-reply@pillarbox.example>".to_owned();
        settings.mail.retry_first_ms = 100;
        settings.mail.retry_max_ms = 400;
        // Longer than a busy machine needs: an e-mail is repeated if the answer to it is too late.
        settings.mail.timeout_ms = 20_000;
    }
}

/// A request for the e-mail `verification`.
pub(crate) fn verification(to: &str) -> EmailRequested {
    let variables = [("name", "Ada"), ("token", "0123456789"), ("link", ""), ("expires_in_hours", "24")];
    EmailRequested {
        idempotency_key: Uuid::new_v4().to_string(),
        user_id: Some(Uuid::now_v7()),
        expires_at: Some(Utc::now() + TimeDelta::hours(24)),
        data: Email {
            to: to.to_owned(),
            template: "verification".to_owned(),
            variables: variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            locale: "en".to_owned(),
        },
    }
}

/// A request with another value of a variable.
pub(crate) fn with_variable(mut request: EmailRequested, name: &str, value: &str) -> EmailRequested {
    request.data.variables.insert(name.to_owned(), value.to_owned());
    request
}

/// Posts requests as identity does, in one transaction.
pub(crate) async fn request(db: &PgPool, requests: &[EmailRequested]) {
    let mut tx = db.begin().await.unwrap();
    for request in requests {
        post_request(&mut tx, request, request.expires_at).await;
    }
    tx.commit().await.unwrap();
}

/// Posts a request whose payload is blanked at another time than it expires.
pub(crate) async fn request_until(db: &PgPool, request: &EmailRequested, until: DateTime<Utc>) {
    let mut tx = db.begin().await.unwrap();
    post_request(&mut tx, request, Some(until)).await;
    tx.commit().await.unwrap();
}

async fn post_request(tx: &mut Transaction<'_, Postgres>, request: &EmailRequested, until: Option<DateTime<Utc>>) {
    let key = request.user_id.map_or_else(|| "none".to_owned(), |user| user.to_string());
    let mut message = Post::new(identity::EMAIL_VERIFICATION_REQUESTED, to_raw_value(request).unwrap()).with_key(key);
    message.confidential_until = until;
    post(tx, &Source::new(identity::SOURCE), &message).await.unwrap();
}

/// Posts any payload to a topic of identity, with a key of its own.
pub(crate) async fn post_raw(db: &PgPool, topic: &str, payload: &str) {
    post_raw_from(db, identity::SOURCE, topic, payload).await;
}

/// The same with another source.
pub(crate) async fn post_raw_from(db: &PgPool, source: &'static str, topic: &str, payload: &str) {
    let payload = RawValue::from_string(payload.to_owned()).unwrap();
    let mut tx = db.begin().await.unwrap();
    let message = Post::new(topic, payload).with_key(Uuid::new_v4().to_string());
    post(&mut tx, &Source::new(source), &message).await.unwrap();
    tx.commit().await.unwrap();
}

/// Posts a request as it is in the log after it was blanked.
pub(crate) async fn post_blanked(db: &PgPool) {
    let payload = RawValue::from_string(BLANKED.to_owned()).unwrap();
    let mut message = Post::new(identity::EMAIL_VERIFICATION_REQUESTED, payload).with_key(Uuid::new_v4().to_string());
    message.confidential_until = Some(Utc::now() + TimeDelta::hours(24));
    let mut tx = db.begin().await.unwrap();
    post(&mut tx, &Source::new(identity::SOURCE), &message).await.unwrap();
    tx.commit().await.unwrap();
}

/// Addresses that differ.
pub(crate) fn addresses(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("user{number}@example.org")).collect()
}

/// The number of rows by status.
pub(crate) async fn statuses(db: &PgPool) -> BTreeMap<String, i64> {
    let query = "select status, count(*) from pillarbox_notify.mail group by status";
    let rows: Vec<(String, i64)> = sqlx::query_as(query).fetch_all(db).await.unwrap();
    rows.into_iter().collect()
}

/// Waits until this many e-mails have this status.
pub(crate) async fn wait_for_status(db: &PgPool, status: &str, count: i64) {
    eventually(&format!("{count} e-mails are {status}"), DEADLINE, async || {
        let statuses = statuses(db).await;
        if statuses.get(status).copied().unwrap_or(0) == count { Ok(()) } else { Err(statuses) }
    })
    .await;
}

/// The time that a test server of PostgreSQL has.
pub(crate) async fn database_time(db: &PgPool) -> DateTime<Utc> {
    sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await.unwrap()
}
