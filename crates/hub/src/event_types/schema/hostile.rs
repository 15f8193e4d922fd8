//! Schemas and payloads that are made to be expensive: each keyword as often as a schema may have it, on a payload that makes it
//! work. The tests of the catalogue use them, and the attack `hostile-schemas` of the bench, which includes this file: it knows
//! nothing of the code that it attacks.

use serde_json::{Map, Value, json};

/// Bytes of a payload.
const PAYLOAD_BYTES: usize = 250_000;

/// Finds the largest number for which a schema is accepted, with a precision of a twentieth.
pub(crate) struct Largest {
    accepted: usize,
    refused: usize,
}

impl Largest {
    pub(crate) fn new() -> Largest {
        Largest { accepted: 1, refused: 16_384 }
    }

    /// The number to try next. None: [`Largest::found`] is precise enough.
    pub(crate) fn next(&self) -> Option<usize> {
        let is_precise = self.refused - self.accepted <= 1 + self.accepted / 20;
        (!is_precise).then(|| (self.accepted + self.refused) / 2)
    }

    /// Takes note of the verdict about the number.
    pub(crate) fn tried(&mut self, number: usize, is_accepted: bool) {
        *(if is_accepted { &mut self.accepted } else { &mut self.refused }) = number;
    }

    pub(crate) fn found(&self) -> usize {
        self.accepted
    }
}

/// All keywords, each with a schema that has it a number of times.
pub(crate) fn keywords() -> Vec<(&'static str, Repeated)> {
    [&OF_ANY_VALUE[..], &OF_NUMBERS_AND_TEXTS, &OF_LISTS, &OF_OBJECTS].concat()
}

pub(crate) fn numbered<T>(count: usize, make: impl Fn(usize) -> T) -> Vec<T> {
    (0..count).map(make).collect()
}

fn object(count: usize, value: impl Fn(usize) -> Value) -> Value {
    Value::Object(numbered(count, |n| (format!("p{n}"), value(n))).into_iter().collect::<Map<_, _>>())
}

fn pattern(n: usize) -> String {
    format!("^(?:[ab]*a[ab]{{20}}|{n})*x$")
}

fn pattern_properties(count: usize) -> Value {
    Value::Object(numbered(count, |n| (pattern(n), json!(false))).into_iter().collect::<Map<_, _>>())
}

/// Each alternative refuses what is in the payloads, so all of them are tried.
fn any_of(count: usize, alternative: impl Fn(usize) -> Value) -> Value {
    json!({"anyOf": numbered(count, alternative)})
}

/// Each condition accepts what is in the payloads, so all of them are checked.
fn all_of(count: usize, condition: impl Fn(usize) -> Value) -> Value {
    json!({"allOf": numbered(count, condition)})
}

/// A schema with a keyword, a number of times.
pub(crate) type Repeated = fn(usize) -> Value;

/// The keywords whose cost grows with the schemas, names or values within them.
const OF_ANY_VALUE: [(&str, Repeated); 12] = [
    ("anyOf", |n| any_of(n, |n| json!({"const": n + 1_000_000}))),
    ("oneOf", |n| json!({"oneOf": numbered(n, |n| json!({"minProperties": n + 1}))})),
    ("allOf", |n| all_of(n, |_| json!({"type": ["object", "array", "string", "number"]}))),
    ("not", |n| all_of(n, |n| json!({"not": {"const": n + 1_000_000}}))),
    ("if", |n| all_of(n, |_| json!({"if": {"type": "null"}, "then": false}))),
    ("then", |n| all_of(n, |_| json!({"if": true, "then": {"maxLength": 500_000}}))),
    ("else", |n| all_of(n, |_| json!({"if": false, "else": {"maxLength": 500_000}}))),
    ("type", |n| any_of(n, |_| json!({"type": ["null", "boolean"]}))),
    ("enum", |n| all_of(n / 16 + 1, |n| json!({"not": {"enum": numbered(16, |m| json!([[{"a": n * 16 + m}]]))}}))),
    ("const", |n| json!({"const": object(n.min(500), |n| json!(n))})),
    ("nested anyOf", |n| (0..n.min(10)).fold(json!({"maximum": -1}), |inner, _| json!({"anyOf": [inner, inner]}))),
    // Each definition applies the next one twice.
    ("$ref", |n| {
        let definition = |n: usize| match n {
            0 => json!({"minLength": 0}),
            n => json!({"allOf": vec![json!({"$ref": format!("#/$defs/p{}", n - 1)}); 2]}),
        };
        json!({"$defs": object(n.min(30), definition), "$ref": format!("#/$defs/p{}", n.min(30) - 1)})
    }),
];

