//! Checks payloads against a schema, and says in the words of this API what is wrong.

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{Draft, PatternOptions, ValidationError};
use kit::problem::FieldError;
use serde_json::Value;

/// Errors of one payload that are reported together.
const ERRORS_MAX: usize = 20;
/// Bytes of a compiled pattern.
const PATTERN_BYTES_MAX: usize = 1024 * 1024;
/// Names and values that an error lists.
const LISTED_MAX: usize = 10;
/// Characters of a listed value.
const LISTED_CHARS_MAX: usize = 100;

/// A schema that is ready to be applied.
#[derive(Debug)]
pub(crate) struct Validator(jsonschema::Validator);

impl Validator {
    /// Compiles a schema without references. Fails with the reason; an accepted schema does not.
    pub(crate) fn new(schema: &Value) -> Result<Validator, String> {
        let options = jsonschema::options().with_draft(Draft::Draft202012).should_validate_formats(false).offline();
        let patterns = PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
        let built = options.with_pattern_options(patterns).build(schema);
        built.map(Validator).map_err(|error| error.masked().to_string())
    }

    pub(crate) fn accepts(&self, payload: &Value) -> bool {
        self.0.is_valid(payload)
    }

    /// What is wrong with a payload; `pointer` is where it is in the request body. Empty if it is valid.
    pub(crate) fn errors(&self, payload: &Value, pointer: &str) -> Vec<FieldError> {
        // Most payloads are valid, and that is cheaper to find out.
        if self.accepts(payload) {
            return Vec::new();
        }
        let errors = self.0.iter_errors(payload).take(ERRORS_MAX);
        errors.map(|error| FieldError::body(format!("{pointer}{}", error.instance_path()), describe(&error))).collect()
    }
}

/// What a validation error says to a caller.
pub(crate) fn describe(error: &ValidationError<'_>) -> String {
    use ValidationErrorKind as Kind;
    match error.kind() {
        Kind::AdditionalProperties { unexpected } => format!("must not have the properties {}", names(unexpected)),
        Kind::AnyOf { .. } => "must match at least one of the schemas in `anyOf`".to_owned(),
        Kind::Constant { expected_value } => format!("must be {}", short(expected_value)),
        Kind::Contains => "must have an item that matches `contains`".to_owned(),
        Kind::Enum { options } => {
            let all = options.as_array().map_or(&[][..], Vec::as_slice);
            let listed: Vec<String> = all.iter().take(LISTED_MAX).map(short).collect();
            let rest = if all.len() > LISTED_MAX { " and others" } else { "" };
            format!("must be one of {}{rest}", listed.join(", "))
        }
        Kind::ExclusiveMaximum { limit } => format!("must be less than {limit}"),
        Kind::ExclusiveMinimum { limit } => format!("must be greater than {limit}"),
        Kind::FalseSchema => "is not accepted here".to_owned(),
        Kind::MaxItems { limit } => format!("must have at most {limit} items"),
        Kind::Maximum { limit } => format!("must be at most {limit}"),
        Kind::MaxLength { limit } => format!("must have at most {limit} characters"),
        Kind::MaxProperties { limit } => format!("must have at most {limit} properties"),
        Kind::MinItems { limit } => format!("must have at least {limit} items"),
        Kind::Minimum { limit } => format!("must be at least {limit}"),
        Kind::MinLength { limit } => format!("must have at least {limit} characters"),
        Kind::MinProperties { limit } => format!("must have at least {limit} properties"),
        Kind::MultipleOf { multiple_of } => format!("must be a multiple of {multiple_of}"),
        Kind::Not { .. } => "must not match the schema in `not`".to_owned(),
        Kind::OneOfMultipleValid { .. } => {
            "must match only one of the schemas in `oneOf`, and matches several".to_owned()
        }
        Kind::OneOfNotValid { .. } => "must match one of the schemas in `oneOf`".to_owned(),
        Kind::Pattern { .. } => "must match the pattern of the schema".to_owned(),
        Kind::PropertyNames { error } => format!("must have valid property names: {}", describe(error)),
        Kind::Required { property } => format!("must have the property {}", short(property)),
        Kind::Type { kind } => {
            let types: Vec<&str> = match kind {
                TypeKind::Single(one) => vec![one.as_str()],
                TypeKind::Multiple(types) => types.iter().map(|one| one.as_str()).collect(),
            };
            format!("must be of type {}", types.join(" or "))
        }
        Kind::UniqueItems => "must not have two equal items".to_owned(),
        other => format!("does not match the keyword `{}` of the schema", other.keyword()),
    }
}

fn names(names: &[String]) -> String {
    let listed: Vec<String> = names.iter().take(LISTED_MAX).map(|name| short(&Value::from(name.as_str()))).collect();
    format!("{}{}", listed.join(", "), if names.len() > LISTED_MAX { " and others" } else { "" })
}

/// The JSON of a value, cut to a length that fits in an error.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(LISTED_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_point_into_the_payload() {
        let schema = json!({
            "type": "object", "required": ["id"], "additionalProperties": false,
            "properties": {"id": {"type": "integer"}, "tags": {"items": {"enum": ["a", "b"]}}, "x~y": {"type": ["null", "string"]}},
        });
        let validator = Validator::new(&schema).unwrap();
        assert_eq!(validator.errors(&json!({"id": 1.0}), "/payload"), []);
        let payload = json!({"tags": ["a", "c"], "other": 1, "x~y": 5});
        let mut errors: Vec<(String, String)> = validator
            .errors(&payload, "/events/3/payload")
            .into_iter()
            .map(|error| (error.pointer, error.detail))
            .collect();
        errors.sort();
        let expected = [
            ("/events/3/payload", "must have the property \"id\""),
            ("/events/3/payload", "must not have the properties \"other\""),
            ("/events/3/payload/tags/1", "must be one of \"a\", \"b\""),
            ("/events/3/payload/x~0y", "must be of type null or string"),
        ];
        assert_eq!(errors, expected.map(|(pointer, detail)| (pointer.to_owned(), detail.to_owned())));
    }
}
