//! Composes the e-mail that is sent to the mail server.

use lettre::Message;
use lettre::address::Envelope;
use lettre::message::header::{HeaderName, HeaderValue};
use lettre::message::{Mailbox, MultiPart};
use runtime::secret::digest;
use uuid::Uuid;

use crate::address::{self, InvalidAddress};
use crate::domain::ClaimedMail;

/// Who sends all e-mails.
#[derive(Debug, Clone)]
pub(crate) struct Sender {
    pub(crate) from: Mailbox,
    pub(crate) reply_to: Option<Mailbox>,
}

/// An e-mail as it is transferred.
pub(crate) struct Composed {
    pub(crate) envelope: Envelope,
    pub(crate) bytes: Vec<u8>,
}

/// The headers of an e-mail that do not depend on its sender. `unsubscribe`: the address of one-click unsubscribe.
pub(crate) fn fixed_headers(unsubscribe: Option<&str>) -> Vec<(&'static str, String)> {
    // Automatic replies, such as those about absence, do not answer it (RFC 3834).
    let mut headers = vec![("Auto-Submitted", "auto-generated".to_owned())];
    // One click, without a login and without a question (RFC 8058, which requires https).
    if let Some(address) = unsubscribe.filter(|address| address.starts_with("https://")) {
        headers.push(("List-Unsubscribe", format!("<{address}>")));
        headers.push(("List-Unsubscribe-Post", "List-Unsubscribe=One-Click".to_owned()));
    }
    headers
}

/// Why an e-mail can never be sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ComposeError {
    #[error(transparent)]
    Recipient(#[from] InvalidAddress),
    #[error(transparent)]
    Message(#[from] lettre::error::Error),
}

impl Sender {
    /// Composes an e-mail. Fails if it can never be sent.
    pub(crate) fn compose(&self, mail: &ClaimedMail) -> Result<Composed, ComposeError> {
        let recipient = address::parse(&mail.recipient)?;
        let message_id = self.message_id(mail.message_id, &mail.recipient);
        let mut builder = Message::builder()
            .from(self.from.clone())
            .to(Mailbox::new(None, recipient))
            .subject(mail.subject.clone())
            .message_id(Some(message_id))
            // The same in every attempt, like the Message-ID.
            .date(mail.created_at.into());
        for (name, value) in fixed_headers(mail.unsubscribe.as_deref()) {
            builder = builder.raw_header(HeaderValue::new(HeaderName::new_from_ascii_str(name), value));
        }
        if let Some(reply_to) = &self.reply_to {
            builder = builder.reply_to(reply_to.clone());
        }
        let parts = MultiPart::alternative_plain_html(mail.text.clone(), mail.html.clone());
        let message = builder.multipart(parts)?;
        Ok(Composed { envelope: message.envelope().clone(), bytes: message.formatted() })
    }

    /// The Message-ID: the same for every attempt, so that a mail server or a mailbox can recognise a repeated e-mail.
    fn message_id(&self, message_id: Uuid, recipient: &str) -> String {
        let recipient: String = digest(recipient)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("<{message_id}.{recipient}@{}>", self.from.email.domain())
    }
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::*;

    fn mail(recipient: &str, subject: &str) -> ClaimedMail {
        let now = DateTime::UNIX_EPOCH;
        ClaimedMail {
            id: 1,
            claim: Uuid::nil(),
            message_id: Uuid::nil(),
            recipient: recipient.to_owned(),
            template: "verification".to_owned(),
            subject: subject.to_owned(),
            text: "Grüße\n.\nQUIT\n".to_owned(),
            html: "<p>Grüße</p>".to_owned(),
            unsubscribe: None,
            attempts: 0,
            created_at: now,
            give_up_at: now,
            expires_at: None,
            now,
        }
    }

    fn compose(recipient: &str, subject: &str) -> String {
        let from = "Pillarbox <no-reply@example.org>".parse().unwrap();
        let sender = Sender { from, reply_to: Some("help@example.org".parse().unwrap()) };
        String::from_utf8(sender.compose(&mail(recipient, subject)).unwrap().bytes).unwrap()
    }

    #[test]
    fn every_attempt_has_the_same_message_id_and_date() {
        let (first, second) = (compose("ada@example.org", "Hi"), compose("ada@example.org", "Hi"));
        for header in
            ["Message-ID: <00000000-0000-0000-0000-000000000000.", "Date: Thu, 01 Jan 1970", "Reply-To: help@"]
        {
            let line = |text: &str| text.lines().find(|line| line.starts_with(header)).map(str::to_owned);
            assert_eq!(line(&first), line(&second));
            assert!(line(&first).is_some(), "{first}");
        }
        let other = compose("bob@example.org", "Hi");
        let id = |text: &str| text.lines().find(|line| line.starts_with("Message-ID")).unwrap().to_owned();
        assert_ne!(id(&first), id(&other));
    }

    #[test]
    fn a_subject_adds_no_header_even_with_line_breaks() {
        let composed = compose("ada@example.org", "Hi\r\nBcc: bob@example.org\r\n\r\nbody");
        let head = composed.split("\r\n\r\n").next().unwrap();
        assert!(!head.lines().any(|line| line.starts_with("Bcc")), "{head}");
        assert!(head.is_ascii());
    }
}
