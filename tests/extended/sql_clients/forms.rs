//! The forms: an argument of `pillarbox.post`, sent as one kind of value.

use serde_json::{Value, json};

pub(super) struct Form {
    /// The argument that the form is about.
    pub(super) column: &'static str,
    pub(super) arguments: &'static [Argument],
    /// The fields of the stored message that differ from those of a message with a topic and a payload only.
    stored: &'static str,
}

pub(super) struct Argument {
    pub(super) name: &'static str,
    /// What the client sends: `text`, `integer`, `uuid`, `object` (also a list), `json` and `jsonb` (its own types for these), or
    /// `null`. A `literal` is part of the statement.
    pub(super) kind: &'static str,
    value: &'static str,
    /// The type of the argument, to which a statement with casts casts it.
    cast: &'static str,
}

pub(super) const AGGREGATE_TYPE: Argument = argument("aggregate_type", "text", "ORDER", "text");
const NO_KEY: Argument = argument("key", "literal", "null", "");
const TYPE: Argument = argument("aggregate_type", "literal", "'ORDER'", "");
const PAYLOAD: &str = r#"{"id": 5}"#;
const HEADERS: &str = r#"{"team": "blue"}"#;
const UUID: &str = "9a6f4a52-7c0e-4d5b-8f0e-52f3f1f9f001";
const STORED_HEADERS: &str = r#"{"headers": {"team": "blue"}}"#;
const STORED_UUID_KEY: &str = r#"{"key": "9a6f4a52-7c0e-4d5b-8f0e-52f3f1f9f001"}"#;
const STORED_UUID: &str = r#"{"aggregate_type": "ORDER", "aggregate_id": "9a6f4a52-7c0e-4d5b-8f0e-52f3f1f9f001"}"#;

macro_rules! form {
    ($column:literal, $stored:expr, $($argument:expr),+) => {
        Form { column: $column, stored: $stored, arguments: &[$($argument),+] }
    };
}

/// The argument that a form is about is its last one.
pub(super) const FORMS: [Form; 18] = [
    form!("payload", "{}", argument("payload", "object", PAYLOAD, "jsonb")),
    form!("payload", r#"{"payload": [{"id": 5}]}"#, argument("payload", "object", r#"[{"id": 5}]"#, "jsonb")),
    form!("payload", "{}", argument("payload", "json", PAYLOAD, "jsonb")),
    form!("payload", "{}", argument("payload", "jsonb", PAYLOAD, "jsonb")),
    form!("payload", "{}", argument("payload", "text", PAYLOAD, "jsonb")),
    form!("headers", STORED_HEADERS, argument("headers", "object", HEADERS, "jsonb")),
    form!("headers", STORED_HEADERS, argument("headers", "json", HEADERS, "jsonb")),
    form!("headers", STORED_HEADERS, argument("headers", "jsonb", HEADERS, "jsonb")),
    form!("headers", STORED_HEADERS, argument("headers", "text", HEADERS, "jsonb")),
    form!("key", r#"{"key": "order 5"}"#, argument("key", "text", "order 5", "text")),
    form!("key", r#"{"key": "5"}"#, argument("key", "integer", "5", "bigint")),
    form!("key", STORED_UUID_KEY, argument("key", "uuid", UUID, "uuid")),
    form!(
        "aggregate_id",
        r#"{"aggregate_type": "ORDER", "aggregate_id": "no. 5"}"#,
        TYPE,
        argument("aggregate_id", "text", "no. 5", "text")
    ),
    form!(
        "aggregate_id",
        r#"{"aggregate_type": "ORDER", "aggregate_id": 5}"#,
        NO_KEY,
        TYPE,
        argument("aggregate_id", "integer", "5", "bigint")
    ),
    form!("aggregate_id", STORED_UUID, NO_KEY, TYPE, argument("aggregate_id", "uuid", UUID, "uuid")),
    form!("message_id", "{}", argument("message_id", "text", "9a6f4a52-7c0e-4d5b-8f0e-52f3f1f9f002", "uuid")),
    form!("message_id", "{}", argument("message_id", "uuid", "9a6f4a52-7c0e-4d5b-8f0e-52f3f1f9f003", "uuid")),
    form!(
        "null",
        "{}",
        argument("key", "null", "text", "text"),
        argument("aggregate_type", "null", "text", "text"),
        argument("aggregate_id", "null", "text", "text"),
        argument("headers", "null", "jsonb", "jsonb"),
        argument("message_id", "null", "uuid", "uuid")
    ),
];

const fn argument(name: &'static str, kind: &'static str, value: &'static str, cast: &'static str) -> Argument {
    Argument { name, kind, value, cast }
}

impl Form {
    pub(super) fn tested(&self) -> &'static Argument {
        self.arguments.last().expect("a form has arguments")
    }

    pub(super) fn name(&self) -> String {
        let Argument { kind, value, .. } = self.tested();
        match (self.column, *kind) {
            ("null", _) => "null".to_owned(),
            (column, "object") if value.starts_with('[') => format!("{column}: list"),
            (column, kind) => format!("{column}: {kind}"),
        }
    }

    /// The stored message.
    pub(super) fn expected(&self) -> Value {
        let mut message = json!({
            "topic": "form.posted", "key": null, "aggregate_type": null, "aggregate_id": null, "headers": {},
            "payload": {"id": 5},
        });
        let differences: Value = serde_json::from_str(self.stored).unwrap();
        message.as_object_mut().unwrap().extend(differences.as_object().unwrap().clone());
        message
    }
}

/// The statement that posts a message with these arguments, each with a cast or without one, and the values of its parameters.
pub(super) fn statement(topic: &str, arguments: &[(&Argument, bool)]) -> (String, Vec<String>) {
    let (mut payload, mut named, mut values) = (format!("'{PAYLOAD}'"), String::new(), Vec::new());
    for (argument, has_cast) in arguments {
        let expression = match (argument.kind, *has_cast) {
            ("literal", _) => argument.value.to_owned(),
            (kind, has_cast) => {
                values.push(format!("{kind} {}", argument.value));
                let parameter = format!("${}", values.len());
                if has_cast { format!("cast({parameter} as {})", argument.cast) } else { parameter }
            }
        };
        if argument.name == "payload" {
            payload = expression;
        } else {
            named += &format!(", {} => {expression}", argument.name);
        }
    }
    (format!("select pillarbox.post('{topic}', {payload}{named}) as post"), values)
}
