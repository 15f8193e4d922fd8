//! The settings of notifications, the section `[notify]`, and of the mail part, the section `[mail]`.

use std::path::PathBuf;

use chrono::TimeDelta;
use lettre::message::Mailbox;
use runtime::config::InvalidSetting;
use serde::{Deserialize, Serialize};

use crate::domain::delivery_rules::Rules;
use crate::domain::policy::{EmailLimits, Policy};

/// All settings of the service.
#[derive(Debug, Clone)]
pub struct Settings {
    pub notify: NotifySettings,
    pub mail: MailSettings,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NotifySettings {
    /// For how many minutes the e-mails of one event type are collected into one; 0 means not at all. An event type may have
    /// its own value.
    pub digest_minutes: u32,
    /// How long a notification is retained.
    pub retention_days: u32,
    /// How long a change of an event waits for further ones before its participants are notified.
    pub change_delay_seconds: u32,
    /// The shortest time between two announcements of changes of one event.
    pub change_pause_minutes: u32,
    /// The e-mails that one organizer causes within an hour; 0 means no limit.
    pub emails_per_organizer_max: u32,
    /// The e-mails to one person that organizers cause within an hour; 0 means no limit.
    pub emails_per_recipient_max: u32,
    /// The e-mails to one person about one event that its organizer causes within an hour; 0 means no limit.
    pub emails_per_event_max: u32,
}

impl Default for NotifySettings {
    fn default() -> NotifySettings {
        NotifySettings {
            digest_minutes: 0,
            retention_days: 90,
            change_delay_seconds: 10,
            change_pause_minutes: 10,
            emails_per_organizer_max: 20_000,
            emails_per_recipient_max: 30,
            emails_per_event_max: 6,
        }
    }
}

impl NotifySettings {
    /// Checks the values. Fails with the name of the first invalid setting and the values it accepts.
    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        const EMAILS: (u32, u32) = (0, 1_000_000);
        for (name, value, (min, max)) in [
            ("notify.digest_minutes", self.digest_minutes, (0, 10_080)),
            // A digest may collect for 7 days, and its events are needed until it is sent.
            ("notify.retention_days", self.retention_days, (8, 3_650)),
            ("notify.change_delay_seconds", self.change_delay_seconds, (0, 3_600)),
            ("notify.change_pause_minutes", self.change_pause_minutes, (0, 1_440)),
            ("notify.emails_per_organizer_max", self.emails_per_organizer_max, EMAILS),
            ("notify.emails_per_recipient_max", self.emails_per_recipient_max, EMAILS),
            ("notify.emails_per_event_max", self.emails_per_event_max, EMAILS),
        ] {
            if !(min..=max).contains(&value) {
                return Err(InvalidSetting::new(name, format!("must be a number from {min} to {max}")));
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MailSettings {
    /// The sender of all e-mails: an address, or a name and an address.
    pub from: String,
    /// Where answers go, if not to `from`.
    pub reply_to: Option<String>,
    /// A folder with templates that replace the built-in ones.
    pub templates_dir: Option<PathBuf>,
    /// Renders and records every e-mail, and sends none.
    pub shadow: bool,
    /// Whether a connection to `smtp://` must be encrypted.
    pub starttls: Starttls,
    /// A PEM file with certificates that are trusted in addition to the public certificate authorities.
    pub ca_file: Option<PathBuf>,
    /// How many e-mails a process sends at a time.
    pub concurrency: u32,
    /// The time limit for the transfer of one e-mail.
    pub timeout_ms: u32,
    /// The pause after the first failure of an e-mail; it doubles with each further one.
    pub retry_first_ms: u32,
    pub retry_max_ms: u32,
    /// How long an e-mail is retried before it is dead.
    pub retry_hours: u32,
    /// How long the record of an e-mail is retained.
    pub retention_days: u32,
    /// How long a captured e-mail is retained.
    pub capture_hours: u32,
    /// How many captured e-mails are retained.
    pub capture_max: u32,
}

/// Whether a connection to `smtp://` must be encrypted. A connection to `smtps://` always is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Starttls {
    /// Yes, unless the server is on the same machine.
    #[default]
    Auto,
    Required,
    /// Plain text, also to another machine.
    Never,
}

impl Default for MailSettings {
    fn default() -> MailSettings {
        MailSettings {
            from: "Pillarbox <no-reply@localhost>".to_owned(),
            reply_to: None,
            templates_dir: None,
            shadow: false,
            starttls: Starttls::Auto,
            ca_file: None,
            concurrency: 10,
            timeout_ms: 30_000,
            retry_first_ms: 10_000,
            retry_max_ms: 900_000,
            retry_hours: 72,
            retention_days: 30,
            capture_hours: 24,
            capture_max: 1_000,
        }
    }
}

impl Settings {
    /// The policy for new notifications.
    pub(crate) fn policy(&self) -> Policy {
        let notify = &self.notify;
        Policy {
            default_rules: Rules::default_with(notify.digest_minutes),
            change_delay: TimeDelta::seconds(i64::from(notify.change_delay_seconds)),
            change_pause: TimeDelta::minutes(i64::from(notify.change_pause_minutes)),
            email_limits: EmailLimits {
                per_organizer: notify.emails_per_organizer_max,
                per_recipient: notify.emails_per_recipient_max,
                per_event: notify.emails_per_event_max,
            },
        }
    }
}

impl MailSettings {
    /// Checks the values. Fails with the name of the first invalid setting and the values it accepts.
    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        self.sender()?;
        self.answers_to()?;
        for (name, value, (min, max)) in [
            ("mail.concurrency", self.concurrency, (1, 100)),
            ("mail.timeout_ms", self.timeout_ms, (500, 300_000)),
            ("mail.retry_first_ms", self.retry_first_ms, (100, 3_600_000)),
            ("mail.retry_max_ms", self.retry_max_ms, (self.retry_first_ms, 86_400_000)),
            ("mail.retry_hours", self.retry_hours, (1, 720)),
            ("mail.retention_days", self.retention_days, (1, 3_650)),
            ("mail.capture_hours", self.capture_hours, (1, 8_760)),
            ("mail.capture_max", self.capture_max, (1, 100_000)),
        ] {
            if !(min..=max).contains(&value) {
                return Err(InvalidSetting::new(name, format!("must be a number from {min} to {max}")));
            }
        }
        Ok(())
    }

    /// The sender of all e-mails. Fails if the address is invalid.
    pub(crate) fn sender(&self) -> Result<Mailbox, InvalidSetting> {
        parse("mail.from", &self.from)
    }

    /// The address for answers, if one is set. Fails if it is invalid.
    pub(crate) fn answers_to(&self) -> Result<Option<Mailbox>, InvalidSetting> {
        self.reply_to.as_ref().map(|text| parse("mail.reply_to", text)).transpose()
    }
}

fn parse(setting: &str, text: &str) -> Result<Mailbox, InvalidSetting> {
    let invalid = || {
        InvalidSetting::new(
            setting,
            "must be an address such as no-reply@example.org or Example <no-reply@example.org>",
        )
    };
    if text.chars().any(char::is_control) {
        return Err(invalid());
    }
    let mailbox: Mailbox = text.parse().map_err(|_| invalid())?;
    // The domain of the sender is also the domain of every Message-ID, which is ASCII.
    if mailbox.email.to_string().is_ascii() { Ok(mailbox) } else { Err(invalid()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_address_or_number_is_named() {
        MailSettings::default().check().unwrap();
        let refused = |change: fn(&mut MailSettings)| {
            let mut settings = MailSettings::default();
            change(&mut settings);
            settings.check().unwrap_err().to_string()
        };
        for from in ["", "no-reply", "a@b\r\nBcc: c@d", "A <a@b> B", "a@b, c@d", "jürgen@example.org"] {
            let settings = MailSettings { from: from.to_owned(), ..MailSettings::default() };
            assert!(settings.check().unwrap_err().to_string().contains("mail.from"), "{from}");
        }
        assert!(refused(|settings| settings.reply_to = Some("x".to_owned())).contains("mail.reply_to"));
        assert!(refused(|settings| settings.concurrency = 0).contains("mail.concurrency"));
        assert!(refused(|settings| settings.retry_max_ms = 1).contains("mail.retry_max_ms"));
    }
}
