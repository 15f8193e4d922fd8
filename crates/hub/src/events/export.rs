//! The setting `hub.export`: which messages of the services are also hub events.

use std::sync::Arc;

use contracts::INTERNAL_TOPICS;
use runtime::config::List;
use serde::{Deserialize, Serialize};

use crate::directory::domain::EventTypes;

/// The first part of the topics of e-mails. They are never exported: they contain sign-in codes and links for their
/// recipient only.
pub(crate) const EMAIL_PREFIX: &str = "email";
pub(crate) const TOPICS_MAX: usize = 100;

/// Topics of the services, in the syntax of event types. None of them matches e-mails.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "List<EventTypes>", into = "Vec<EventTypes>")]
pub struct Export(Arc<[EventTypes]>);

/// Why the setting is refused.
#[derive(Debug, thiserror::Error)]
pub enum InvalidExport {
    #[error("must have at most {TOPICS_MAX} topics")]
    TooMany,
    #[error("`*` would export e-mails as well; list the topics by name, such as `event.*` and `join.*`")]
    All,
    #[error("`{0}` matches e-mails, which are never exported; list other topics, such as `event.*`")]
    Emails(String),
    #[error("`{0}` is internal to the services and never exported; remove it")]
    Internal(String),
}

impl TryFrom<List<EventTypes>> for Export {
    type Error = InvalidExport;

    fn try_from(List(types): List<EventTypes>) -> Result<Export, InvalidExport> {
        if types.len() > TOPICS_MAX {
            return Err(InvalidExport::TooMany);
        }
        types.iter().map(EventTypes::as_str).try_for_each(check)?;
        Ok(Export(types.into()))
    }
}

impl From<Export> for Vec<EventTypes> {
    fn from(export: Export) -> Vec<EventTypes> {
        export.0.to_vec()
    }
}

fn check(topics: &str) -> Result<(), InvalidExport> {
    if topics == "*" {
        Err(InvalidExport::All)
    } else if topics.split('.').next() == Some(EMAIL_PREFIX) {
        Err(InvalidExport::Emails(topics.to_owned()))
    } else if INTERNAL_TOPICS.contains(&topics) {
        Err(InvalidExport::Internal(topics.to_owned()))
    } else {
        Ok(())
    }
}

impl Export {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a message of a service with this topic is exported.
    pub(crate) fn covers(&self, topic: &str) -> bool {
        self.0.iter().any(|types| types.include(topic))
    }

    /// The topics in RabbitMQ's syntax.
    pub(crate) fn patterns(&self) -> Vec<String> {
        self.0.iter().map(binding_key).collect()
    }
}

/// The pattern in RabbitMQ's syntax: `event.*` matches all topics below `event`, at any depth, but not `event` itself.
pub(crate) fn binding_key(types: &EventTypes) -> String {
    match types.as_str().strip_suffix('*') {
        Some(above) => format!("{above}*.#"),
        None => types.as_str().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn export(topics: &[&str]) -> Result<Export, String> {
        serde_json::from_value(json!(topics)).map_err(|error| error.to_string())
    }

    #[test]
    fn emails_and_invalid_topics_are_rejected_with_what_is_accepted() {
        for bad in ["*", "email", "email.*", "email.code", "email.code.*"] {
            let error = export(&["join.*", bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}`")) && error.contains("`event.*`"), "{error}");
        }
        for bad in ["event.", "event*", "event.#", "", "a b"] {
            let error = export(&[bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}` is not a valid event type")), "{error}");
        }
        assert!(export(&["a"; 101]).unwrap_err().contains("at most 100"));
        export(&["event.*", "emails.sent", "mod.kicked"]).unwrap();
    }

    #[test]
    fn internal_topics_are_rejected() {
        for topic in INTERNAL_TOPICS {
            assert!(export(&[topic]).unwrap_err().contains("internal to the services"), "{topic}");
        }
    }
}