const OF_NUMBERS_AND_TEXTS: [(&str, Repeated); 9] = [
    ("minimum", |n| all_of(n, |_| json!({"minimum": -1}))),
    ("maximum", |n| all_of(n, |_| json!({"maximum": 1e9}))),
    ("exclusiveMinimum", |n| all_of(n, |_| json!({"exclusiveMinimum": -0.5}))),
    ("exclusiveMaximum", |n| all_of(n, |_| json!({"exclusiveMaximum": 1e9}))),
    ("multipleOf", |n| all_of(n, |_| json!({"multipleOf": 1e-9}))),
    ("multipleOf of none", |n| any_of(n, |n| json!({"multipleOf": 1_000_000.1 + n as f64}))),
    ("minLength", |n| all_of(n, |_| json!({"minLength": 1}))),
    ("maxLength", |n| all_of(n, |_| json!({"maxLength": 500_000}))),
    ("pattern", |n| any_of(n, |n| json!({"pattern": pattern(n)}))),
];

const OF_LISTS: [(&str, Repeated); 7] = [
    ("items", |n| all_of(n, |_| json!({"items": {"minLength": 0}}))),
    ("prefixItems", |n| json!({"prefixItems": vec![json!({"minLength": 0}); n]})),
    ("contains", |n| json!({"contains": any_of(n, |n| json!({"const": n + 1_000_000}))})),
    ("minItems", |n| all_of(n, |_| json!({"minItems": 0}))),
    ("maxItems", |n| all_of(n, |_| json!({"maxItems": 500_000}))),
    ("uniqueItems", |n| all_of(n, |_| json!({"uniqueItems": true}))),
    ("uniqueItems of items", |n| all_of(n, |_| json!({"items": {"uniqueItems": true}}))),
];

const OF_OBJECTS: [(&str, Repeated); 12] = [
    ("required", |n| json!({"required": numbered(n, |n| format!("q{n}"))})),
    ("required by each", |n| all_of(n, |_| json!({"not": {"required": ["q"]}}))),
    ("dependentRequired", |n| json!({"dependentRequired": object(n, |n| json!([format!("q{n}")]))})),
    ("properties", |n| json!({"properties": object(n, |_| json!({"type": ["object", "array", "number"]}))})),
    (
        "properties with a long name",
        |n| json!({"properties": {"x".repeat(20_000): all_of(n, |_| json!({"minLength": 1}))}}),
    ),
    ("properties of each", |n| all_of(n, |_| json!({"properties": {"p1": {"minimum": 0}, "a": true}}))),
    ("additionalProperties", |n| all_of(n, |_| json!({"additionalProperties": {"minimum": 0}}))),
    ("patternProperties", |n| json!({"patternProperties": pattern_properties(n)})),
    ("propertyNames", |n| json!({"propertyNames": all_of(n, |n| json!({"not": {"pattern": pattern(n)}}))})),
    ("propertyNames of each", |n| all_of(n, |_| json!({"propertyNames": {"maxLength": 500_000}}))),
    ("minProperties", |n| all_of(n, |_| json!({"minProperties": 0}))),
    ("maxProperties", |n| all_of(n, |_| json!({"maxProperties": 500_000}))),
];

/// A schema that applies another one.
pub(crate) type Applicator = fn(Value) -> Value;

/// Where a schema is applied: to the items of a payload, which a check leaves after some errors, and as a condition, which has no
/// errors, so that each item is checked.
pub(crate) const APPLICATORS: [(&str, Applicator); 3] = [
    ("of items", |schema| json!({"items": schema})),
    ("as a condition", |schema| json!({"if": schema})),
    ("as a condition of items", |schema| json!({"items": {"if": schema}, "additionalProperties": {"items": true}})),
];

/// Definitions are at the root, where references lead to.
pub(crate) fn placed(place: Applicator, mut schema: Value) -> Value {
    let definitions = schema.as_object_mut().and_then(|keywords| keywords.remove("$defs"));
    let mut placed = place(schema);
    if let Some(definitions) = definitions {
        placed["$defs"] = definitions;
    }
    placed
}

/// The hostile payloads.
pub(crate) fn payloads() -> Vec<Value> {
    let text = numbered(PAYLOAD_BYTES, |n| if n * n % 7 < 3 { 'a' } else { 'b' }).into_iter().collect::<String>();
    vec![
        Value::from(vec![json!({}); PAYLOAD_BYTES / 3]),
        Value::from(numbered(PAYLOAD_BYTES / 7, |n| json!(n))),
        Value::from(numbered(PAYLOAD_BYTES / 30, |n| json!([[{"a": n + 1_000, "b": "x"}]]))),
        Value::from(numbered(PAYLOAD_BYTES / 11, |n| json!(format!("ab{n}")))),
        Value::from(vec![Value::from(text.as_str())]),
        Value::from(text),
        object(PAYLOAD_BYTES / 12, |_| json!(1)),
        Value::from(vec![object(1_000, |_| json!(0)); 20]),
        (0..120).fold(json!([]), |inner, _| json!([inner, {}])),
    ]
}
