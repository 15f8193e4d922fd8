//! The filters of the operator's lists and bulk actions.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use pillarbox::operations::dead_letters::Selection;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::Error;

/// Selects parked messages or replays.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConsumerFilter {
    /// Only those of this consumer
    pub(crate) consumer: Option<String>,
}

/// Declares a struct with the filters for dead letters and the given further fields. `serde(flatten)` cannot do this: with
/// it, an error no longer names the field it is about.
macro_rules! with_dead_letter_filters {
    ($(#[$attribute:meta])* $name:ident, $(#[$of_tenant:meta])* tenant { $($(#[$field_attribute:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$attribute])*
        pub(crate) struct $name {
            /// Only dead letters of this consumer
            consumer: Option<String>,
            /// Only this topic and the topics below it
            topic: Option<String>,
            /// Only this tenant
            $(#[$of_tenant])*
            tenant: Option<Tenant>,
            /// Given up at this time or later
            #[serde(default, deserialize_with = "http_kit::instant::optional")]
            from: Option<DateTime<Utc>>,
            /// Given up before this time
            #[serde(default, deserialize_with = "http_kit::instant::optional")]
            to: Option<DateTime<Utc>>,
            $($(#[$field_attribute])* $field: $type,)*
        }
    };
}

with_dead_letter_filters! {
    /// Selects the dead letters of a list; without filters, all of them.
    #[derive(Debug, Default, PartialEq, Deserialize, IntoParams, ToSchema)]
    #[serde(deny_unknown_fields, default)]
    #[into_params(parameter_in = Query)]
    DeadLetterFilters,
    #[schema(value_type = Option<http_kit::openapi::TenantName>)]
    #[param(value_type = Option<http_kit::openapi::TenantName>)]
    tenant {}
}

with_dead_letter_filters! {
    /// Selects the dead letters of a bulk action: filters, or `all`.
    #[derive(Debug, Deserialize, ToSchema)]
    #[serde(deny_unknown_fields)]
    #[schema(as = ConsumerDeadLetterSelection)]
    DeadLetterSelection,
    #[schema(value_type = Option<http_kit::openapi::TenantName>)]
    tenant {
        /// All dead letters, without a filter
        #[serde(default)]
        all: bool,
    }
}

/// Describes a [`DeadLetterSelection`] that is not empty.
pub(crate) struct DeadLetterChoice;

impl PartialSchema for DeadLetterChoice {
    fn schema() -> RefOr<Schema> {
        http_kit::openapi::filters_or_all(DeadLetterSelection::schema(), json!({"topic": "order"}))
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
