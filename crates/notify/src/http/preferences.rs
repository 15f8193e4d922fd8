//! Preferences of the signed-in user.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::{IntoResponse, Response};
use chrono::NaiveTime;
use http_kit::auth::User;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::Json;
use http_kit::field::Field;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::problem::{FieldError, Problem};
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::IDEMPOTENCY_KEY;
use super::event_types::{EVENT_TYPE_DETAIL, is_event_type, tag_of};
use crate::Notify;
use crate::domain::delivery_rules::{Channel, PREFERENCES_MAX, Preference, QuietHours, ShownPreferences};
use crate::flow::preferences::{self as flow, PreferenceChange};
use crate::view::preferences::PreferencesView;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(show_preferences, replace_preferences, change_preferences))
}

/// One preference.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewPreference)]
struct PreferenceBody {
    /// Absent: all types.
    #[schema(max_length = 187, pattern = "^[A-Za-z0-9_]+(\\.[A-Za-z0-9_]+)*$")]
    event_type: Option<String>,
    /// Absent: all channels.
    channel: Option<Channel>,
    enabled: bool,
}

/// The change of one preference.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PreferenceChange)]
struct ChangedPreference {
    /// Absent: all types.
    #[schema(max_length = 187, pattern = "^[A-Za-z0-9_]+(\\.[A-Za-z0-9_]+)*$")]
    event_type: Option<String>,
    /// Absent: all channels.
    channel: Option<Channel>,
    /// Null or absent removes the preference.
    enabled: Option<bool>,
}

/// When e-mails wait.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = QuietHoursChange)]
struct QuietHoursBody {
    /// An IANA name.
    #[schema(pattern = "^[A-Za-z0-9_+/-]+$", example = "Europe/Berlin")]
    time_zone: String,
    /// Local time.
    #[schema(pattern = "^([01][0-9]|2[0-3]):[0-5][0-9]$", example = "22:00")]
    from: String,
    /// Local time; on the next day if it is before `from`.
    #[schema(pattern = "^([01][0-9]|2[0-3]):[0-5][0-9]$", example = "07:00")]
    until: String,
}

/// All preferences.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"preferences": [{"channel": "email", "enabled": false}, {"event_type": "join.promoted", "channel": "email", "enabled": true}],
    "quiet_hours": {"time_zone": "Europe/Berlin", "from": "22:00", "until": "07:00"}}))]
struct NewPreferences {
    /// Of several with the same type and channel, the last one counts.
    #[schema(max_items = 500)]
    preferences: Vec<PreferenceBody>,
    /// Absent or null: none.
    quiet_hours: Option<QuietHoursBody>,
}

/// Some preferences.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"preferences": [{"event_type": "join.waitlisted", "enabled": false}]}))]
struct ChangedPreferences {
    /// Others stay as they are. Of several with the same type and channel, the last one counts.
    #[serde(default)]
    #[schema(max_items = 500)]
    preferences: Vec<ChangedPreference>,
    /// Absent: they stay as they are. Null: none.
    #[serde(default)]
    #[schema(value_type = Option<QuietHoursBody>)]
    quiet_hours: Field<QuietHoursBody>,
}

/// Show your preferences
///
/// With the known event types, and what applies to each.
#[utoipa::path(get, path = "/notify/v1/preferences", operation_id = "getNotificationPreferences", tag = "notify",
    params(("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security(("bearer" = [])),
    responses((status = 200, body = PreferencesView, headers(("etag" = String, description = "Changes with the preferences"))),
        (status = 304, description = "The cached response is current")))]
async fn show_preferences(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let shown = flow::show(&notify.db, user, &notify.policy.default_rules).await?;
    let version = shown.version;
    let view = PreferencesView::from(shown);
    // The rules of event types are part of the response and have separate versions.
    let digest = etag::of_content(&serde_json::to_string(&view).unwrap_or_default());
    let extra = digest.to_str().unwrap_or_default().trim_matches('"').to_owned();
    let tag = etag::with_extra(version.number, version.changed_at, extra);
    if if_none_match.matches(&tag) {
        Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response())
    } else {
        Ok(([(ETAG, tag)], Json(view)).into_response())
    }
}

/// Replace your preferences
#[utoipa::path(put, path = "/notify/v1/preferences", operation_id = "replaceNotificationPreferences", tag = "notify", request_body = NewPreferences,
    params(("if-match" = Option<String>, Header, description = "The ETag of the preferences as the client knows them"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = PreferencesView, headers(("etag" = String, description = "Changes with the preferences"))),
        (status = 409, description = "A critical event type cannot be muted"),
        (status = 412, description = "The preferences have changed since the given ETag")))]
