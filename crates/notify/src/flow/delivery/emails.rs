//! The e-mails of notifications: one for each, or a digest of many.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use contracts::notify::SOURCE;
use runtime::secret::digest;
use uuid::Uuid;

use crate::address;
use crate::domain::business_event::BusinessEvent;
use crate::domain::delivery_rules::Channel;
use crate::domain::notification::{Contact, DeliveryOutcome, DueNotification};
use crate::domain::{Content, NewMail};
use crate::flow::requests::Recorder;
use crate::templates::RenderError;
use crate::templates::notification::{self as texts, Reader};
use crate::unsubscribe::{UnsubscribeLinks, Unsubscription};

/// Renders the e-mails of notifications.
pub(crate) struct EmailTexts {
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) links: Arc<UnsubscribeLinks>,
}

/// A notification that becomes an e-mail, alone or in a digest.
pub(super) struct Draft<'n> {
    pub(super) notification: &'n DueNotification,
    event: &'n BusinessEvent,
    contact: &'n Contact,
    recipient: String,
    /// None if the event type cannot be muted.
    unsubscribe: Option<String>,
}

/// A notification as a part of a digest.
pub(super) struct Member<'n> {
    pub(super) draft: Draft<'n>,
    content: Content,
}

impl Draft<'_> {
    fn reader<'a>(&'a self, unsubscribe_link: &'a str) -> Reader<'a> {
        let Contact { name, locale, .. } = self.contact;
        Reader { name, locale, channel: Channel::Email, unsubscribe_link }
    }

    fn link(&self) -> &str {
        self.unsubscribe.as_deref().unwrap_or_default()
    }
}

impl EmailTexts {
    /// Fails with what follows if the user has no usable address.
    pub(super) fn draft<'n>(
        &self,
        notification: &'n DueNotification,
        event: &'n BusinessEvent,
        contact: &'n Contact,
        is_critical: bool,
    ) -> Result<Draft<'n>, DeliveryOutcome> {
        let email = contact.email.as_deref().ok_or(DeliveryOutcome::Skipped("the user has no e-mail address"))?;
        let recipient = address::parse(email).map_err(|_| DeliveryOutcome::Skipped("the e-mail address is invalid"))?;
        let muted = Unsubscription {
            user_id: notification.user_id,
            event_type: event.event_type.clone(),
            channel: Channel::Email,
        };
        let unsubscribe = self.links.link(&muted).filter(|_| !is_critical);
        Ok(Draft { notification, event, contact, recipient: recipient.to_string(), unsubscribe })
    }

    /// The e-mail of one notification. Fails with what follows if it cannot be rendered.
    pub(super) fn single(&self, draft: &Draft<'_>, now: DateTime<Utc>) -> Result<NewMail, DeliveryOutcome> {
        let content = self.render(draft, draft.link())?;
        Ok(self.mail(draft, content, texts::template_of(&draft.event.event_type), now))
    }

    /// A part of a digest. Fails with what follows if it cannot be rendered.
    pub(super) fn member<'n>(&self, draft: Draft<'n>) -> Result<Member<'n>, DeliveryOutcome> {
        // Without a link: the digest has one at its end.
        let content = self.render(&draft, "")?;
        Ok(Member { draft, content })
    }

    /// The e-mail that shows these notifications of one user and one event type, and stands for `not_shown` more. It has the
    /// identity of the first, which is not sent alone then. Fails if it cannot be rendered.
    pub(super) fn digest(
        &self,
        members: &[Member<'_>],
        not_shown: usize,
        now: DateTime<Utc>,
    ) -> Result<NewMail, RenderError> {
        let [Member { draft: first, .. }, ..] = members else { return Err(RenderError::UnknownTemplate) };
        let contents: Vec<&Content> = members.iter().map(|member| &member.content).collect();
        let reader = first.reader(first.link());
        let templates = &self.recorder.templates;
        let content = texts::render_digest(templates, &first.event.event_type, &contents, not_shown, reader)?;
        Ok(self.mail(first, content, texts::DIGEST.to_owned(), now))
    }

    fn render(&self, draft: &Draft<'_>, link: &str) -> Result<Content, DeliveryOutcome> {
        texts::render(&self.recorder.templates, draft.event, draft.reader(link))
            .map_err(|error| DeliveryOutcome::Failed(format!("the e-mail cannot be rendered: {error}")))
    }

    fn mail(&self, draft: &Draft<'_>, content: Content, template: String, now: DateTime<Utc>) -> NewMail {
        let idempotency_key = format!("notification:{}:{}", draft.event.id, draft.notification.user_id);
        NewMail {
            message_id: message_id(&idempotency_key),
            source: SOURCE.to_owned(),
            idempotency_key,
            user_id: Some(draft.notification.user_id),
            recipient: draft.recipient.clone(),
            template,
            content,
            unsubscribe: draft.unsubscribe.clone(),
            sender: draft.notification.sender.clone().unwrap_or_else(|| draft.notification.user_id.to_string()),
            status: self.recorder.status,
            created_at: now,
            give_up_at: now + self.recorder.retry_time,
            expires_at: None,
        }
    }
}

/// The same for the same notification, so that a repeated e-mail has the same Message-ID.
fn message_id(idempotency_key: &str) -> Uuid {
    let digest = digest(idempotency_key);
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}
