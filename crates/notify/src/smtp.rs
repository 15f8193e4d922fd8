//! The client of the mail server: connections, encryption, login, and what its replies mean.
//!
//! Connections are reused, but only after a transfer that succeeded. lettre's own pool also returns a connection whose
//! transfer was abandoned; the next e-mail would then read the reply to the previous one.

mod server_address;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lettre::Address;
use lettre::transport::smtp::Error;
use lettre::transport::smtp::authentication::{Credentials, DEFAULT_MECHANISMS};
use lettre::transport::smtp::client::{AsyncSmtpConnection, TlsParameters};
use lettre::transport::smtp::commands::{Data, Mail, Rcpt};
use lettre::transport::smtp::extension::{ClientId, Extension, MailBodyParameter, MailParameter};
use lettre::transport::smtp::response::Response;
use runtime::config::InvalidSetting;
use runtime::secret::Secret;
use tokio::time::timeout;
use url::{Host, Url};

use self::server_address::{credentials, is_loopback, tls_parameters};
use crate::compose::Composed;
use crate::domain::{Attempt, ServerFailure};
use crate::settings::{MailSettings, Starttls};

/// Time limit for a new connection (TCP, greeting, encryption and login), unless that of a transfer is shorter.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// Time limit for the test of a connection that was idle, unless that of a transfer is shorter.
const TEST_TIME_MAX: Duration = Duration::from_secs(2);
/// A connection that was idle for longer is closed.
const IDLE_TIME_MAX: Duration = Duration::from_secs(10);
/// Many servers limit the e-mails of a connection.
const MAILS_PER_CONNECTION_MAX: u32 = 50;
/// Replies about a login that is missing or wrong. Some servers check it only when they know the recipient; even then no
/// e-mail is to blame.
const LOGIN_CODES: [u16; 4] = [530, 534, 535, 538];

pub(crate) struct SmtpClient {
    host: String,
    port: u16,
    hello: ClientId,
    encryption: Encryption,
    credentials: Option<Credentials>,
    transfer_time_max: Duration,
    idle_max: usize,
    idle: Mutex<Vec<Connection>>,
}

enum Encryption {
    PlainText,
    Starttls(TlsParameters),
    /// From the first byte.
    Tls(TlsParameters),
}

struct Connection {
    smtp: AsyncSmtpConnection,
    mails: u32,
    used_at: Instant,
}

/// The part of a transfer that is under way. It decides whom a failure concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The server knows nothing but the sender, which all e-mails have in common.
    Sender,
    /// As above, but with parameters that only some e-mails need, such as SMTPUTF8.
    SenderWithParameters,
    RecipientOrContent,
}

/// Why a transfer failed.
enum TransferError {
    Smtp(Error),
    /// The server lacks an extension that this e-mail needs.
    Unsupported(&'static str),
    NoReply(Duration),
}

impl SmtpClient {
    /// Connects when it first sends. Fails if the address or a certificate is invalid.
    pub(crate) fn new(
        url: &Secret<String>,
        settings: &MailSettings,
        domain: &str,
    ) -> Result<SmtpClient, InvalidSetting> {
        // The parser's error may quote the password.
        let invalid = || InvalidSetting::new("smtp_url", "must be an address such as smtp://user:password@host:587");
        let url = Url::parse(url.reveal()).map_err(|_| invalid())?;
        // `smtp` is not a special scheme of URLs, so the host is parsed again as one of the internet.
        let host =
            Host::parse(url.host_str().filter(|host| !host.is_empty()).ok_or_else(invalid)?).map_err(|_| invalid())?;
        let name = host.to_string().trim_matches(['[', ']']).to_owned();
        let is_tls = match url.scheme() {
            "smtp" => false,
            "smtps" => true,
            _ => return Err(invalid()),
        };
        let tls = || tls_parameters(&name, settings.ca_file.as_deref());
        let encryption = match settings.starttls {
            _ if is_tls => Encryption::Tls(tls()?),
            Starttls::Never => Encryption::PlainText,
            Starttls::Auto if is_loopback(&host) => Encryption::PlainText,
            Starttls::Auto | Starttls::Required => Encryption::Starttls(tls()?),
        };
        Ok(SmtpClient {
            port: url.port().unwrap_or(if is_tls { 465 } else { 587 }),
            host: name,
            hello: ClientId::Domain(domain.to_owned()),
            encryption,
            credentials: credentials(&url).ok_or_else(invalid)?,
            transfer_time_max: Duration::from_millis(u64::from(settings.timeout_ms)),
            idle_max: settings.concurrency as usize,
            idle: Mutex::new(Vec::new()),
        })
    }

