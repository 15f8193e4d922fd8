//! Makes the schemas of bodies as strict as the API: null only where it is accepted, and patterns for texts and times.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use utoipa::openapi::schema::{AllOf, AnyOf, ArrayItems, KnownFormat, SchemaFormat, SchemaType, Type};
use utoipa::openapi::{Object, ObjectBuilder, OpenApi, RefOr, Schema};

/// The format of a line of text as [`crate::field::printable`] checks it; a length limit is separate. JSON Schema has no
/// such format, so the document has its pattern instead.
const LINE_FORMAT: &str = "line";
const LINE_PATTERN: &str = r"^[^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*$";
/// The format of a name as [`crate::shown_text::check_name`] checks it, and the parts of its pattern: invisible characters, spaces, dots,
/// and what may follow a dot. Characters beyond U+FFFF are in it as they are, because they have no escape.
const NAME_FORMAT: &str = "name";
const INVISIBLE: &str = concat!(
    r"\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e",
    r"\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff0-\ufffb",
    "\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}",
);
const SPACES: &str = r" \xa0\u1680\u2000-\u200a\u202f\u205f\u3000";
const DOTS: &str = r".\u3002\uff0e\uff61";
const SEPARATORS: &str = r#",;:!?'"()/&\-"#;
/// The scripts of which a word has letters of one only.
const LATIN: &str = concat!(
    r"a-zA-Z\xaa\xba\xc0-\xd6\xd8-\xf6\xf8-\u02af\u1e00-\u1eff\u2c60-\u2c7f\ua722-\ua787\ua78b-\ua7ff",
    r"\ufb00-\ufb06\uff21-\uff3a\uff41-\uff5a",
);
const CYRILLIC_OR_GREEK: &str = concat!(
    r"\u0370-\u0373\u0376-\u037d\u037f\u0386\u0388-\u052f\u1c80-\u1c8f\u1f00-\u1fff\u2de0-\u2dff",
    r"\ua640-\ua69f",
);
/// The years that [`crate::instant::check`] accepts.
const YEAR_PATTERN: &str = "^(19[7-9][0-9]|[2-9][0-9]{3})-";

/// Removes null from required fields and, since responses omit absent values, from all fields of responses; adds the
/// patterns of request bodies, and describes their defaults in words.
pub(super) fn tighten(api: &mut OpenApi) {
    let requests = schemas_of_requests(api);
    let Some(components) = &mut api.components else { return };
    for (name, schema) in &mut components.schemas {
        let is_request = requests.contains(name);
        each_object(schema, &mut |object| {
            let required = object.required.clone();
            for (name, field) in &mut object.properties {
                if !is_request || required.contains(name) {
                    without_null(field);
                }
                if is_request {
                    describe_default(field);
                }
            }
        });
        if is_request {
            replace_formats(schema);
            limit_years(schema);
        }
    }
}

/// Moves the default of a field to its description. Generators take a field with a default for one that is always there, or refuse
/// the default of an object.
fn describe_default(field: &mut RefOr<Schema>) {
    let RefOr::T(schema) = field else { return };
    let (default, description) = match schema {
        Schema::Object(object) => (&mut object.default, &mut object.description),
        Schema::Array(array) => (&mut array.default, &mut array.description),
        Schema::OneOf(one) => (&mut one.default, &mut one.description),
        Schema::AllOf(all) => (&mut all.default, &mut all.description),
        Schema::AnyOf(any) => (&mut any.default, &mut any.description),
        // utoipa may add kinds of schemas.
        _ => return,
    };
    if let Some(default) = default.take() {
        let text = description.get_or_insert_default();
        let separator = if text.is_empty() { "" } else { " " };
        text.push_str(&format!("{separator}Default: `{default}`."));
    }
}

/// The names of the schemas that request bodies consist of.
fn schemas_of_requests(api: &OpenApi) -> BTreeSet<String> {
    let schemas: BTreeMap<String, Value> = api.components.iter().flat_map(|components| &components.schemas).fold(
        BTreeMap::new(),
        |mut schemas, (name, schema)| {
            schemas.insert(name.clone(), json!(schema));
            schemas
        },
    );
    let paths = json!(api.paths);
    let operations = paths.as_object().into_iter().flatten().filter_map(|(_, item)| item.as_object()).flatten();
    let mut waiting = Vec::new();
    operations.for_each(|(_, operation)| references(&operation["requestBody"], &mut waiting));
    let mut found = BTreeSet::new();
    while let Some(name) = waiting.pop() {
        if let Some(schema) = schemas.get(&name)
            && found.insert(name)
        {
            references(schema, &mut waiting);
        }
    }
    found
}

