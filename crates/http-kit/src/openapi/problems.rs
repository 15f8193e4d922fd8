//! The problems that operations may return. Each has an example under the name of its problem type.
//!
//! What an operation has (security, parameters, a body) implies the problems of the layers and extractors, so they are
//! added here. A service documents the problems of its errors in one table, with [`document`].

use http::StatusCode;
use serde_json::json;
use utoipa::openapi::example::ExampleBuilder;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::schema::Type;
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, ResponseBuilder};

use super::{HeaderSpec, Security, add_headers, has_parameter, operations};
use crate::idempotency;
use crate::problem::CONTENT_TYPE;

/// A problem of some routes: the operations, the status, the problem type without its prefix, and an example of the
/// detail. The operations are a method and a path, such as `GET /hub/v1/events`. `*` as the method stands for all methods,
/// and a `*` at the end of the path for all paths with this prefix.
pub type RouteProblem = (&'static str, u16, &'static str, &'static str);

/// A problem that every operation with some property may return: status, type and detail.
type CommonProblem = (u16, &'static str, &'static str);

const OF_EVERY_OPERATION: &[CommonProblem] = &[
    (400, "malformed-header", "if-match: must not be repeated"),
    (500, "internal", "an internal error occurred; the server's log has the cause under this trace id"),
    (503, "unavailable", "a dependency is not available; /readyz names it"),
];
const OF_AUTHENTICATION: &[CommonProblem] = &[
    (401, "unauthorized", "send `Authorization: Bearer <JWT or API key>`"),
    (
        429,
        "rate-limited",
        "the limit of this API key is 100 requests per second; wait as long as the header Retry-After says",
    ),
    (503, "overloaded", "the server is overloaded; try again later"),
    (503, "try-again", "the request conflicted with another one; try again"),
    (503, "too-slow", "the request exceeded statement_timeout_ms; request less at once"),
    (503, "database-full", "the disk of the database is full; an operator must free some space"),
];
const OF_ROLES: &[CommonProblem] = &[
    (403, "forbidden", "this request requires the role admin"),
    (403, "tenant-suspended", "the tenant `acme` is suspended, so it neither sends nor receives"),
];
const OF_PATHS: &[CommonProblem] = &[(400, "malformed-path", "id: must be a UUID")];
const OF_QUERIES: &[CommonProblem] = &[(400, "malformed-query", "limit: must be a number from 1 to 100")];
const OF_IDEMPOTENCY_KEYS: &[CommonProblem] = &[
    (400, "idempotency-key", "Idempotency-Key must have 1 to 255 printable characters of ASCII"),
    (409, "still-running", "the first request with this Idempotency-Key is still running"),
    (
        422,
        "idempotency-key-reused",
        "this Idempotency-Key was used for another request: use a new key for each new request",
    ),
];
const OF_IF_MATCH: &[CommonProblem] =
    &[(412, "stale", "the current version is \"3.60f2a\": get it again, then repeat the change")];
const OF_BODIES: &[CommonProblem] = &[
    (400, "malformed-json", "the body is not valid JSON: a comma or a closing } is missing (line 1, column 20)"),
    (400, "broken-body", "the body ended early, or its framing is invalid"),
    (408, "body-timeout", "the body did not arrive within 15 s"),
    (
        413,
        "body-too-large",
        "a body is limited to 1048576 bytes: split a list or an import into several requests, and store larger data elsewhere and send a reference to it",
    ),
    (415, "unsupported-media-type", "send the body as JSON, with the header `content-type: application/json`"),
    (422, "validation-failed", "name: is required"),
];

/// Documents the problems of a service's own errors. An operation that has not yet described the status gets it.
pub fn document(api: &mut OpenApi, problems: &[RouteProblem]) {
    for (path, item) in &mut api.paths.paths {
        for (method, operation) in operations(item) {
            for (_, status, code, detail) in problems.iter().filter(|problem| applies(problem.0, method, path)) {
                add(operation, (*status, code, detail));
            }
        }
    }
}

fn applies(selected: &str, method: &str, path: &str) -> bool {
    let (selected_method, selected_path) = selected.split_once(' ').unwrap_or(("*", selected));
    let is_path = match selected_path.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix),
        None => path == selected_path,
    };
    is_path && (selected_method == "*" || selected_method.eq_ignore_ascii_case(method))
}

/// Adds the problems that the layers and extractors of an operation return, and the problem's body to each status that
/// has been described without one.
pub(super) fn add_common(operation: &mut Operation) {
    let in_part = |part: ParameterIn| {
        let is_there =
            |parameter: &RefOr<Parameter>| matches!(parameter, RefOr::T(found) if found.parameter_in == part);
        operation.parameters.iter().flatten().any(is_there)
    };
    let security = Security::of(operation);
    let properties = [
        (true, OF_EVERY_OPERATION),
        (security != Security::None, OF_AUTHENTICATION),
        (security == Security::Required, OF_ROLES),
        (in_part(ParameterIn::Path), OF_PATHS),
        (in_part(ParameterIn::Query), OF_QUERIES),
        (idempotency::HEADERS.iter().any(|name| has_parameter(operation, name)), OF_IDEMPOTENCY_KEYS),
        (has_parameter(operation, "if-match"), OF_IF_MATCH),
        (operation.request_body.is_some(), OF_BODIES),
    ];
    for (_, problems) in properties.into_iter().filter(|(has_property, _)| *has_property) {
        problems.iter().for_each(|problem| add(operation, *problem));
    }
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && status.starts_with(['4', '5'])
            && response.content.is_empty()
        {
            let content = Content::new(Some(Ref::from_schema_name("Problem")));
            response.content.insert(CONTENT_TYPE.to_owned(), content.into());
        }
    }
}

