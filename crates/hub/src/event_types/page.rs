//! The catalogue as documents: a page to read, and one JSON Schema for code generators. They are made in parts, because they may
//! be larger than what a response may occupy.

use std::fmt::Write;
use std::io;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::event_types::domain::{EventType, TypeVersion};

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
    pre{background:#f4f4f4;padding:.75rem;overflow:auto;font-size:.85rem}h2{border-top:1px solid #ddd;padding-top:1rem}\
    code{font-size:.95em}.note{color:#a33}";
/// How much longer than its JSON an indented text may be, and what it may have anyway. Lists within lists would be a hundred times as
/// long.
const INDENTED_FACTOR_MAX: usize = 4;
const INDENTED_BYTES_MIN: usize = 4_000;

/// A type with its newest version.
pub(crate) type NewestVersion = (EventType, Option<TypeVersion>);

/// A document about all types of a catalogue.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Document {
    /// HTML without scripts, in which every text is escaped.
    Page,
    /// One JSON Schema with a definition for each event type, by its name. A definition within a schema becomes
    /// `<event type>-<name>`, which is the name of no event type.
    Schemas,
}

impl Document {
    pub(crate) fn start(self, tenant: &str, names: &[String]) -> String {
        match self {
            Document::Page => page_start(tenant, names),
            Document::Schemas => r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","$defs":{"#.to_owned(),
        }
    }

    /// The next types; `is_first`: none precede them.
    pub(crate) fn part(self, types: &[NewestVersion], is_first: bool) -> String {
        let mut text = String::new();
        for (at, (event_type, version)) in types.iter().enumerate() {
            match self {
                Document::Page => write_type(&mut text, event_type, version.as_ref()),
                Document::Schemas => {
                    text.push_str(if is_first && at == 0 { "" } else { "," });
                    write_schema(&mut text, event_type, version.as_ref());
                }
            }
        }
        text
    }

    pub(crate) fn end(self) -> &'static str {
        match self {
            Document::Page => "</body></html>\n",
            Document::Schemas => "}}",
        }
    }
}

fn page_start(tenant: &str, names: &[String]) -> String {
    let tenant = Escaped(tenant);
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Event types of {tenant}</title>\
         <style>{STYLE}</style></head><body><h1>Event types of {tenant}</h1><ul>"
    );
    for name in names {
        let name = Escaped(name);
        let _ = write!(page, "<li><a href=\"#{name}\"><code>{name}</code></a></li>");
    }
    page.push_str("</ul>");
    page
}

fn write_type(page: &mut String, event_type: &EventType, version: Option<&TypeVersion>) {
    let name = Escaped(&event_type.name);
    let _ = write!(page, "<h2 id=\"{name}\"><code>{name}</code></h2>");
    if event_type.is_deprecated {
        page.push_str("<p class=\"note\">Deprecated</p>");
    }
    for paragraph in event_type.description.split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
        let _ = write!(page, "<p>{}</p>", Escaped(paragraph));
    }
    let Some(version) = version else { return };
    let enforced = if event_type.is_enforced { "enforced" } else { "not enforced" };
    let _ = write!(page, "<p>Version {}, {enforced}</p><h3>Schema</h3>", version.version);
    write_code(page, &version.schema);
    for example in &version.examples {
        page.push_str("<h3>Example</h3>");
        write_code(page, example);
    }
}

fn write_code(page: &mut String, json: &RawValue) {
    let indented = indented(json);
    let _ = write!(page, "<pre>{}</pre>", Escaped(indented.as_deref().unwrap_or(json.get())));
}

/// JSON as a text to read; None if it would be much longer.
fn indented(json: &RawValue) -> Option<String> {
    let value: Value = serde_json::from_str(json.get()).ok()?;
    let max = (INDENTED_FACTOR_MAX * json.get().len()).max(INDENTED_BYTES_MIN);
    let mut text = BoundedText { bytes: Vec::new(), max };
    serde_json::to_writer_pretty(&mut text, &value).ok()?;
    String::from_utf8(text.bytes).ok()
}

/// Fails when it is full.
struct BoundedText {
    bytes: Vec<u8>,
    max: usize,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A text in HTML.
struct Escaped<'t>(&'t str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find(['&', '<', '>', '"', '\'']) {
            formatter.write_str(&rest[..at])?;
            formatter.write_str(match rest.as_bytes()[at] {
                b'&' => "&amp;",
                b'<' => "&lt;",
                b'>' => "&gt;",
                b'"' => "&quot;",
                _ => "&#39;",
            })?;
            rest = &rest[at + 1..];
        }
        formatter.write_str(rest)
    }
}

/// Writes the definitions of a type.
fn write_schema(text: &mut String, event_type: &EventType, version: Option<&TypeVersion>) {
    let schema = version.and_then(|version| serde_json::from_str(version.schema.get()).ok());
    let (mut schema, mut defs) = (schema.unwrap_or(Value::Bool(true)), Map::new());
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
    // Without the braces: the definitions of all types are in one object.
    let defs = Value::Object(defs).to_string();
    text.push_str(&defs[1..defs.len() - 1]);
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
    use chrono::DateTime;
    use serde_json::json;

    use super::*;

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

    fn document(document: Document, types: &[NewestVersion]) -> String {
        let names: Vec<String> = types.iter().map(|(event_type, _)| event_type.name.clone()).collect();
        let parts = types.iter().enumerate().map(|(at, one)| document.part(std::slice::from_ref(one), at == 0));
        format!("{}{}{}", document.start("acme", &names), parts.collect::<String>(), document.end())
    }

    #[test]
    fn json_is_indented_unless_that_makes_it_much_longer() {
        let raw = |text: String| RawValue::from_string(text).unwrap();
        assert_eq!(indented(&raw(r#"{"a":[1]}"#.to_owned())).unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
        let deep = format!("{}{}0{}", "[".repeat(100), "0,".repeat(30_000), "]".repeat(100));
        assert!(indented(&raw(deep)).is_none(), "it would have 6 MB");
    }

    #[test]
    fn every_text_of_the_page_is_escaped() {
        let types = [event_type("<script>alert('x')</script>", &json!({"title": "</pre><img src=x>"}))];
        let page = document(Document::Page, &types);
        assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)") && page.contains("&lt;/pre&gt;"), "{page}");
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("<b>"), "{page}");
    }

    #[test]
    fn definitions_get_unique_names_in_the_common_document() {
        let schema = json!({"properties": {"total": {"$ref": "#/$defs/amount"}}, "const": {"$ref": "#/$defs/amount"},
                            "$defs": {"amount": {"type": "number"}}, "$id": "https://example.com/x"});
        let mut types = [event_type("Paid", &schema), event_type("", &json!(true))];
        types[1].0.name = "order.sent".to_owned();
        let document: Value = serde_json::from_str(&document(Document::Schemas, &types)).unwrap();
        assert_eq!(document["$defs"]["order.sent"], json!(true));
        assert_eq!(document["$defs"].as_object().unwrap().len(), 3);
        assert_eq!(document["$defs"]["order.paid-amount"], json!({"type": "number"}));
        let expected = json!({"properties": {"total": {"$ref": "#/$defs/order.paid-amount"}}, "description": "Paid",
                              "const": {"$ref": "#/$defs/amount"}, "deprecated": true});
        assert_eq!(document["$defs"]["order.paid"], expected);
    }
}
