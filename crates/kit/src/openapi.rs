//! The API's description: what every route shares is added here, so that no route can forget it.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Content, HeaderBuilder, ObjectBuilder, OpenApi, PathItem, Ref, RefOr, ResponseBuilder, path::Operation,
    schema::Type,
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
    for item in api.paths.paths.values_mut() {
        for operation in operations(item) {
            add_problems(operation);
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch, &mut item.head, &mut item.options]
        .into_iter()
        .filter_map(Option::as_mut)
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
        responses.entry(status.to_owned()).or_insert_with(|| problem_response(status, description));
    }
}

fn problem_response(status: &str, description: &str) -> RefOr<utoipa::openapi::Response> {
    let schema = Ref::from_schema_name("Problem");
    let mut response =
        ResponseBuilder::new().description(description).content(CONTENT_TYPE, Content::new(Some(schema)));
    if matches!(status, "429" | "503") {
        let seconds = ObjectBuilder::new().schema_type(Type::Integer).build();
        response = response.header("Retry-After", HeaderBuilder::new().schema(Some(seconds)).build());
    }
    response.build().into()
}
