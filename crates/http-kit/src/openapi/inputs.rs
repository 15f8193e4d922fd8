//! Makes the parameters of an operation as strict as the extractors that read them, and keeps optional ones out of the
//! prefilled form of `/docs`.

use std::collections::BTreeMap;

use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::Type;
use utoipa::openapi::{Content, ObjectBuilder, OpenApi, RefOr, Required, Schema};

use super::operations;
use super::schemas::{limit_years, replace_formats, without_null};
use crate::auth::TENANT_HEADER;
use crate::{etag, idempotency};

/// Adds patterns to the parameters that have a fixed form, and removes null, which no parameter and no body can be.
pub(super) fn tighten(operation: &mut Operation, schemas: &BTreeMap<String, RefOr<Schema>>) {
    let operation_id = operation.operation_id.clone().unwrap_or_default();
    // An optional body may be absent, which is not the same as null.
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        for content in body.content.values_mut() {
            if let RefOr::T(Content { schema: Some(schema), .. }) = content {
                without_null(schema);
            }
        }
    }
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else { continue };
        if let Some(schema) = &mut parameter.schema {
            without_null(schema);
            replace_formats(schema);
            limit_years(schema);
            if parameter.parameter_in == ParameterIn::Header {
                add_header_pattern(&parameter.name, schema);
            }
        }
        let example = match (&parameter.parameter_in, &parameter.required) {
            // `/docs` fills optional parameters with their examples, and so a list that is tried out would be empty.
            (ParameterIn::Query, Required::False) => {
                remove_schema_example(parameter, schemas);
                None
            }
            // Each request needs a different key, so each operation has another one.
            (ParameterIn::Header, Required::True) if idempotency::HEADERS.contains(&parameter.name.as_str()) => {
                Some(format!("try-{operation_id}").into())
            }
            _ => continue,
        };
        *parameter = ParameterBuilder::from(parameter.clone()).example(example).build();
    }
}

/// The pattern of the name of a tenant.
const TENANT_PATTERN: &str = "^[a-z0-9][a-z0-9_-]{0,62}$";

/// Adds the header `Pillarbox-Tenant` to every operation.
pub fn accept_tenant_header(api: &mut OpenApi) {
    let description = "The tenant that an API key of the tenant `main` with the role `manage` or `admin` acts for. Absent: the \
                       tenant of the caller";
    let schema = ObjectBuilder::new().schema_type(Type::String).pattern(Some(TENANT_PATTERN)).build();
    let header = ParameterBuilder::new()
        .name(TENANT_HEADER)
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(description))
        .schema(Some(schema))
        .build();
    for item in api.paths.paths.values_mut() {
        for (_, operation) in operations(item) {
            operation.parameters.get_or_insert_default().push(header.clone().into());
        }
    }
}

fn add_header_pattern(name: &str, schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::Object(object)) = schema else { return };
    object.pattern = match name {
        name if idempotency::HEADERS.contains(&name) => Some(idempotency::KEY_PATTERN.to_owned()),
        "if-match" | "if-none-match" => Some(etag::PATTERN.to_owned()),
        _ => return,
    };
}

/// Removes the example of the schema, which is inlined if it is a shared one.
fn remove_schema_example(parameter: &mut Parameter, schemas: &BTreeMap<String, RefOr<Schema>>) {
    if let Some(RefOr::Ref(reference)) = &parameter.schema {
        let name = reference.ref_location.rsplit('/').next().unwrap_or_default();
        if let Some(RefOr::T(shared @ Schema::Object(_))) = schemas.get(name) {
            parameter.schema = Some(RefOr::T(shared.clone()));
        }
    }
    if let Some(RefOr::T(Schema::Object(object))) = &mut parameter.schema {
        object.example = None;
    }
}
