//! Completes the OpenAPI document: adds the parts that all operations have in common, so that no route can omit them, and
//! makes the schemas as strict as the API.

mod inputs;
mod problems;
mod schemas;

use utoipa::openapi::path::Operation;
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Header, HeaderBuilder, ObjectBuilder, OpenApi, PathItem, RefOr, Response};
use utoipa::{PartialSchema, ToSchema};

pub use self::inputs::accept_tenant_header;
pub use self::problems::{RouteProblem, document};
pub use self::schemas::filters_or_all;
use crate::problem::{FieldError, Location, ProblemBody};

// How a `pillarbox::log::Tenant` looks in the document, because the library does not know OpenAPI.
/// The name of a tenant. The data of one tenant is not visible to another.
#[derive(ToSchema)]
#[schema(value_type = String, example = "main", pattern = "^[a-z0-9][a-z0-9_-]{0,62}$")]
pub struct TenantName(#[expect(dead_code, reason = "this type only describes another")] String);

/// The name of the security scheme. An operation with it requires a caller.
const BEARER: &str = "bearer";

/// Adds the security scheme, the schemas of problems, and to every operation the problems that it may return. Removes from schemas and parameters what the API does not accept or return.
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
    schemas::tighten(api);
    let schemas = api.components.as_ref().map(|components| components.schemas.clone()).unwrap_or_default();
    for item in api.paths.paths.values_mut() {
        for (method, operation) in operations(item) {
            inputs::tighten(operation, &schemas);
            problems::add_common(operation);
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

/// Whether an operation needs a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Security {
    /// It is served without authentication, and ignores credentials.
    None,
    /// It needs no caller, but refuses credentials that are not valid.
    Optional,
    Required,
}

impl Security {
    fn of(operation: &Operation) -> Security {
        match &operation.security {
            None => Security::None,
            Some(alternatives) if alternatives.contains(&SecurityRequirement::default()) => Security::Optional,
            Some(_) => Security::Required,
        }
    }
}

/// Adds the default descriptions and headers of responses.
fn describe_responses(method: &str, operation: &mut Operation) {
    let is_list = has_parameter(operation, "cursor");
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        // OpenAPI requires a description of every response; tools reject a document without it.
        if response.description.is_empty() {
            response.description = default_description(method, status, is_list).to_owned();
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

fn has_parameter(operation: &Operation, name: &str) -> bool {
    let mut parameters = operation.parameters.iter().flatten();
    parameters.any(|parameter| matches!(parameter, RefOr::T(parameter) if parameter.name == name))
}

/// Name, type and description of a response header.
type HeaderSpec = (&'static str, Type, &'static str);

fn add_headers(response: &mut Response, headers: &[HeaderSpec]) {
    for (name, kind, description) in headers {
        let schema = ObjectBuilder::new().schema_type(kind.clone()).build();
        let header: Header = HeaderBuilder::new().schema(Some(schema)).description(Some(*description)).build();
        response.headers.insert((*name).to_owned(), header.into());
    }
}
