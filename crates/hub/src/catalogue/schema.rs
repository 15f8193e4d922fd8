//! Which JSON Schemas the catalogue accepts, and the forms in which they are applied.
//!
//! A schema is applied by two validators: a library over HTTP, and a function of PostgreSQL for posts in SQL. So only the
//! keywords that both know are accepted. Both get the schema with its references replaced by what they refer to, without
//! annotations and with the patterns in their own syntax. The size of that form is bounded, because the cost of a check grows
//! with it; a schema that refers to itself has no such form and is refused.

use std::collections::BTreeMap;

use jsonschema::draft202012;
use kit::problem::FieldError;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::pattern;
use super::validator::describe;

/// Bytes of a schema.
pub(crate) const BYTES_MAX: usize = 64 * 1024;
/// Bytes of a schema with its references replaced by what they refer to.
const EXPANDED_BYTES_MAX: usize = 256 * 1024;
/// Schemas within a schema, likewise.
const SUBSCHEMAS_MAX: usize = 1_000;
/// What a schema costs at most, see [`Schema::cost`].
const COST_MAX: usize = 10_000;
/// Bytes of the values of `enum` and `const` that cost as much as a schema.
const BYTES_PER_COST: usize = 16;
/// Levels of schemas within a schema, likewise.
const DEPTH_MAX: usize = 32;
/// Errors of a schema that are reported together.
const ERRORS_MAX: usize = 20;
/// The largest number of a limit: larger ones are not exact in every parser.
const NUMBER_MAX: f64 = 9_007_199_254_740_991.0;
/// Values of an `enum`.
const ENUM_MAX: usize = 500;
const DIALECT: &str = "https://json-schema.org/draft/2020-12/schema";
const DEFS: &str = "#/$defs/";

/// Keywords that describe and do not constrain.
const ANNOTATIONS: [&str; 11] = [
    "$comment",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "examples",
    "format",
    "readOnly",
    "title",
    "writeOnly",
];
/// Keywords whose value is a schema.
const OF_SCHEMA: [&str; 8] =
    ["additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"];
/// Keywords whose value is a list of schemas.
const OF_SCHEMAS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords whose value limits a number.
const OF_NUMBER: [&str; 5] = ["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"];
/// Keywords whose value limits a count.
const OF_COUNT: [&str; 6] = ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"];
/// The other keywords that constrain.
const OTHERS: [&str; 9] = [
    "const",
    "dependentRequired",
    "enum",
    "pattern",
    "patternProperties",
    "properties",
    "required",
    "type",
    "uniqueItems",
];

/// For whom the patterns of a schema are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Syntax {
    Unchanged,
    Rust,
    Sql,
}

/// An accepted schema: its three forms, without references and annotations.
#[derive(Debug, Clone)]
pub(crate) struct Schema {
    /// With the patterns as they were given, for comparisons.
    pub(crate) plain: Value,
    pub(crate) rust: Value,
    pub(crate) sql: Value,
    /// What a check costs for each byte of a payload: the number of schemas and of characters in patterns, with repetitions
    /// written out, and the size of `enum` and `const` in units of [`BYTES_PER_COST`].
    pub(crate) cost: usize,
    /// The size of each form.
    pub(crate) bytes: usize,
}

impl Schema {
    /// Checks a schema. Fails with pointers into it.
    pub(crate) fn parse(text: &RawValue) -> Result<Schema, Vec<FieldError>> {
        let refused = |detail: String| vec![FieldError::body("", detail)];
        if text.get().len() > BYTES_MAX {
            return Err(refused(format!("must have at most {BYTES_MAX} bytes")));
        }
        let document: Value = serde_json::from_str(text.get()).map_err(|_| {
            refused("must be JSON that is not nested deeply, without numbers beyond double precision".to_owned())
        })?;
        let validator = draft202012::meta::validator();
        let errors: Vec<FieldError> = validator
            .iter_errors(&document)
            .take(ERRORS_MAX)
            .map(|error| FieldError::body(error.instance_path().to_string(), describe(&error)))
            .collect();
        if !errors.is_empty() {
            return Err(errors);
        }
        let (plain, rust, sql) = (
            expanded(&document, Syntax::Unchanged)?,
            expanded(&document, Syntax::Rust)?,
            expanded(&document, Syntax::Sql)?,
        );
        Ok(Schema { cost: plain.cost, bytes: plain.bytes, plain: plain.schema, rust: rust.schema, sql: sql.schema })
    }
}

/// The keywords that are accepted, for an error.
fn accepted_keywords() -> String {
    let constraining = [&OF_SCHEMA[..], &OF_SCHEMAS, &OF_NUMBER, &OF_COUNT, &OTHERS, &["$ref"]].concat();
    let mut keywords = [constraining.as_slice(), &ANNOTATIONS, &["$defs", "$id", "$schema"]].concat();
    keywords.sort_unstable();
    keywords.join(", ")
}