    /// Sends an e-mail.
    pub(crate) async fn send(&self, mail: &Composed) -> Attempt {
        let mut connection = match self.connection().await {
            Ok(connection) => connection,
            Err(failure) => return Attempt::ServerFailed(failure),
        };
        let mut stage = Stage::Sender;
        let result = timeout(self.transfer_time_max, transfer(&mut connection.smtp, mail, &mut stage)).await;
        // A connection whose transfer fails or is abandoned is closed, because its state is unknown.
        match result.unwrap_or(Err(TransferError::NoReply(self.transfer_time_max))) {
            Err(error) => {
                if !matches!(error, TransferError::NoReply(_)) {
                    let _ = timeout(self.test_time_max(), connection.smtp.abort()).await;
                }
                error.means(stage)
            }
            Ok(reply) => {
                connection.mails += 1;
                connection.used_at = Instant::now();
                self.reuse(connection);
                let text = reply.message().collect::<Vec<_>>().join(" ");
                Attempt::Accepted(format!("{} {text}", reply.code()))
            }
        }
    }

    /// The longest time that [`SmtpClient::send`] takes.
    pub(crate) fn send_time_max(&self) -> Duration {
        // The test of an idle connection, and the end of one whose transfer failed.
        2 * self.test_time_max() + self.connect_time_max() + self.transfer_time_max
    }

    /// Closes connections that were not used for some time.
    pub(crate) fn close_idle(&self) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|connection| connection.used_at.elapsed() < IDLE_TIME_MAX);
    }

    /// Returns a connection that works. Fails with the reason why the server cannot be used.
    async fn connection(&self) -> Result<Connection, ServerFailure> {
        if let Some(mut connection) = self.idle_connection() {
            if timeout(self.test_time_max(), connection.smtp.test_connected()).await == Ok(true) {
                return Ok(connection);
            }
            // Probably the others are closed as well, and each test takes its time.
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        let time_max = self.connect_time_max();
        match timeout(time_max, self.connect()).await {
            Ok(Ok(smtp)) => Ok(Connection { smtp, mails: 0, used_at: Instant::now() }),
            Ok(Err(error)) => Err(ServerFailure { summary: summarize(&error), detail: describe(&error) }),
            Err(_) => Err(ServerFailure::without_reply(format!("no connection within {} ms", time_max.as_millis()))),
        }
    }

    fn test_time_max(&self) -> Duration {
        TEST_TIME_MAX.min(self.transfer_time_max)
    }

    fn connect_time_max(&self) -> Duration {
        CONNECT_TIME_MAX.min(self.transfer_time_max)
    }

    async fn connect(&self) -> Result<AsyncSmtpConnection, Error> {
        let tls = match &self.encryption {
            Encryption::Tls(tls) => Some(tls.clone()),
            Encryption::Starttls(_) | Encryption::PlainText => None,
        };
        let server = (self.host.as_str(), self.port);
        let mut smtp =
            AsyncSmtpConnection::connect_tokio1(server, Some(self.connect_time_max()), &self.hello, tls, None).await?;
        if let Encryption::Starttls(tls) = &self.encryption {
            smtp.starttls(tls.clone(), &self.hello).await?;
        }
        if let Some(credentials) = &self.credentials {
            smtp.auth(DEFAULT_MECHANISMS, credentials).await?;
        }
        Ok(smtp)
    }

    fn idle_connection(&self) -> Option<Connection> {
        self.close_idle();
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn reuse(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.mails < MAILS_PER_CONNECTION_MAX && idle.len() < self.idle_max {
            idle.push(connection);
        }
    }
}

/// Transfers an e-mail. `stage` is how far it came.
async fn transfer(
    smtp: &mut AsyncSmtpConnection,
    mail: &Composed,
    stage: &mut Stage,
) -> Result<Response, TransferError> {
    let mut parameters = Vec::new();
    let is_ascii = |address: &Address| AsRef::<str>::as_ref(address).is_ascii();
    if !mail.envelope.from().into_iter().chain(mail.envelope.to()).all(is_ascii) {
        if !smtp.server_info().supports_feature(Extension::SmtpUtfEight) {
            return Err(TransferError::Unsupported("the address needs SMTPUTF8, which the server does not support"));
        }
        parameters.push(MailParameter::SmtpUtfEight);
    }
    if !mail.bytes.is_ascii() {
        if !smtp.server_info().supports_feature(Extension::EightBitMime) {
            return Err(TransferError::Unsupported("the content needs 8BITMIME, which the server does not support"));
        }
        parameters.push(MailParameter::Body(MailBodyParameter::EightBitMime));
    }
    if !parameters.is_empty() {
        *stage = Stage::SenderWithParameters;
    }
    smtp.command(Mail::new(mail.envelope.from().cloned(), parameters)).await?;
    *stage = Stage::RecipientOrContent;
    for recipient in mail.envelope.to() {
        smtp.command(Rcpt::new(recipient.clone(), Vec::new())).await?;
    }
    smtp.command(Data).await?;
    Ok(smtp.message(&mail.bytes).await?)
}

impl From<Error> for TransferError {
    fn from(error: Error) -> TransferError {
        TransferError::Smtp(error)
    }
}

impl TransferError {
    /// The outcome for the e-mail. Before the server knows the recipient, no e-mail is to blame. After it, a failure
    /// without a reply may be the e-mail's own: it waits for its own retry.
    fn means(self, stage: Stage) -> Attempt {
        let (summary, detail) = match &self {
            TransferError::Unsupported(reason) => return Attempt::Refused((*reason).to_owned()),
            TransferError::Smtp(error) => (summarize(error), describe(error)),
            TransferError::NoReply(time) => {
                let text = format!("no reply within {} ms", time.as_millis());
                (text.clone(), text)
            }
        };
        match stage {
            Stage::Sender => Attempt::ServerFailed(ServerFailure { summary, detail }),
            // Either the sender or the parameters are refused, so neither this e-mail nor all others may suffer.
            Stage::SenderWithParameters => Attempt::Deferred(detail),
            Stage::RecipientOrContent if self.is_final() => Attempt::Refused(detail),
            Stage::RecipientOrContent => Attempt::Deferred(detail),
        }
    }

    fn is_final(&self) -> bool {
        let TransferError::Smtp(error) = self else { return false };
        error.is_permanent() && !error.status().is_some_and(|code| LOGIN_CODES.contains(&code.into()))
    }
}

/// The part of an error that may be logged and shown in public: of a reply only its codes, because the text may contain
/// addresses and names.
fn summarize(error: &Error) -> String {
    match error.status() {
        Some(code) => {
            let text = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
            match enhanced_code(&text) {
                Some(enhanced) => format!("it replied {code} {enhanced}"),
                None => format!("it replied {code}"),
            }
        }
        // The parser's error quotes the reply.
        None if error.is_response() => "it closed the connection, or its reply is not SMTP".to_owned(),
        None => describe(error),
    }
}

/// The enhanced status code (RFC 3463) that a reply begins with, such as 4.7.1.
fn enhanced_code(reply: &str) -> Option<&str> {
    let code = reply.split_whitespace().next()?;
    let parts: Vec<&str> = code.split('.').collect();
    let is_number = |part: &&str| (1..=3).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit());
    (parts.len() == 3 && parts.iter().all(is_number)).then_some(code)
}

