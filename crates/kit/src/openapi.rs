//! The API's description: what every route shares is added here, so that no route can forget it.

use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Content, Header, HeaderBuilder, ObjectBuilder, OpenApi, PathItem, Ref, RefOr, Response, ResponseBuilder,
};
use utoipa::{PartialSchema, ToSchema};

use crate::problem::{CONTENT_TYPE, FieldError, Place, ProblemBody};

/// The name of the security scheme; a route with it needs a caller.
pub const BEARER: &str = "bearer";

/// Adds the security scheme, the problem schemas, and to every operation the problems that any of them may answer.
pub fn complete(api: &mut OpenApi) {
    let components = api.components.get_or_insert_default();
    let bearer = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .bearer_format("JWT or API key")
        .description(Some("A user's JWT (`pillarbox token`) or an API key (`pillarbox key create`)."))
        .build();
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    components.schemas.insert("Problem".to_owned(), ProblemBody::schema());
    components.schemas.insert(FieldError::name().into_owned(), FieldError::schema());
    components.schemas.insert(Place::name().into_owned(), Place::schema());
    for (path, item) in &mut api.paths.paths {
        for (method, operation) in operations(item) {
            // The functions' names, which are the default, repeat: every list is a `list`.
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

/// `DELETE /admin/v1/keys/{id}` is `delete_admin_v1_keys_id`.
fn operation_id(method: &str, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    std::iter::once(method).chain(words).collect::<Vec<_>>().join("_")
}

fn add_problems(operation: &mut Operation) {
    let mut expected = vec![("500", "Our mistake; the log has the cause")];
    if operation.security.is_some() {
        expected.push(("401", "Who is calling is not known: the header is missing, or the key or token is not valid"));
        expected.push(("403", "The caller's role does not allow this"));
        expected.push(("429", "Too many requests; see Retry-After"));
        expected.push(("503", "Too much at once, or a dependency is away; see Retry-After"));
    }
    if operation.parameters.is_some() {
        expected.push(("400", "A parameter is not what it should be"));
    }
    if operation.request_body.is_some() {
        expected.push(("400", "The body is not JSON"));
        expected.push(("408", "The body took too long"));
        expected.push(("413", "The body is too large"));
        expected.push(("415", "The body is not announced as JSON"));
        expected.push(("422", "A field is not what it should be; `errors` says which"));
    }
    for (status, description) in expected {
        let responses = &mut operation.responses.responses;
        let response = || ResponseBuilder::new().description(description).build().into();
        responses.entry(status.to_owned()).or_insert_with(response);
    }
}

/// Gives every error without a body of its own the problem, and responses the words and the headers that come with them.
fn describe_responses(method: &str, operation: &mut Operation) {
    let is_list = operation.parameters.iter().flatten().any(is_cursor);
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        // OpenAPI requires one of every response, and tools refuse the whole document without it.
        if response.description.is_empty() {
            response.description = usual_description(method, status, is_list).to_owned();
        }
        if status.starts_with(['4', '5']) && response.content.is_empty() {
            let problem = Content::new(Some(Ref::from_schema_name("Problem")));
            response.content.insert(CONTENT_TYPE.to_owned(), problem.into());
            add_headers(response, problem_headers(status));
        }
        if status == "200" && is_list {
            add_headers(response, &[("Link", Type::String, "The next page, if there is one: `<...>; rel=\"next\"`")]);
        }
    }
}

fn usual_description(method: &str, status: &str, is_list: bool) -> &'static str {
    match (method, status) {
        ("get", "200") if is_list => "A page of them",
        ("get", "200") => "What was asked for",
        (_, "200") => "It is done; this is what came of it",
        (_, "201") => "It is made",
        (_, "202") => "It is taken, and on disk; the work comes after",
        (_, _) => "The answer",
    }
}

fn is_cursor(parameter: &RefOr<Parameter>) -> bool {
    matches!(parameter, RefOr::T(parameter) if parameter.name == "cursor")
}

type HeaderOf = (&'static str, Type, &'static str);

fn problem_headers(status: &str) -> &'static [HeaderOf] {
    const RETRY_AFTER: HeaderOf = ("Retry-After", Type::Integer, "Seconds to wait before the next try");
    match status {
        "401" => &[("WWW-Authenticate", Type::String, "`Bearer`, with the realm")],
        "429" => &[
            RETRY_AFTER,
            ("RateLimit-Limit", Type::Integer, "Requests that a caller has in a second"),
            ("RateLimit-Remaining", Type::Integer, "How many of them are left"),
            ("RateLimit-Reset", Type::Integer, "Seconds until there are more"),
        ],
        "503" => &[RETRY_AFTER],
        _ => &[],
    }
}

fn add_headers(response: &mut Response, headers: &[HeaderOf]) {
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
    fn operations_of_one_name_get_ids_of_their_own() {
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