struct Expanded {
    schema: Value,
    cost: usize,
    bytes: usize,
}

fn expanded(document: &Value, syntax: Syntax) -> Result<Expanded, Vec<FieldError>> {
    let empty = Map::new();
    let defs = document.get("$defs").and_then(Value::as_object).unwrap_or(&empty);
    let mut expansion =
        Expansion { defs, syntax, count: 0, cost: 0, bytes: 0, open: Vec::new(), errors: BTreeMap::new() };
    // Definitions that nothing refers to are checked, too. They do not count.
    for (name, schema) in defs {
        expansion.open = vec![name.clone()];
        expansion.expand(schema, &format!("/$defs/{}", escaped(name)), 1);
    }
    (expansion.open, expansion.count, expansion.cost, expansion.bytes) = (Vec::new(), 0, 0, 0);
    let schema = expansion.expand(document, "", 0);
    let (cost, bytes) = (expansion.cost + expansion.count, expansion.bytes);
    if cost > COST_MAX {
        let detail = format!(
            "has a cost of {cost}, and at most {COST_MAX} is accepted: each schema and each character of a pattern costs 1, with \
             repetitions written out, and so do {BYTES_PER_COST} bytes of `enum` and `const`; a reference costs as much as what it \
             refers to"
        );
        expansion.refuse("", detail);
    }
    match expansion.errors.is_empty() {
        true => Ok(Expanded { schema, cost, bytes }),
        false => {
            let errors = expansion.errors.into_iter().take(ERRORS_MAX);
            Err(errors.map(|(pointer, detail)| FieldError::body(pointer, detail)).collect())
        }
    }
}

struct Expansion<'d> {
    defs: &'d Map<String, Value>,
    syntax: Syntax,
    /// Schemas so far.
    count: usize,
    /// The cost of patterns and listed values so far.
    cost: usize,
    /// Bytes so far.
    bytes: usize,
    /// The definitions that are being expanded.
    open: Vec<String>,
    /// By pointer: a definition that is used twice is reported once.
    errors: BTreeMap<String, String>,
}