/// The text of an error with its causes.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let detail = error.to_string();
        if !text.contains(&detail) {
            text = format!("{text}: {detail}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(url: &str, starttls: Starttls) -> Result<SmtpClient, InvalidSetting> {
        let settings = MailSettings { starttls, ..MailSettings::default() };
        SmtpClient::new(&Secret::new(url.to_owned()), &settings, "example.org")
    }

    #[test]
    fn another_machine_gets_nothing_in_plain_text_unless_that_is_configured() {
        let is_plain = |url: &str, starttls| matches!(client(url, starttls).unwrap().encryption, Encryption::PlainText);
        for url in ["smtp://localhost:25", "smtp://127.0.0.1", "smtp://[::1]:25"] {
            assert!(is_plain(url, Starttls::Auto), "{url}");
            assert!(!is_plain(url, Starttls::Required), "{url}");
        }
        for url in ["smtp://mail.example.org", "smtp://10.0.0.1", "smtp://localhost.example.org", "smtps://localhost"] {
            assert!(!is_plain(url, Starttls::Auto), "{url}");
        }
        assert!(is_plain("smtp://mail.example.org", Starttls::Never));
        assert!(!is_plain("smtps://mail.example.org", Starttls::Never));
    }

    #[test]
    fn only_a_status_code_of_a_reply_is_shown() {
        assert_eq!(enhanced_code("4.7.1 <ada@example.org>: Relay access denied"), Some("4.7.1"));
        assert_eq!(enhanced_code("5.1.10"), Some("5.1.10"));
        for text in
            ["", "<ada@example.org> 4.7.1", "ada.lovelace.org no", "4.7 no", "4.7.1.2 no", "4.7.1000 no", "4..1"]
        {
            assert_eq!(enhanced_code(text), None, "{text}");
        }
    }

    #[test]
    fn an_address_has_defaults_and_decoded_credentials() {
        let found = client("smtps://ada%40example.org:p%2Bw%26+d@mail.example.org", Starttls::Auto).unwrap();
        assert_eq!((found.host.as_str(), found.port), ("mail.example.org", 465));
        assert_eq!(found.credentials, Some(Credentials::new("ada@example.org".to_owned(), "p+w&+d".to_owned())));
        assert_eq!(client("smtp://mail.example.org", Starttls::Auto).unwrap().port, 587);
        for url in ["mail.example.org", "http://mail.example.org", "smtp://", "smtp://hunter2:hunter2@"] {
            let error = client(url, Starttls::Auto).err().unwrap().to_string();
            assert!(error.contains("smtp_url") && !error.contains("hunter2"), "{error}");
        }
    }
}
