//! One-click unsubscribe: the link in an e-mail is enough.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{Html, IntoResponse, Response};
use http::HeaderValue;
use http_kit::auth::Caller;
use http_kit::extract::Query;
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Notify;
use crate::error::Error;
use crate::flow::preferences as flow;
use crate::templates::notification::words;
use crate::unsubscribe::Unsubscription;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(confirm_unsubscribe, unsubscribe))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct UnsubscribeParams {
    /// The token of the link in an e-mail.
    token: String,
}

/// Show a page that asks whether to unsubscribe
///
/// It changes nothing: programs that check e-mails open every link.
#[utoipa::path(get, path = "/notify/v1/unsubscribe", operation_id = "getUnsubscribePage", tag = "notify", params(UnsubscribeParams),
    security((), ("bearer" = [])),
    responses((status = 200, body = String, content_type = "text/html", description = "A page with a button"),
        (status = 404, description = "The link is not valid")))]
async fn confirm_unsubscribe(
    State(notify): State<Arc<Notify>>,
    _: Option<Caller>,
    Query(UnsubscribeParams { token }): Query<UnsubscribeParams>,
) -> Result<Response, Problem> {
    let muted = verified(&notify, &token)?;
    let name = escaped(&words(&muted.event_type));
    Ok(page(&format!(
        "<p>No more e-mails about: <strong>{name}</strong>?</p>\n\
         <form method=\"post\"><button type=\"submit\">Unsubscribe</button></form>"
    )))
}

/// Unsubscribe from the e-mails of an event type
///
/// The link in an e-mail is enough (RFC 8058); the body is ignored.
#[utoipa::path(post, path = "/notify/v1/unsubscribe", operation_id = "unsubscribe", tag = "notify", params(UnsubscribeParams),
    security((), ("bearer" = [])),
    responses((status = 200, body = String, content_type = "text/html", description = "The event type is muted"),
        (status = 404, description = "The link is not valid"),
        (status = 409, description = "The event type is critical by now")))]
async fn unsubscribe(
    State(notify): State<Arc<Notify>>,
    _: Option<Caller>,
    Query(UnsubscribeParams { token }): Query<UnsubscribeParams>,
) -> Result<Response, Problem> {
    let muted = verified(&notify, &token)?;
    let name = escaped(&words(&muted.event_type));
    let mut tx = notify.db.begin().await.map_err(Error::from)?;
    flow::unsubscribe(&mut tx, muted, &notify.policy.default_rules).await?;
    tx.commit().await.map_err(Error::from)?;
    Ok(page(&format!("<p>You get no more e-mails about: <strong>{name}</strong>.</p>")))
}

fn verified(notify: &Notify, token: &str) -> Result<Unsubscription, Error> {
    notify.links.verify(token).ok_or(Error::InvalidUnsubscribeLink)
}

fn page(content: &str) -> Response {
    let html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Unsubscribe</title></head>\n\
         <body style=\"font-family:sans-serif;max-width:30em;margin:3em auto\">\n{content}\n</body></html>\n"
    );
    // The address of the page is the permission to mute.
    let headers = [
        (http::header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (http::header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, Html(html)).into_response()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
