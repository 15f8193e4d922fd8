//! Rehearses the plan of the runbook that replaces the old mail exchange: runs its commands, week by week and with both ways
//! back, while e-mails are posted, and checks that each e-mail was sent once.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contracts::EventId;
use contracts::email::Email;
use futures_util::StreamExt;
use lapin::options::BasicAckOptions;
use lapin::{Connection, ConnectionProperties, ExchangeKind};
use pillarbox::consumers::{Handler, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use runtime::secret::{MasterKey, Secret};
use server::migrations;
use server::settings::Role;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{Pillarbox, TestApp, TestDatabase, TestVhost, eventually, program};
use uuid::Uuid;

use crate::confidential::support::{email, post_email};
use crate::consumers::support::{Process, fast_options};
use crate::operator::commands::Cli;
use crate::relay::broker_client::BrokerClient;
use crate::relay::dual_publish::declare_old_exchange;
use crate::relay::support::TIMEOUT;
use crate::server::process::DataFolder;

/// The new consumer of e-mails. In shadow, it records and does not send.
struct NewConsumer {
    is_shadow: bool,
}

impl Handler for NewConsumer {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let insert = "insert into email_record (message_id, is_shadow) values ($1, $2)";
            sqlx::query(insert).bind(message.message_id).bind(self.is_shadow).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

/// Starts the old mail program, which knows nothing but the body and the id of a message. Returns what it has sent.
async fn start_old_program(url: &str) -> Arc<Mutex<Vec<Uuid>>> {
    let sent: Arc<Mutex<Vec<Uuid>>> = Arc::default();
    let (url, sent_by_program) = (url.to_owned(), sent.clone());
    tokio::spawn(async move {
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        let (queue, tag) = ("smtp_send_email".into(), "old".into());
        let mut deliveries = channel.basic_consume(queue, tag, Default::default(), Default::default()).await.unwrap();
        while let Some(Ok(delivery)) = deliveries.next().await {
            let mail: Email = serde_json::from_slice(&delivery.data).expect("the bare e-mail");
            assert_eq!(mail.template, "verification");
            let id = delivery.properties.message_id().as_ref().unwrap().as_str().parse::<EventId>().unwrap();
            sent_by_program.lock().unwrap().push(id.0);
            delivery.ack(BasicAckOptions::default()).await.unwrap();
        }
    });
    sent
}

/// The installation of the rehearsal.
struct Installation {
    database: TestDatabase,
    /// A process that answers requests, and runs none of the routes.
    api: TestApp,
    amqp: BrokerClient,
    amqp_url: String,
    folder: DataFolder,
    /// The variables of the operator's shell.
    exported: Vec<(String, String)>,
    relay: Option<Pillarbox>,
    is_dual: bool,
    /// The processes with the service notify.
    mail: Option<Process>,
}

impl Installation {
    async fn run(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["export", variable] => {
                let (name, value) = variable.split_once('=').unwrap();
                self.exported.push((name.to_owned(), value.to_owned()));
            }
            [variables @ .., "pillarbox", "serve"] => self.restart(variables).await,
            ["pillarbox", ..] => drop(Cli::with_server(&self.database, &self.api).ok(&words[1..].join(" ")).await),
            // Bound by a key without messages: the next command of the plan binds it.
            ["rabbitmqadmin", "declare", "queue", "name=smtp_send_email_v2", ..] => {
                self.amqp.queue("smtp_send_email_v2", "smap.events", "unused").await;
            }
            [
                "rabbitmqadmin",
                "declare",
                "binding",
                "source=smap.events",
                "destination=smtp_send_email_v2",
                "routing_key=email.#",
            ] => self.amqp.bind("smtp_send_email_v2", "smap.events", "email.#").await,
            ["rabbitmqadmin", "delete", "queue", "name=smtp_send_email"] => {
                self.amqp.delete_queue("smtp_send_email").await
            }
            ["rabbitmqadmin", "delete", "exchange", "name=smtp_send_email_exc"] => {
                self.amqp.delete_exchange("smtp_send_email_exc").await;
            }
            _ => panic!("the rehearsal does not know the command `{line}`"),
        }
    }

    /// Restarts the relay with these variables, and the mail consumer, which the test plays, if `notify` is among the services.
    async fn restart(&mut self, variables: &[&str]) {
        let value = |name: &str| {
            variables.iter().find_map(|variable| variable.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
        };
        if let Some(mail) = self.mail.take() {
            mail.stop().await;
            let is_dual = self.is_dual;
            eventually("the old exchange has what the new consumer has read", TIMEOUT, async || {
                let query = "select count(*) from email_record join pillarbox.outbox_status using (message_id)
                             where is_shadow and consumer = 'relay.legacy' and status = 'pending'";
                sqlx::query_scalar::<_, i64>(query).fetch_one(self.database.pool()).await.unwrap() == 0 || !is_dual
            })
            .await;
        }
        if let Some(mut relay) = self.relay.take() {
            assert!(relay.terminate().await.success(), "{}", relay.logs());
        }
        let (url, dual) = (self.database.url(), value("ENABLE_DUAL_PUBLISH").unwrap());
        let secret_key = MasterKey::from_bytes([7; 32]).to_base64();
        let mut env = vec![
            ("PILLARBOX_DATABASE_URL", url.as_str()),
            ("PILLARBOX_AMQP_URL", &self.amqp_url),
            ("PILLARBOX_SECRET_KEY", &secret_key),
            ("PILLARBOX_ROLES", "relay,maintain"),
            ("PILLARBOX_SERVICES", "hub"),
            ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
            ("ENABLE_DUAL_PUBLISH", &dual),
        ];
        env.extend(self.exported.iter().map(|(name, value)| (&**name, &**value)));
        let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", self.folder.text()];
        let relay = Pillarbox::start(program(), &args, &env);
        relay.base_url().await;
        assert_eq!(relay.logs().contains("dual publishing is on"), dual == "true", "{}", relay.logs());
        (self.relay, self.is_dual) = (Some(relay), dual == "true");
        if value("PILLARBOX_SERVICES").is_none_or(|services| services.contains("notify")) {
            let is_shadow = value("PILLARBOX_MAIL__SHADOW").unwrap() == "true";
            let matching = MessagePattern { sources: vec!["identity".to_owned()], ..MessagePattern::topic("email.#") };
            let (handler, options) = (Arc::new(NewConsumer { is_shadow }), fast_options());
            let start = StartAt::Beginning;
            let process = Process::idle(self.database.pool());
            process.runtime.subscribe(&Subscription {
                consumer: "notify.mail".into(),
                matching,
                start,
                handler,
                options,
            });
            self.mail = Some(process);
        }
    }

    /// Waits until all e-mails that were posted so far are at the exchanges and at the new consumer, as far as these run.
    async fn let_some_pass(&self) {
        let query = "select count(*) from pillarbox.outbox_status join pillarbox.shard_worker using (consumer)
                     where status = 'pending' and created_at <= $1 and consumer in ('relay.email', 'relay.legacy', 'notify.mail')";
        let db = self.database.pool();
        let now: chrono::DateTime<chrono::Utc> =
            sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await.unwrap();
        eventually("what was posted before has passed", TIMEOUT, async || {
            match sqlx::query_scalar::<_, i64>(query).bind(now).fetch_one(db).await.unwrap() {
                0 => Ok(()),
                pending => Err(pending),
            }
        })
        .await;
    }
}

/// The command lines of the section with this heading.
fn commands(heading: &str) -> Vec<&'static str> {
    let runbook = include_str!("../../../docs/runbook.md");
    let (_, section) =
        runbook.split_once(&format!("\n### {heading}")).unwrap_or_else(|| panic!("no section {heading}"));
    let section = section.split("\n### ").next().unwrap();
    let lines: Vec<&str> = section.lines().filter_map(|line| line.strip_prefix("    ")).collect();
    assert!(!lines.is_empty(), "{heading}");
    lines
}

#[tokio::test]
async fn the_plan_of_the_runbook_sends_every_email_once() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp): (PgPool, _) = (database.pool().clone(), BrokerClient::connect(&vhost).await);
    sqlx::query("create table email_record (message_id uuid, is_shadow boolean)").execute(&db).await.unwrap();
    declare_old_exchange(&amqp).await;
    amqp.exchange("smap.events", ExchangeKind::Topic).await;
    let sent_by_old = start_old_program(&vhost.amqp_url()).await;
    let (amqp_url, folder) = (vhost.amqp_url(), DataFolder::new());
    let api = TestApp::start_with(&database, |settings| {
        settings.roles = vec![Role::Api];
        settings.secret_key = Some(Secret::new(MasterKey::from_bytes([7; 32]).to_base64()));
    })
    .await;
    let mut installation = Installation {
        database,
        api,
        amqp,
        amqp_url,
        folder,
        exported: Vec::new(),
        relay: None,
        is_dual: false,
        mail: None,
    };

    let is_over = AtomicBool::new(false);
    let load = async {
        let mut posted = BTreeSet::new();
        while !is_over.load(Ordering::SeqCst) {
            posted.insert(post_email(&db, &email(&format!("u{}", posted.len() % 7), "s3cret")).await);
            tokio::time::sleep(Duration::from_millis(20)).await; // a steady load
        }
        posted
    };
    let plan = async {
        // The old program's former producer is switched off when dual publishing runs, so nothing is posted before.
        let first = commands("Week 1");
        let start = first.iter().position(|line| line.ends_with("serve")).unwrap();
        for line in &first[..=start] {
            installation.run(line).await;
        }
        eventually("the legacy route exists", TIMEOUT, async || {
            let query = "select exists (select from pillarbox.cursor where consumer = 'relay.legacy')";
            sqlx::query_scalar::<_, bool>(query).fetch_one(&db).await.unwrap()
        })
        .await;
        first[start..].to_vec()
    };
    let first = plan.await;
    let weeks = async {
        let (switch, back) = (commands("Week 3"), commands("Undo week 3"));
        let steps = [first[1..].to_vec(), commands("Undo week 1"), first[..1].to_vec(), commands("Week 2: verify")];
        for line in steps.concat().into_iter().chain(switch.clone()).chain(back).chain(switch) {
            installation.let_some_pass().await;
            if line.contains("--check") {
                let cli = Cli::new(&installation.database);
                // Under load, an event may be on its way to one of the exchanges.
                let check = line.strip_prefix("pillarbox ").unwrap();
                eventually(line, TIMEOUT, async || cli.run(check).await.0 == Some(0)).await;
            } else {
                installation.run(line).await;
            }
        }
        is_over.store(true, Ordering::SeqCst);
    };
    let (posted, ()) = tokio::join!(load, weeks);
    installation.let_some_pass().await;
    eventually("the old queue is empty", TIMEOUT, async || installation.amqp.depth("smtp_send_email").await == 0).await;
    for line in commands("Week 4") {
        installation.run(line).await;
    }
    installation.api.stop().await;
    installation.mail.take().unwrap().stop().await;
    assert!(installation.relay.take().unwrap().terminate().await.success());

    let sent_by_new: Vec<Uuid> =
        sqlx::query_scalar("select message_id from email_record where not is_shadow").fetch_all(&db).await.unwrap();
    let sent_by_old = sent_by_old.lock().unwrap().clone();
    assert!(!sent_by_old.is_empty() && !sent_by_new.is_empty());
    let sent: Vec<Uuid> = sent_by_old.iter().chain(&sent_by_new).copied().collect();
    let distinct = |ids: &[Uuid]| ids.iter().copied().collect::<BTreeSet<Uuid>>();
    assert_eq!(distinct(&sent), posted, "no e-mail is lost");
    let (old, new) = (distinct(&sent_by_old), distinct(&sent_by_new));
    let by_both: Vec<&Uuid> = old.intersection(&new).collect();
    assert!(by_both.is_empty(), "sent by both: {}, of {} and {}", by_both.len(), old.len(), new.len());
    assert_eq!((sent_by_old.len(), sent_by_new.len()), (old.len(), new.len()), "no e-mail is sent twice");
}