impl Expansion<'_> {
    fn refuse(&mut self, pointer: &str, detail: impl Into<String>) {
        self.errors.entry(pointer.to_owned()).or_insert_with(|| detail.into());
    }

    fn expand(&mut self, schema: &Value, pointer: &str, depth: usize) -> Value {
        self.count += 1;
        let keywords = match schema {
            Value::Object(keywords) if depth <= DEPTH_MAX && self.count <= SUBSCHEMAS_MAX => keywords,
            Value::Object(_) => {
                let detail = format!(
                    "must have at most {SUBSCHEMAS_MAX} schemas within it, at most {DEPTH_MAX} levels deep, each reference \
                     counted as what it refers to"
                );
                self.refuse(if depth > DEPTH_MAX { pointer } else { "" }, detail);
                return Value::Bool(true);
            }
            other => return other.clone(),
        };
        let mut result = Map::new();
        for (keyword, value) in keywords {
            let pointer = format!("{pointer}/{}", escaped(keyword));
            if let Some(value) = self.keyword(keyword, value, &pointer, depth) {
                result.insert(keyword.clone(), value);
            }
        }
        if let Some(Value::String(target)) = keywords.get("$ref") {
            let referenced = self.reference(target, &format!("{pointer}/$ref"), depth);
            if result.is_empty() {
                return referenced;
            }
            match result.entry("allOf").or_insert_with(|| json!([])) {
                Value::Array(all) => all.push(referenced),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => {}
            }
        }
        Value::Object(result)
    }

    /// Adds a part of the result to its size. Refuses the schema and returns false if the result would be too large.
    fn reserve(&mut self, bytes: usize) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > EXPANDED_BYTES_MAX {
            let detail =
                format!("must have at most {EXPANDED_BYTES_MAX} bytes, each reference counted as what it refers to");
            self.refuse("", detail);
        }
        self.bytes <= EXPANDED_BYTES_MAX
    }

    /// Copies a value that has no schemas within it.
    fn copy(&mut self, keyword: &str, value: &Value) -> Option<Value> {
        let bytes = value.to_string().len();
        if keyword == "enum" || keyword == "const" {
            self.cost = self.cost.saturating_add(bytes / BYTES_PER_COST);
        }
        self.reserve(keyword.len() + bytes).then(|| value.clone())
    }

    /// The value of a keyword that constrains; None for any other.
    fn keyword(&mut self, keyword: &str, value: &Value, pointer: &str, depth: usize) -> Option<Value> {
        match keyword {
            "$ref" => None,
            _ if ANNOTATIONS.contains(&keyword) => None,
            "$schema" | "$id" | "$defs" if depth == 0 => {
                if keyword == "$schema" && value != DIALECT {
                    self.refuse(pointer, format!("must be `{DIALECT}`"));
                }
                None
            }
            "$schema" | "$id" | "$defs" => {
                self.refuse(pointer, "is accepted at the root of the schema only");
                None
            }
            _ if OF_SCHEMA.contains(&keyword) => Some(self.expand(value, pointer, depth + 1)),
            _ if OF_SCHEMAS.contains(&keyword) => {
                let schemas = value.as_array().into_iter().flatten().enumerate();
                Some(schemas.map(|(at, schema)| self.expand(schema, &format!("{pointer}/{at}"), depth + 1)).collect())
            }
            "properties" => {
                let schemas = value.as_object().into_iter().flatten();
                let expand = |(name, schema): (&String, &Value)| {
                    self.reserve(name.len());
                    (name.clone(), self.expand(schema, &format!("{pointer}/{}", escaped(name)), depth + 1))
                };
                Some(Value::Object(schemas.map(expand).collect()))
            }
            "patternProperties" => Some(self.pattern_properties(value, pointer, depth)),
            "pattern" => value.as_str().map(|text| self.pattern(text, pointer).into()),
            _ if OF_NUMBER.contains(&keyword) || OF_COUNT.contains(&keyword) => {
                if value.as_f64().is_none_or(|number| number.abs() > NUMBER_MAX) {
                    self.refuse(pointer, format!("must be a number from -{NUMBER_MAX} to {NUMBER_MAX}"));
                }
                Some(value.clone())
            }
            "enum" => {
                if value.as_array().is_none_or(|values| values.is_empty() || values.len() > ENUM_MAX) {
                    self.refuse(pointer, format!("must be a list of 1 to {ENUM_MAX} values"));
                }
                self.copy(keyword, value)
            }
            _ if OTHERS.contains(&keyword) => self.copy(keyword, value),
            _ => {
                self.refuse(pointer, format!("is not an accepted keyword; accepted are {}", accepted_keywords()));
                None
            }
        }
    }

    fn reference(&mut self, target: &str, pointer: &str, depth: usize) -> Value {
        let found = target.strip_prefix(DEFS).and_then(|name| self.defs.get_key_value(name));
        let Some((name, schema)) = found else {
            self.refuse(pointer, "must be a reference to a definition of this schema, such as `#/$defs/address`; others are not followed");
            return Value::Bool(true);
        };
        if self.open.contains(name) {
            self.refuse(pointer, "must not lead back to itself: the cost of checking a payload would not be bounded");
            return Value::Bool(true);
        }
        self.open.push(name.clone());
        let schema = self.expand(schema, &format!("/$defs/{}", escaped(name)), depth + 1);
        self.open.pop();
        schema
    }

    fn pattern_properties(&mut self, value: &Value, pointer: &str, depth: usize) -> Value {
        let mut result = Map::new();
        for (text, schema) in value.as_object().into_iter().flatten() {
            let pointer = format!("{pointer}/{}", escaped(text));
            let (pattern, schema) = (self.pattern(text, &pointer), self.expand(schema, &pointer, depth + 1));
            // Two patterns may have the same translation.
            let schema = match result.remove(&pattern) {
                Some(other) => json!({"allOf": [other, schema]}),
                None => schema,
            };
            result.insert(pattern, schema);
        }
        Value::Object(result)
    }

    fn pattern(&mut self, text: &str, pointer: &str) -> String {
        let translated = match pattern::translate(text) {
            Ok(translated) => translated,
            Err(detail) => {
                self.refuse(pointer, detail);
                return String::new();
            }
        };
        self.reserve(text.len());
        self.cost = self.cost.saturating_add(translated.atoms);
        match self.syntax {
            Syntax::Unchanged => text.to_owned(),
            Syntax::Rust => translated.rust,
            Syntax::Sql => translated.sql,
        }
    }
}

/// The patterns of a schema, which PostgreSQL must be able to compile.
pub(crate) fn patterns(schema: &Value) -> Vec<String> {
    let Value::Object(keywords) = schema else { return Vec::new() };
    let mut found = Vec::new();
    for (keyword, value) in keywords {
        match keyword.as_str() {
            "pattern" => found.extend(value.as_str().map(str::to_owned)),
            "patternProperties" => {
                for (text, schema) in value.as_object().into_iter().flatten() {
                    found.push(text.clone());
                    found.extend(patterns(schema));
                }
            }
            "properties" => {
                found.extend(value.as_object().into_iter().flatten().flat_map(|(_, schema)| patterns(schema)))
            }
            keyword if OF_SCHEMA.contains(&keyword) => found.extend(patterns(value)),
            keyword if OF_SCHEMAS.contains(&keyword) => {
                found.extend(value.as_array().into_iter().flatten().flat_map(patterns))
            }
            _ => {}
        }
    }
    found
}

