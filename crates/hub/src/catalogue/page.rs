//! The catalogue as documents: a page to read, and one JSON Schema for code generators.

use std::fmt::Write;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::{EventType, TypeVersion};

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
    pre{background:#f4f4f4;padding:.75rem;overflow:auto;font-size:.85rem}h2{border-top:1px solid #ddd;padding-top:1rem}\
    code{font-size:.95em}.note{color:#a33}";

/// The page of a tenant's catalogue: HTML without scripts, in which every text is escaped.
pub(crate) fn html(tenant: &str, types: &[(EventType, Option<TypeVersion>)]) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Event types of {tenant}</title>\
         <style>{STYLE}</style></head><body><h1>Event types of {tenant}</h1><ul>",
        tenant = escaped(tenant)
    );
    for (event_type, _) in types {
        let name = escaped(&event_type.name);
        let _ = write!(page, "<li><a href=\"#{name}\"><code>{name}</code></a></li>");
    }
    page.push_str("</ul>");
    for (event_type, version) in types {
        write_type(&mut page, event_type, version.as_ref());
    }
    page.push_str("</body></html>\n");
    page
}

fn write_type(page: &mut String, event_type: &EventType, version: Option<&TypeVersion>) {
    let name = escaped(&event_type.name);
    let _ = write!(page, "<h2 id=\"{name}\"><code>{name}</code></h2>");
    if event_type.is_deprecated {
        page.push_str("<p class=\"note\">Deprecated</p>");
    }
    for paragraph in event_type.description.split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
        let _ = write!(page, "<p>{}</p>", escaped(paragraph));
    }
    let Some(version) = version else { return };
    let enforced = if event_type.is_enforced { "enforced" } else { "not enforced" };
    let _ = write!(page, "<p>Version {}, {enforced}</p><h3>Schema</h3>{}", version.version, code(&version.schema));
    for example in &version.examples {
        let _ = write!(page, "<h3>Example</h3>{}", code(example));
    }
}

fn code(json: &RawValue) -> String {
    let pretty = serde_json::from_str::<Value>(json.get()).and_then(|value| serde_json::to_string_pretty(&value));
    format!("<pre>{}</pre>", escaped(&pretty.unwrap_or_else(|_| json.get().to_owned())))
}

fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\'' => "&#39;".to_owned(),
        other => other.to_string(),
    };
    text.chars().map(escape).collect()
}

/// One JSON Schema with a definition for each event type, by its name. A definition within a schema becomes
/// `<event type>-<name>`, which is the name of no event type.
pub(crate) fn schemas(types: &[(EventType, Option<TypeVersion>)]) -> Value {
    let mut defs = Map::new();
    for (event_type, version) in types {
        let schema = version.as_ref().and_then(|version| serde_json::from_str(version.schema.get()).ok());
        let mut schema: Value = schema.unwrap_or(Value::Bool(true));
        if let Value::Object(keywords) = &mut schema {
            keywords.remove("$schema");
            keywords.remove("$id");
            if let Some(Value::Object(inner)) = keywords.remove("$defs") {
                for (name, mut schema) in inner {
                    qualify(&mut schema, &event_type.name);
                    defs.insert(format!("{}-{name}", event_type.name), schema);
                }
            }
            if !event_type.description.is_empty() {
                keywords.entry("description").or_insert_with(|| event_type.description.clone().into());
            }
            if event_type.is_deprecated {
                keywords.insert("deprecated".to_owned(), Value::Bool(true));
            }
        }
        qualify(&mut schema, &event_type.name);
        defs.insert(event_type.name.clone(), schema);
    }
    json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": defs})
}

/// Changes the references to definitions to their names in the common document.
fn qualify(schema: &mut Value, event_type: &str) {
    match schema {
        Value::Object(keywords) => {
            for (keyword, value) in keywords {
                match (keyword.as_str(), value) {
                    // Values, not schemas.
                    ("const" | "default" | "enum" | "examples", _) => {}
                    ("$ref", Value::String(target)) => {
                        if let Some(name) = target.strip_prefix("#/$defs/") {
                            *target = format!("#/$defs/{event_type}-{name}");
                        }
                    }
                    (_, value) => qualify(value, event_type),
                }
            }
        }
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| qualify(schema, event_type)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;

    fn event_type(description: &str, schema: &Value) -> (EventType, Option<TypeVersion>) {
        let at = DateTime::UNIX_EPOCH;
        let event_type = EventType {
            name: "order.paid".to_owned(),
            description: description.to_owned(),
            is_deprecated: true,
            is_enforced: true,
            newest: 1,
            version: 1,
            created_at: at,
            updated_at: at,
        };
        let raw = |value: &Value| RawValue::from_string(value.to_string()).unwrap();
        let examples = vec![raw(&json!("<b>"))];
        (event_type, Some(TypeVersion { version: 1, schema: raw(schema), examples, created_at: at }))
    }

    #[test]
    fn every_text_of_the_page_is_escaped() {
        let page = html("acme", &[event_type("<script>alert('x')</script>", &json!({"title": "</pre><img src=x>"}))]);
        assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)") && page.contains("&lt;/pre&gt;"), "{page}");
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("<b>"), "{page}");
    }

    #[test]
    fn definitions_get_unique_names_in_the_common_document() {
        let schema = json!({"properties": {"total": {"$ref": "#/$defs/amount"}}, "const": {"$ref": "#/$defs/amount"},
                            "$defs": {"amount": {"type": "number"}}, "$id": "https://example.com/x"});
        let document = schemas(&[event_type("Paid", &schema)]);
        assert_eq!(document["$defs"]["order.paid-amount"], json!({"type": "number"}));
        let expected = json!({"properties": {"total": {"$ref": "#/$defs/order.paid-amount"}}, "description": "Paid",
                              "const": {"$ref": "#/$defs/amount"}, "deprecated": true});
        assert_eq!(document["$defs"]["order.paid"], expected);
    }
}
