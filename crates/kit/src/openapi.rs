//! Completes the OpenAPI document: adds the parts that all operations have in common, so that no route can omit them.

use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Content, Header, HeaderBuilder, ObjectBuilder, OpenApi, PathItem, Ref, RefOr, Response, ResponseBuilder,
};
use utoipa::{PartialSchema, ToSchema};

use crate::problem::{CONTENT_TYPE, FieldError, Location, ProblemBody};

/// The name of the security scheme. An operation with it requires a caller.
const BEARER: &str = "bearer";

/// Adds the security scheme, the schemas of problems, and to every operation its id and the problems that it may
/// return.
pub fn complete(api: &mut OpenApi) {
    let components = api.components.get_or_insert_default();
    let bearer = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .bearer_format("JWT or API key")
        .description(Some(
            "A user's JWT, from `pillarbox token` or a configured issuer, or an API key (`pillarbox key create`).",
        ))
        .build();
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    components.schemas.insert("Problem".to_owned(), ProblemBody::schema());
    components.schemas.insert(FieldError::name().into_owned(), FieldError::schema());
    components.schemas.insert(Location::name().into_owned(), Location::schema());
    for (path, item) in &mut api.paths.paths {
        for (method, operation) in operations(item) {
            // The default ids, the names of the functions, are not unique: every list is a `list`.
            operation.operation_id = Some(operation_id(method, path));
            add_problems(operation);
            describe_responses(method, operation);
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    [
        ("get", &mut item.get),
        ("put", &mut item.put),
        ("post", &mut item.post),
        ("delete", &mut item.delete),
        ("patch", &mut item.patch),
        ("head", &mut item.head),
        ("options", &mut item.options),
    ]
    .into_iter()
    .filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// Returns `delete_admin_v1_keys_id` for `DELETE /admin/v1/keys/{id}`.
fn operation_id(method: &str, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    std::iter::once(method).chain(words).collect::<Vec<_>>().join("_")
}

fn add_problems(operation: &mut Operation) {
    let mut expected = vec![("500", "Internal error; the server's log has the cause under `trace_id`")];
    if operation.security.is_some() {
        expected.push(("401", "The header `Authorization` is missing, or its API key or token is not valid"));
        expected.push(("403", "The caller's role does not allow this"));
        expected.push(("429", "The rate limit is exceeded; try again after `Retry-After`"));
        expected
            .push(("503", "The server is overloaded or a dependency is unavailable; try again after `Retry-After`"));
    }
    if operation.parameters.is_some() {
        expected.push(("400", "A parameter is not valid"));
    }
    if operation.request_body.is_some() {
        expected.push(("400", "The body is not JSON"));
        expected.push(("408", "The body did not arrive in time"));
        expected.push(("413", "The body is too large"));
        expected.push(("415", "The `Content-Type` of the body is not JSON"));
        expected.push(("422", "A field is not valid; `errors` lists all invalid fields"));
    }
    for (status, description) in expected {
        let responses = &mut operation.responses.responses;
        let response = || ResponseBuilder::new().description(description).build().into();
        responses.entry(status.to_owned()).or_insert_with(response);
    }
}

/// Adds the problem body to every error response without a body, and the default descriptions and headers.
fn describe_responses(method: &str, operation: &mut Operation) {
    let is_list = operation.parameters.iter().flatten().any(is_cursor);
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        // OpenAPI requires a description of every response; tools reject a document without it.
        if response.description.is_empty() {
            response.description = default_description(method, status, is_list).to_owned();
        }
        if status.starts_with(['4', '5']) && response.content.is_empty() {
            let problem = Content::new(Some(Ref::from_schema_name("Problem")));
            response.content.insert(CONTENT_TYPE.to_owned(), problem.into());
            add_headers(response, problem_headers(status));
        }
        if status == "200" && is_list {
            add_headers(
                response,
                &[("Link", Type::String, "The address of the next page, if there is one: `<...>; rel=\"next\"`")],
            );
        }
    }
}

fn default_description(method: &str, status: &str, is_list: bool) -> &'static str {
    match (method, status) {
        ("get", "200") if is_list => "One page of the list",
        ("get", "200") => "The requested resource",
        (_, "200") => "The request was executed; the body is its result",
        (_, "201") => "The resource was created",
        (_, "202") => "The request was accepted and stored durably; it is processed later",
        (_, _) => "The response",
    }
}

fn is_cursor(parameter: &RefOr<Parameter>) -> bool {
    matches!(parameter, RefOr::T(parameter) if parameter.name == "cursor")
}

/// Name, type and description of a response header.
type HeaderSpec = (&'static str, Type, &'static str);

fn problem_headers(status: &str) -> &'static [HeaderSpec] {
    const RETRY_AFTER: HeaderSpec = ("Retry-After", Type::Integer, "Seconds to wait before the next attempt");
    match status {
        "401" => &[("WWW-Authenticate", Type::String, "`Bearer`, with the realm")],
        "429" => &[
            RETRY_AFTER,
            ("RateLimit-Limit", Type::Integer, "The number of requests that a caller may send per second"),
            ("RateLimit-Remaining", Type::Integer, "The number of requests left in this second"),
            ("RateLimit-Reset", Type::Integer, "Seconds until the limit is reset"),
        ],
        "503" => &[RETRY_AFTER],
        _ => &[],
    }
}

fn add_headers(response: &mut Response, headers: &[HeaderSpec]) {
    for (name, kind, description) in headers {
        let schema = ObjectBuilder::new().schema_type(kind.clone()).build();
        let header: Header = HeaderBuilder::new().schema(Some(schema)).description(Some(*description)).build();
        response.headers.insert((*name).to_owned(), header.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::openapi::path::{HttpMethod, OperationBuilder};
    use utoipa::openapi::{OpenApiBuilder, PathsBuilder};

    #[test]
    fn operations_with_the_same_name_get_distinct_ids() {
        let list = || OperationBuilder::new().operation_id(Some("list")).build();
        let paths = PathsBuilder::new()
            .path("/v1/events", PathItem::new(HttpMethod::Get, list()))
            .path("/v1/events/{id}/seats.csv", PathItem::new(HttpMethod::Get, list()));
        let mut api = OpenApiBuilder::new().paths(paths.build()).build();
        complete(&mut api);
        let items = api.paths.paths.values_mut().flat_map(operations);
        let ids: Vec<_> = items.filter_map(|(_, operation)| operation.operation_id.as_deref()).collect();
        assert_eq!(ids, ["get_v1_events", "get_v1_events_id_seats_csv"]);
    }
}