/// A name as a part of a JSON pointer.
pub(crate) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(schema: &Value) -> Result<Schema, Vec<(String, String)>> {
        let text = RawValue::from_string(schema.to_string()).unwrap();
        Schema::parse(&text).map_err(|errors| errors.into_iter().map(|error| (error.pointer, error.detail)).collect())
    }

    #[test]
    fn references_are_replaced_and_annotations_removed() {
        let schema = json!({
            "$schema": DIALECT, "$id": "https://example.com/order", "title": "An order",
            "type": "object",
            "properties": {
                "total": {"$ref": "#/$defs/amount", "description": "With tax"},
                "title": {"$ref": "#/$defs/amount", "maximum": 5},
                "code": {"type": "string", "pattern": r"^\d+$", "format": "whatever"},
            },
            "$defs": {"amount": {"type": "number", "minimum": 0}},
        });
        let parsed = parse(&schema).unwrap();
        let amount = json!({"type": "number", "minimum": 0});
        assert_eq!(parsed.plain["properties"]["total"], amount);
        assert_eq!(parsed.plain["properties"]["title"], json!({"maximum": 5, "allOf": [amount]}));
        assert_eq!(parsed.rust["properties"]["code"]["pattern"], "^[0-9]+$");
        assert_eq!(parsed.plain["properties"]["code"], json!({"type": "string", "pattern": r"^\d+$"}));
        assert_eq!(patterns(&parsed.sql), ["^[0-9]+$"]);
        assert!(parsed.plain.get("$id").is_none() && parsed.plain.get("$defs").is_none());
    }

    #[test]
    fn a_schema_that_cannot_be_applied_everywhere_is_refused_with_a_pointer() {
        for (schema, pointer, words) in [
            (json!({"unevaluatedProperties": false}), "/unevaluatedProperties", "accepted are"),
            (json!({"properties": {"a/b": {"minContains": 2}}}), "/properties/a~1b/minContains", "accepted are"),
            (json!({"$ref": "https://example.com/x"}), "/$ref", "not followed"),
            (json!({"$ref": "#"}), "/$ref", "not followed"),
            (json!({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}), "/$defs/a/items/$ref", "back to itself"),
            (json!({"pattern": "(?=a)"}), "/pattern", "look-around"),
            (json!({"patternProperties": {"a**": true}}), "/patternProperties/a**", "quantifiers"),
            (json!({"type": "text"}), "/type", "must"),
            (json!({"minLength": -1}), "/minLength", "must"),
            (json!({"multipleOf": 0}), "/multipleOf", "must"),
            (json!({"maximum": 1e300}), "/maximum", "must be a number from"),
            (json!({"items": {"$id": "x"}}), "/items/$id", "at the root"),
            (json!({"$schema": "http://json-schema.org/draft-07/schema#"}), "/$schema", "2020-12"),
        ] {
            let errors = parse(&schema).unwrap_err();
            let found = errors.iter().find(|(at, _)| at == pointer);
            assert!(found.is_some_and(|(_, detail)| detail.contains(words)), "{schema}: {errors:?}");
        }
    }

    #[test]
    fn the_size_of_a_schema_is_bounded_with_its_references_replaced() {
        let doubling: Map<String, Value> = (0..12)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), json!({"allOf": [next, next]}))
            })
            .chain([("d12".to_owned(), json!({"type": "string"}))])
            .collect();
        let errors = parse(&json!({"$ref": "#/$defs/d0", "$defs": doubling})).unwrap_err();
        assert!(errors[0].1.contains("at most 1000 schemas"), "{errors:?}");
        // Each is copied 400 times.
        let values: Vec<String> = (0..480).map(|n| format!("{n:0100}")).collect();
        let properties: Map<String, Value> =
            (0..400).map(|n| (format!("p{n}"), json!({"$ref": "#/$defs/a"}))).collect();
        let errors = parse(&json!({"$defs": {"a": {"enum": values}}, "properties": properties})).unwrap_err();
        assert!(errors[0].1.contains("262144 bytes"), "{errors:?}");
        let slow = json!({"$defs": {"a": {"pattern": "[ab]*a[ab]{250}[ab]{250}[ab]{250}y"}},
                          "items": {"anyOf": vec![json!({"$ref": "#/$defs/a"}); 480]}});
        assert!(parse(&slow).unwrap_err()[0].1.contains("has a cost of"));
        let deep = (0..40).fold(json!({}), |inner, _| json!({"items": inner}));
        assert!(parse(&deep).unwrap_err()[0].1.contains("32 levels"));
        let large = json!({"description": "x".repeat(BYTES_MAX)});
        assert!(parse(&large).unwrap_err()[0].1.contains("bytes"));
    }
}
