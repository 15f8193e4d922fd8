//! The filters of the operator's lists and bulk actions. One definition serves the command line and the HTTP API.

use chrono::{DateTime, Utc};
use clap::Args;
use kit::auth::Tenant;
use mailbox::operations::dead_letters::Selection;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::{Error, time};

/// Selects parked messages or replays.
#[derive(Debug, Args, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConsumerFilter {
    /// Only those of this consumer
    #[arg(long, value_name = "NAME")]
    pub(crate) consumer: Option<String>,
}

/// Declares a struct with the filters for dead letters and the given further fields. `serde(flatten)` cannot do this: with
/// it, an error no longer names the field it is about.
macro_rules! with_dead_letter_filters {
    ($(#[$attribute:meta])* $name:ident { $($(#[$field_attribute:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$attribute])*
        pub(crate) struct $name {
            /// Only dead letters of this consumer
            #[arg(long, value_name = "NAME")]
            consumer: Option<String>,
            /// Only this topic and the topics below it
            #[arg(long, value_name = "NAME")]
            topic: Option<String>,
            /// Only this tenant
            #[arg(long, value_name = "NAME")]
            tenant: Option<Tenant>,
            /// Given up at this time or later
            #[arg(long, value_name = "TIME", value_parser = time::parse,
                help = "Given up at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)")]
            #[serde(default, deserialize_with = "kit::instant::optional")]
            from: Option<DateTime<Utc>>,
            /// Given up before this time
            #[arg(long, value_name = "TIME", value_parser = time::parse)]
            #[serde(default, deserialize_with = "kit::instant::optional")]
            to: Option<DateTime<Utc>>,
            $($(#[$field_attribute])* $field: $type,)*
        }
    };
}

with_dead_letter_filters! {
    /// Selects the dead letters of a list; without filters, all of them.
    #[derive(Debug, Default, PartialEq, Args, Deserialize, IntoParams, ToSchema)]
    #[serde(deny_unknown_fields, default)]
    #[into_params(parameter_in = Query)]
    DeadLetterFilters {}
}

with_dead_letter_filters! {
    /// Selects the dead letters of a bulk action: filters, or `all`.
    #[derive(Debug, Args, Deserialize, ToSchema)]
    #[serde(deny_unknown_fields)]
    #[schema(as = Chosen)]
    DeadLetterSelection {
        /// All dead letters, without a filter
        #[arg(long, conflicts_with_all = DEAD_LETTER_FILTERS)]
        #[serde(default)]
        all: bool,
    }
}

/// Describes a [`DeadLetterSelection`] that is not empty.
pub(crate) struct DeadLetterChoice;

impl PartialSchema for DeadLetterChoice {
    fn schema() -> RefOr<Schema> {
        kit::openapi::filters_or_all(DeadLetterSelection::schema(), json!({"topic": "order"}))
    }
}

impl ToSchema for DeadLetterChoice {
    fn name() -> std::borrow::Cow<'static, str> {
        DeadLetterSelection::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        DeadLetterSelection::schemas(schemas);
    }
}

/// The command line options of [`DeadLetterFilters`].
const DEAD_LETTER_FILTERS: [&str; 5] = ["consumer", "topic", "tenant", "from", "to"];
/// The command line options of [`DeadLetterSelection`].
pub(crate) const DEAD_LETTER_SELECTION: [&str; 6] = ["consumer", "topic", "tenant", "from", "to", "all"];

impl DeadLetterFilters {
    pub(crate) fn into_query(self) -> Selection {
        Selection {
            consumer: self.consumer,
            topic: self.topic,
            tenant: self.tenant.map(String::from),
            from: self.from,
            to: self.to,
            ..Selection::default()
        }
    }
}

impl DeadLetterSelection {
    pub(crate) fn is_all(&self) -> bool {
        self.all
    }

    /// Fails unless it has either filters or `all`: an empty request must not affect every dead letter.
    pub(crate) fn into_query(self) -> Result<Selection, Error> {
        let DeadLetterSelection { consumer, topic, tenant, from, to, all } = self;
        let filters = DeadLetterFilters { consumer, topic, tenant, from, to };
        match (all, filters == DeadLetterFilters::default()) {
            (false, true) => Err(Error::NoFilter),
            (true, false) => Err(Error::AllAndFilters),
            (true, true) | (false, false) => Ok(filters.into_query()),
        }
    }
}