/// Adds an example of the problem to the operation's response with this status. A response of another kind, such as the
/// report of `/readyz`, stays unchanged.
fn add(operation: &mut Operation, (status, code, detail): CommonProblem) {
    let responses = &mut operation.responses.responses;
    let new = || ResponseBuilder::new().description(description(status)).build().into();
    let RefOr::T(response) = responses.entry(status.to_string()).or_insert_with(new) else { return };
    if response.content.is_empty() {
        let content = Content::new(Some(Ref::from_schema_name("Problem")));
        response.content.insert(CONTENT_TYPE.to_owned(), content.into());
    }
    let Some(RefOr::T(content)) = response.content.get_mut(CONTENT_TYPE) else { return };
    let title = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Error");
    let kind = format!("urn:pillarbox:problem:{code}");
    let value = json!({"type": kind, "title": title, "status": status, "detail": detail});
    content.examples.insert(code.to_owned(), ExampleBuilder::new().value(Some(value)).build().into());
    add_headers(response, headers(status));
}

/// The description of a status whose problems have several causes.
fn description(status: u16) -> &'static str {
    match status {
        400 => "A header, a parameter or the body is malformed",
        401 => "The header `Authorization` is missing, or its API key or token is not valid",
        403 => "The caller's role does not allow this",
        404 => "The resource does not exist",
        408 => "The body did not arrive in time",
        409 => "The request conflicts with the state of the resource, or with a request that is still running",
        412 => "The resource has another version than `If-Match`",
        413 => "The body is too large",
        415 => "The `Content-Type` of the body is not JSON",
        422 => "A field is not valid (`errors` lists all invalid fields), or the Idempotency-Key was used before",
        429 => "A limit is exceeded; try again after `Retry-After`",
        500 => "Internal error; the server's log has the cause under `trace_id`",
        503 => "The server is overloaded or a dependency is unavailable; try again after `Retry-After`",
        _ => "The request failed",
    }
}

fn headers(status: u16) -> &'static [HeaderSpec] {
    const RETRY_AFTER: HeaderSpec = ("Retry-After", Type::Integer, "Seconds to wait before the next attempt");
    match status {
        401 => &[("WWW-Authenticate", Type::String, "`Bearer`, with the realm")],
        429 => &[
            RETRY_AFTER,
            ("RateLimit-Limit", Type::Integer, "The number of requests that a caller may send per second"),
            ("RateLimit-Remaining", Type::Integer, "The number of requests left in this second"),
            ("RateLimit-Reset", Type::Integer, "Seconds until the limit is reset"),
        ],
        503 => &[RETRY_AFTER],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::openapi::path::{HttpMethod, OperationBuilder, ParameterBuilder};
    use utoipa::openapi::{OpenApiBuilder, PathItem, PathsBuilder};

    fn statuses(operation: Operation) -> Vec<String> {
        let mut operation = operation;
        add_common(&mut operation);
        operation.responses.responses.keys().cloned().collect()
    }

    #[test]
    fn the_parts_of_an_operation_imply_its_problems() {
        let header = |name: &str| ParameterBuilder::new().name(name).parameter_in(ParameterIn::Header).build();
        assert_eq!(statuses(OperationBuilder::new().build()), ["400", "500", "503"]);
        let with_key = OperationBuilder::new().parameter(header("idempotency-key")).parameter(header("if-match"));
        assert_eq!(statuses(with_key.build()), ["400", "409", "412", "422", "500", "503"]);
    }

    #[test]
    fn a_problem_is_documented_for_the_selected_routes_only() {
        assert!(applies("* /a/{id}*", "get", "/a/{id}/b") && applies("POST /a", "post", "/a"));
        assert!(
            !applies("POST /a", "get", "/a") && !applies("POST /a", "post", "/a/b") && !applies("* /b*", "get", "/a")
        );
        let operation = || OperationBuilder::new().build();
        let paths = PathsBuilder::new()
            .path("/a", PathItem::new(HttpMethod::Post, operation()))
            .path("/b", PathItem::new(HttpMethod::Post, operation()));
        let mut api = OpenApiBuilder::new().paths(paths.build()).build();
        document(&mut api, &[("POST /a", 404, "a-not-found", "there is no such a")]);
        let described = serde_json::to_value(&api).unwrap();
        let example = "/responses/404/content/application~1problem+json/examples/a-not-found/value/detail";
        assert_eq!(described["paths"]["/a"]["post"].pointer(example).unwrap(), "there is no such a");
        assert!(described["paths"]["/b"]["post"]["responses"]["404"].is_null());
    }
}
