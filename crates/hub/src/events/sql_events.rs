//! The setting `hub.sql_events`: which messages that are posted in SQL are hub events of their tenant.

use std::sync::Arc;

use pillarbox::log::{MessagePattern, Source};
use runtime::config::List;
use serde::{Deserialize, Serialize};

use crate::directory::domain::EventTypes;
use crate::events::export::{EMAIL_PREFIX, TOPICS_MAX, binding_key};

/// The source of messages that are posted in SQL.
pub(crate) const SQL_SOURCE: Source = Source::new(contracts::SQL_SOURCE);

/// Topics of messages that are posted in SQL, in the syntax of event types. E-mails are never among them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "List<EventTypes>", into = "Vec<EventTypes>")]
pub struct SqlEvents(Arc<[EventTypes]>);

impl Default for SqlEvents {
    /// All topics.
    fn default() -> SqlEvents {
        SqlEvents(EventTypes::try_from("*".to_owned()).into_iter().collect())
    }
}

/// Why the setting is refused.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSqlEvents {
    #[error("must have at most {TOPICS_MAX} topics")]
    TooMany,
    #[error(
        "`{0}` matches e-mails, which are never sent as webhooks; list other topics, such as `order.*`, or `*` for all but \
         e-mails"
    )]
    Emails(String),
}

impl TryFrom<List<EventTypes>> for SqlEvents {
    type Error = InvalidSqlEvents;

    fn try_from(List(types): List<EventTypes>) -> Result<SqlEvents, InvalidSqlEvents> {
        if types.len() > TOPICS_MAX {
            return Err(InvalidSqlEvents::TooMany);
        }
        let is_email = |types: &&EventTypes| types.as_str().split('.').next() == Some(EMAIL_PREFIX);
        match types.iter().find(is_email) {
            Some(email) => Err(InvalidSqlEvents::Emails(email.as_str().to_owned())),
            None => Ok(SqlEvents(types.into())),
        }
    }
}

impl From<SqlEvents> for Vec<EventTypes> {
    fn from(events: SqlEvents) -> Vec<EventTypes> {
        events.0.to_vec()
    }
}

impl SqlEvents {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all topics but e-mails are hub events.
    pub(crate) fn matches_all(&self) -> bool {
        self.0.iter().any(|types| types.as_str() == "*")
    }

    /// Matches the messages with the listed topics. Must not be used if the list is empty.
    pub(crate) fn pattern(&self) -> MessagePattern {
        of_sql(self.0.iter().map(binding_key).collect())
    }

    /// Matches e-mails, which other patterns may also match.
    pub(crate) fn emails() -> MessagePattern {
        of_sql(vec![format!("{EMAIL_PREFIX}.#")])
    }
}

/// Matches messages that were posted in SQL with these topics.
pub(crate) fn of_sql(topics: Vec<String>) -> MessagePattern {
    MessagePattern { sources: vec![SQL_SOURCE.as_str().to_owned()], topics, ..MessagePattern::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn topics_of_emails_are_refused_with_what_is_accepted() {
        let parse =
            |topics: &[&str]| serde_json::from_value::<SqlEvents>(json!(topics)).map_err(|error| error.to_string());
        for bad in ["email", "email.*", "email.code"] {
            let error = parse(&["order.*", bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}`")) && error.contains("`order.*`"), "{error}");
        }
        assert!(parse(&["order.#"]).unwrap_err().contains("`order.#` is not a valid event type"));
        assert!(parse(&["a"; 101]).unwrap_err().contains("at most 100"));
        assert!(parse(&[]).unwrap().is_empty());
        assert!(parse(&["order.*", "*"]).unwrap().matches_all() && SqlEvents::default().matches_all());
        assert!(!parse(&["order.*", "emails.sent"]).unwrap().matches_all());
    }
}