fn references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            let name = fields.get("$ref").and_then(Value::as_str).and_then(|path| path.rsplit('/').next());
            found.extend(name.map(str::to_owned));
            fields.values().for_each(|field| references(field, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Calls `change` with every object and plain value of the schema.
fn each_object(schema: &mut RefOr<Schema>, change: &mut impl FnMut(&mut Object)) {
    let RefOr::T(schema) = schema else { return };
    match schema {
        Schema::Object(object) => {
            change(object);
            object.properties.values_mut().for_each(|field| each_object(field, change));
        }
        Schema::Array(array) => {
            if let ArrayItems::RefOrSchema(items) = &mut array.items {
                each_object(items, change);
            }
        }
        Schema::OneOf(one) => one.items.iter_mut().for_each(|item| each_object(item, change)),
        Schema::AllOf(all) => all.items.iter_mut().for_each(|item| each_object(item, change)),
        Schema::AnyOf(any) => any.items.iter_mut().for_each(|item| each_object(item, change)),
        // utoipa may add kinds of schemas.
        _ => {}
    }
}

/// Replaces the formats of this API by their patterns.
pub(super) fn replace_formats(schema: &mut RefOr<Schema>) {
    each_object(schema, &mut |object| {
        if matches!(&object.format, Some(SchemaFormat::Custom(name)) if name == LINE_FORMAT) {
            object.format = None;
            object.pattern = Some(LINE_PATTERN.to_owned());
        }
        if matches!(&object.format, Some(SchemaFormat::Custom(name)) if name == NAME_FORMAT) {
            object.format = None;
            object.pattern = Some(name_pattern());
        }
    });
}

fn name_pattern() -> String {
    let (invisible, spaces, dots, separators) = (INVISIBLE, SPACES, DOTS, SEPARATORS);
    let initials = format!("([{dots}][^{invisible}{spaces}{dots}{separators}0-9]?)+");
    let separator = format!("[{spaces}{separators}]");
    let first = format!(r"([^{invisible}{spaces}{dots}\u200c\u200d]|{initials}({separator}|$))");
    let (latin, others) = (LATIN, CYRILLIC_OR_GREEK);
    let in_word = format!("[^{spaces}{dots}{separators}]*");
    let mixed = format!(".*([{latin}]{in_word}[{others}]|[{others}]{in_word}[{latin}])");
    format!("^(?!{mixed})[{spaces}]*{first}([^{invisible}{dots}]|{initials}{separator})*({initials})?$")
}

/// Adds the accepted years to times.
pub(super) fn limit_years(schema: &mut RefOr<Schema>) {
    each_object(schema, &mut |object| {
        if matches!(object.format, Some(SchemaFormat::KnownFormat(KnownFormat::DateTime))) {
            object.pattern = Some(YEAR_PATTERN.to_owned());
        }
    });
}

/// Removes null from the accepted types of a field.
pub(super) fn without_null(field: &mut RefOr<Schema>) {
    let remaining = match field {
        RefOr::T(Schema::Object(object)) => return remove_null(&mut object.schema_type),
        RefOr::T(Schema::Array(array)) => return remove_null(&mut array.schema_type),
        RefOr::T(Schema::OneOf(one)) => {
            one.items.retain(|item| !is_null(item));
            match one.items.as_slice() {
                [only] => only.clone(),
                _ => return,
            }
        }
        RefOr::T(_) | RefOr::Ref(_) => return,
    };
    *field = remaining;
}

fn is_null(schema: &RefOr<Schema>) -> bool {
    matches!(schema, RefOr::T(Schema::Object(object)) if object.schema_type == SchemaType::Type(Type::Null))
}

fn remove_null(schema_type: &mut SchemaType) {
    if let SchemaType::Array(types) = schema_type {
        types.retain(|found| *found != Type::Null);
        if let [only] = types.as_slice() {
            *schema_type = SchemaType::Type(only.clone());
        }
    }
}

/// Returns the schema of a body that selects something: at least one filter, or `all: true` without filters. `selection`
/// is the object with all these fields; a filter that is null is absent.
pub fn filters_or_all(selection: RefOr<Schema>, example: Value) -> RefOr<Schema> {
    let RefOr::T(Schema::Object(mut object)) = selection else { return selection };
    let filters: Vec<(String, RefOr<Schema>)> = object
        .properties
        .iter()
        .filter(|(name, _)| *name != "all")
        .map(|(name, field)| (name.clone(), field.clone()))
        .collect();
    let all_is = |value: bool| ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([value]));
    let null = || ObjectBuilder::new().schema_type(Type::Null);
    let everything =
        filters.iter().fold(ObjectBuilder::new().property("all", all_is(true)).required("all"), |all, (name, _)| {
            all.property(name, null())
        });
    let mut choices = vec![everything.build()];
    for (name, mut field) in filters {
        without_null(&mut field);
        let choice = ObjectBuilder::new().property("all", all_is(false)).property(&name, field).required(name);
        choices.push(choice.build());
    }
    let choices = choices.into_iter().map(|choice| RefOr::T(Schema::Object(choice))).collect();
    let choices = AnyOf { items: choices, ..AnyOf::default() };
    let description = object.description.take();
    let items = vec![RefOr::T(Schema::Object(object)), RefOr::T(Schema::AnyOf(choices))];
    RefOr::T(Schema::AllOf(AllOf { items, description, example: Some(example), ..AllOf::default() }))
}