async fn replace_preferences(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<NewPreferences>>,
) -> Result<StoredResponse, Problem> {
    let mut errors = Vec::new();
    let as_change = |body: PreferenceBody| {
        let PreferenceBody { event_type, channel, enabled } = body;
        ChangedPreference { event_type, channel, enabled: Some(enabled) }
    };
    let (saved, _) = checked_preferences(body.preferences.into_iter().map(as_change).collect(), &mut errors);
    let quiet = body.quiet_hours.and_then(|body| checked_quiet_hours(&body, &mut errors));
    let change = PreferenceChange { replaces_all: true, saved, deleted: Vec::new(), quiet: Some(quiet) };
    save(&notify, user, if_match, change, errors, identity).await
}

/// Change some of your preferences
#[utoipa::path(patch, path = "/notify/v1/preferences", operation_id = "updateNotificationPreferences", tag = "notify", request_body = ChangedPreferences,
    params(("if-match" = Option<String>, Header, description = "The ETag of the preferences as the client knows them"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = PreferencesView, headers(("etag" = String, description = "Changes with the preferences"))),
        (status = 409, description = "A critical event type cannot be muted"),
        (status = 412, description = "The preferences have changed since the given ETag")))]
async fn change_preferences(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<ChangedPreferences>>,
) -> Result<StoredResponse, Problem> {
    let mut errors = Vec::new();
    let (saved, deleted) = checked_preferences(body.preferences, &mut errors);
    let quiet = match body.quiet_hours {
        Field::Absent => None,
        Field::Null => Some(None),
        Field::Given(body) => Some(checked_quiet_hours(&body, &mut errors)),
    };
    let change = PreferenceChange { replaces_all: false, saved, deleted, quiet };
    save(&notify, user, if_match, change, errors, identity).await
}

async fn save(
    notify: &Arc<Notify>,
    user: Uuid,
    if_match: IfMatch,
    change: PreferenceChange,
    errors: Vec<FieldError>,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    if !errors.is_empty() {
        return Err(Problem::validation(errors));
    }
    let default = notify.policy.default_rules.clone();
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let shown: ShownPreferences = flow::change(tx, user, &if_match, &change, &default).await?;
            let tag = tag_of(shown.version);
            Ok(StoredResponse::json(StatusCode::OK, &PreferencesView::from(shown)).with_header(ETAG, tag))
        })
    })
    .await
    // For e-mails that no longer wait for the end of quiet hours.
    .inspect(|_| notify.wakes.deliveries.wake())
}

/// The preferences to save, and those to delete. Invalid ones are added to `errors`.
fn checked_preferences(
    list: Vec<ChangedPreference>,
    errors: &mut Vec<FieldError>,
) -> (Vec<Preference>, Vec<Preference>) {
    if list.len() > PREFERENCES_MAX {
        let detail = format!("must have at most {PREFERENCES_MAX} items");
        errors.push(FieldError::body("/preferences", detail));
    }
    // The last one of a type and channel counts: one statement cannot change a row twice.
    let mut last = BTreeMap::new();
    for (at, body) in list.into_iter().enumerate().take(PREFERENCES_MAX) {
        if body.event_type.as_deref().is_some_and(|name| !is_event_type(name)) {
            errors.push(FieldError::body(format!("/preferences/{at}/event_type"), EVENT_TYPE_DETAIL));
        }
        last.insert((body.event_type.unwrap_or_default(), body.channel), body.enabled);
    }
    let (mut saved, mut deleted) = (Vec::new(), Vec::new());
    for ((event_type, channel), enabled) in last {
        match enabled {
            Some(enabled) => saved.push(Preference { event_type, channel, enabled }),
            None => deleted.push(Preference { event_type, channel, enabled: false }),
        }
    }
    (saved, deleted)
}

fn checked_quiet_hours(body: &QuietHoursBody, errors: &mut Vec<FieldError>) -> Option<QuietHours> {
    let at = |field: &str| format!("/quiet_hours/{field}");
    let time_zone = body.time_zone.parse();
    if time_zone.is_err() {
        errors.push(FieldError::body(at("time_zone"), "must be the IANA name of a time zone, such as Europe/Berlin"));
    }
    let mut time = |field: &str, text: &str| {
        let time = NaiveTime::parse_from_str(text, "%H:%M").ok().filter(|_| text.len() == 5);
        if time.is_none() {
            errors.push(FieldError::body(at(field), "must be a local time such as 22:00"));
        }
        time
    };
    let (from, until) = (time("from", &body.from), time("until", &body.until));
    if from.is_some() && from == until {
        errors.push(FieldError::body(at("until"), "must differ from the beginning"));
    }
    Some(QuietHours { time_zone: time_zone.ok()?, from: from?, until: until? })
}
