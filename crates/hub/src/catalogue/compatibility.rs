//! Whether a new version of a schema only adds to the previous one.
//!
//! The comparison is structural and errs on the side of a refusal: a version passes if the rules below can tell that payloads
//! which are valid under the previous version are valid under the new one, and that no property that receivers may read has
//! lost its definition. One exception is wanted: an object that accepted any further property may define some of them, as long
//! as they are optional, because that is how payloads grow.

use kit::problem::FieldError;
use serde_json::{Map, Value};

use super::schema::escaped;
use super::validator::Validator;

/// Pairs of schemas that one comparison visits at most: alternatives are compared with each other.
const STEPS_MAX: usize = 20_000;

/// What breaks, with pointers into the new schema. Both schemas are without references and annotations. Empty if the new
/// version only adds.
pub(crate) fn breaking_changes(old: &Value, new: &Value) -> Vec<FieldError> {
    let mut changes = Changes::default();
    compare(old, new, "", &mut changes);
    if changes.steps > STEPS_MAX {
        changes.push((String::new(), "has too many alternatives to be compared with the previous version".to_owned()));
    }
    changes.found.into_iter().map(|(pointer, detail)| FieldError::body(pointer, detail)).collect()
}

#[derive(Default)]
struct Changes {
    /// Pointers and details.
    found: Vec<(String, String)>,
    steps: usize,
}

impl Changes {
    fn push(&mut self, change: (String, String)) {
        self.found.push(change);
    }

    /// Whether a schema only adds to another, which is no part of the result.
    fn is_addition(&mut self, old: &Value, new: &Value) -> bool {
        let mut apart = Changes { found: Vec::new(), steps: self.steps };
        compare(old, new, "", &mut apart);
        self.steps = apart.steps;
        apart.found.is_empty()
    }
}

/// The types of values, as bits.
const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];

fn compare(old: &Value, new: &Value, at: &str, changes: &mut Changes) {
    changes.steps += 1;
    if old == new || *old == Value::Bool(false) || changes.steps > STEPS_MAX {
        return;
    }
    let empty = Map::new();
    let new = match new {
        Value::Bool(false) => {
            return changes.push((at.to_owned(), "nothing would be accepted here any more".to_owned()));
        }
        other => other.as_object().unwrap_or(&empty),
    };
    let old = old.as_object().unwrap_or(&empty);
    // A list of values can be compared value by value, exactly.
    if let Some(values) = listed(old) {
        return compare_values(old, &values, new, at, changes);
    }
    let mut comparison = Comparison { old, new, types: types_of(old), at, changes };
    comparison.types();
    comparison.values();
    comparison.limits();
    comparison.arrays();
    comparison.objects();
    comparison.combinations();
}

/// The values of `enum` or `const`.
fn listed(schema: &Map<String, Value>) -> Option<Vec<Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value.clone()]),
        (None, Some(Value::Array(values))) => Some(values.clone()),
        (None, _) => None,
    }
}

fn compare_values(
    old: &Map<String, Value>,
    values: &[Value],
    new: &Map<String, Value>,
    at: &str,
    changes: &mut Changes,
) {
    let validator = |schema: &Map<String, Value>| Validator::new(&Value::Object(schema.clone()));
    let (Ok(old), Ok(new_validator)) = (validator(old), validator(new)) else {
        return changes.push((at.to_owned(), "cannot be compared with the previous version".to_owned()));
    };
    let keyword = ["enum", "const", "type"].into_iter().find(|keyword| new.contains_key(*keyword));
    for value in values.iter().filter(|value| old.accepts(value)) {
        if !new_validator.accepts(value) {
            let pointer = format!("{at}{}", keyword.map(|keyword| format!("/{keyword}")).unwrap_or_default());
            return changes.push((pointer, format!("{value} was accepted and would be refused")));
        }
    }
}

/// The names in `type`; all of them without it.
fn types_of(schema: &Map<String, Value>) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
        _ => TYPES.to_vec(),
    }
}

struct Comparison<'c> {
    old: &'c Map<String, Value>,
    new: &'c Map<String, Value>,
    /// The types that the old schema accepts.
    types: Vec<&'c str>,
    at: &'c str,
    changes: &'c mut Changes,
}

impl Comparison<'_> {
    fn report(&mut self, part: &str, detail: impl Into<String>) {
        self.changes.push((format!("{}{part}", self.at), detail.into()));
    }

    fn accepted(&self, wanted: &[&str]) -> bool {
        self.types.iter().any(|one| wanted.contains(one))
    }

    fn types(&mut self) {
        let new = types_of(self.new);
        let is_accepted = |one: &&str| new.contains(one) || (*one == "integer" && new.contains(&"number"));
        // Without `type` every type was accepted; `integer` is part of `number`.
        let lost: Vec<&str> = self.types.iter().copied().filter(|one| !is_accepted(one)).collect();
        if !lost.is_empty() {
            self.report("/type", format!("{} was accepted and would be refused", lost.join(", ")));
        }
    }

    /// Lists of values, where the old schema had none.
    fn values(&mut self) {
        for keyword in ["enum", "const"] {
            if self.new.contains_key(keyword) {
                self.report(&format!("/{keyword}"), "only listed values would be accepted");
            }
        }
        let pattern = self.new.get("pattern");
        if pattern.is_some() && pattern != self.old.get("pattern") && self.accepted(&["string"]) {
            self.report("/pattern", "another pattern may refuse what was accepted");
        }
        let is_unique = |schema: &Map<String, Value>| schema.get("uniqueItems") == Some(&Value::Bool(true));
        if is_unique(self.new) && !is_unique(self.old) && self.accepted(&["array"]) {
            self.report("/uniqueItems", "equal items would be refused");
        }
        let multiple = |schema: &Map<String, Value>| schema.get("multipleOf").and_then(Value::as_f64);
        if let Some(new) = multiple(self.new)
            && self.accepted(&["number", "integer"])
            && multiple(self.old) != Some(new)
            && multiple(self.old).is_none_or(|old| (old / new).fract() != 0.0)
        {
            self.report("/multipleOf", "numbers that were accepted would be refused");
        }
    }

    fn limits(&mut self) {
        let numbers = ["number", "integer"];
        self.lower("minimum", "exclusiveMinimum", &numbers);
        self.upper("maximum", "exclusiveMaximum", &numbers);
        for (min, max, kind) in [
            ("minLength", "maxLength", "string"),
            ("minItems", "maxItems", "array"),
            ("minProperties", "maxProperties", "object"),
        ] {
            // Every count is at least 0.
            if self.number(self.new, min).is_some_and(|new| new > 0.0) {
                self.lower(min, "", &[kind]);
            }
            self.upper(max, "", &[kind]);
        }
    }

    fn number(&self, schema: &Map<String, Value>, keyword: &str) -> Option<f64> {
        schema.get(keyword).and_then(Value::as_f64)
    }

    /// The limit of a schema, and whether it excludes the number itself. Of two limits, the stricter one.
    fn lower(&mut self, inclusive: &str, exclusive: &str, kinds: &[&str]) {
        let limit = |schema: &Map<String, Value>| {
            let limits = [(self.number(schema, inclusive), false), (self.number(schema, exclusive), true)];
            let given =
                limits.into_iter().filter_map(|(number, is_exclusive)| number.map(|number| (number, is_exclusive)));
            given.max_by(|one, other| one.partial_cmp(other).unwrap_or(std::cmp::Ordering::Equal))
        };
        if let Some(new) = limit(self.new)
            && self.accepted(kinds)
            && limit(self.old).is_none_or(|old| new > old)
        {
            self.report(&format!("/{}", if new.1 { exclusive } else { inclusive }), "is stricter than before");
        }
    }

    fn upper(&mut self, inclusive: &str, exclusive: &str, kinds: &[&str]) {
        let limit = |schema: &Map<String, Value>| {
            let limits = [(self.number(schema, inclusive), true), (self.number(schema, exclusive), false)];
            let given =
                limits.into_iter().filter_map(|(number, is_inclusive)| number.map(|number| (number, is_inclusive)));
            given.min_by(|one, other| one.partial_cmp(other).unwrap_or(std::cmp::Ordering::Equal))
        };
        if let Some(new) = limit(self.new)
            && self.accepted(kinds)
            && limit(self.old).is_none_or(|old| new < old)
        {
            self.report(&format!("/{}", if new.1 { inclusive } else { exclusive }), "is stricter than before");
        }
    }

    fn compare(&mut self, old: Option<&Value>, new: Option<&Value>, part: &str) {
        let any = Value::Bool(true);
        compare(old.unwrap_or(&any), new.unwrap_or(&any), &format!("{}{part}", self.at), self.changes);
    }

    fn arrays(&mut self) {
        if !self.accepted(&["array"]) {
            return;
        }
        let (old, new) = (self.old, self.new);
        let prefix =
            |schema: &'_ Map<String, Value>| schema.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
        let item = |schema: &'_ Map<String, Value>, at: usize| {
            schema.get("prefixItems").and_then(|items| items.get(at)).or_else(|| schema.get("items")).cloned()
        };
        for at in 0..prefix(old).max(prefix(new)) {
            let part = if at < prefix(new) { format!("/prefixItems/{at}") } else { "/items".to_owned() };
            self.compare(item(old, at).as_ref(), item(new, at).as_ref(), &part);
        }
        self.compare(old.get("items"), new.get("items"), "/items");
        if new.contains_key("contains") {
            self.compare(old.get("contains"), new.get("contains"), "/contains");
            if !old.contains_key("contains") {
                self.report("/contains", "lists without such an item would be refused");
            }
        }
    }

    fn objects(&mut self) {
        if !self.accepted(&["object"]) {
            return;
        }
        let (old, new) = (self.old, self.new);
        let required = |schema: &'_ Map<String, Value>| list_of(schema.get("required"));
        for name in required(new).iter().filter(|name| !required(old).contains(name)) {
            self.report("/required", format!("`{name}` was optional and would be required"));
        }
        self.properties();
        let any = Value::Bool(true);
        let additional =
            |schema: &'_ Map<String, Value>| schema.get("additionalProperties").cloned().unwrap_or(any.clone());
        self.compare(Some(&additional(old)), Some(&additional(new)), "/additionalProperties");
        for (pattern, schema) in entries(new.get("patternProperties")) {
            let part = format!("/patternProperties/{}", escaped(pattern));
            let before = old.get("patternProperties").and_then(|patterns| patterns.get(pattern));
            self.compare(before, Some(schema), &part);
        }
        for (pattern, _) in entries(old.get("patternProperties")) {
            if new.get("patternProperties").is_none_or(|patterns| patterns.get(pattern).is_none()) {
                let part = format!("/patternProperties/{}", escaped(pattern));
                self.report(&part, "is removed");
            }
        }
        self.compare(old.get("propertyNames"), new.get("propertyNames"), "/propertyNames");
        for (name, list) in entries(new.get("dependentRequired")) {
            let before = list_of(old.get("dependentRequired").and_then(|lists| lists.get(name)));
            let is_new = |wanted: &String| !before.contains(wanted) && !required(old).contains(wanted);
            if list_of(Some(list)).iter().any(is_new) {
                self.report(&format!("/dependentRequired/{}", escaped(name)), "more properties would be required");
            }
        }
    }

    fn properties(&mut self) {
        let (old, new) = (self.old, self.new);
        let property = |schema: &'_ Map<String, Value>, name: &str| {
            schema.get("properties").and_then(|properties| properties.get(name)).cloned()
        };
        for (name, schema) in entries(old.get("properties")) {
            let part = format!("/properties/{}", escaped(name));
            match property(new, name) {
                Some(changed) => self.compare(Some(schema), Some(&changed), &part),
                // A property that was never accepted may go.
                None if *schema == Value::Bool(false) => {}
                None => self.report(&part, "is removed: receivers may read it"),
            }
        }
        let added = |(name, _): &(&String, &Value)| property(old, name).is_none();
        for (name, schema) in entries(new.get("properties")).filter(added) {
            let part = format!("/properties/{}", escaped(name));
            if let Some(before @ Value::Object(_)) = old.get("additionalProperties") {
                self.compare(Some(before), Some(schema), &part);
            }
            // Which of the patterns match the name is not examined: any of them may have defined it.
            for (_, before) in entries(old.get("patternProperties")) {
                self.compare(Some(before), Some(schema), &part);
            }
        }
    }

    fn combinations(&mut self) {
        let (old, new) = (self.old, self.new);
        let list = |schema: &'_ Map<String, Value>, keyword: &str| {
            schema.get(keyword).and_then(Value::as_array).cloned().unwrap_or_default()
        };
        let whole = Value::Object(old.clone());
        for (at, schema) in list(new, "allOf").iter().enumerate() {
            let mut implies = |before: &Value| self.changes.is_addition(before, schema);
            if !implies(&whole) && !list(old, "allOf").iter().any(implies) {
                self.report(&format!("/allOf/{at}"), "is another condition that may refuse what was accepted");
            }
        }
        let any_of = list(new, "anyOf");
        let mut has_alternative = |before: &Value| any_of.iter().any(|schema| self.changes.is_addition(before, schema));
        let before = list(old, "anyOf");
        if !any_of.is_empty() && !has_alternative(&whole) && (before.is_empty() || !before.iter().all(has_alternative))
        {
            self.report("/anyOf", "may refuse what was accepted");
        }
        for keyword in ["oneOf", "not", "if", "then", "else"] {
            if new.contains_key(keyword) && old.get(keyword) != new.get(keyword) {
                self.report(&format!("/{keyword}"), "differs from before and may refuse what was accepted");
            }
            // The branches of a condition that changes are compared with it.
            if keyword == "if"
                && old.contains_key("if")
                && !new.contains_key("if")
                && (new.contains_key("then") || new.contains_key("else"))
            {
                self.report("/if", "is removed");
            }
        }
    }
}

fn entries(value: Option<&Value>) -> impl Iterator<Item = (&String, &Value)> {
    value.and_then(Value::as_object).into_iter().flatten()
}

fn list_of(value: Option<&Value>) -> Vec<String> {
    value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pointers(old: &Value, new: &Value) -> Vec<String> {
        breaking_changes(old, new).into_iter().map(|error| error.pointer).collect()
    }

    #[test]
    fn additions_pass() {
        let order = json!({"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}, "state": {"enum": ["open", "paid"]}}});
        for (old, new) in [
            (
                order.clone(),
                json!({"type": "object", "required": ["id"], "properties": {
                "id": {"type": "integer"}, "state": {"enum": ["open", "paid", "sent"]}, "note": {"type": "string", "maxLength": 5}}}),
            ),
            (
                order,
                json!({"type": "object", "properties": {"id": {"type": ["number", "string"]}, "state": {"type": "string"}}}),
            ),
            (json!({"minLength": 2, "maxLength": 5}), json!({"minLength": 1, "maxLength": 6})),
            (json!({"exclusiveMinimum": 2}), json!({"minimum": 2})),
            (json!({"type": "string"}), json!({"type": "string", "minimum": 5, "minItems": 1})),
            (json!({"additionalProperties": false}), json!({"additionalProperties": {"type": "string"}})),
            (
                json!({"additionalProperties": false}),
                json!({"additionalProperties": false, "properties": {"a": {"type": "null"}}}),
            ),
            (json!({"multipleOf": 6}), json!({"multipleOf": 3})),
            (json!({"const": 5}), json!({"enum": [4, 5]})),
            (json!({"anyOf": [{"type": "string"}]}), json!({"anyOf": [{"type": "null"}, {"type": "string"}]})),
            (json!({"type": "string"}), json!({"anyOf": [{"type": "null"}, {"type": "string"}]})),
            (json!({"allOf": [{"minimum": 5}]}), json!({"allOf": [{"minimum": 4}]})),
            (json!({"minimum": 5}), json!({"allOf": [{"minimum": 4}]})),
            (
                json!({"prefixItems": [{"type": "string"}], "items": false}),
                json!({"prefixItems": [{"type": "string"}, {"type": "null"}]}),
            ),
            (json!(false), json!({"type": "string"})),
            (json!({"if": {"type": "string"}, "then": {"minLength": 1}}), json!({})),
        ] {
            assert_eq!(pointers(&old, &new), [""; 0], "{old} to {new}");
        }
    }

    #[test]
    fn what_may_refuse_earlier_payloads_or_removes_a_property_breaks() {
        for (old, new, pointer) in [
            (json!({}), json!({"type": "object"}), "/type"),
            (json!({"type": ["string", "null"]}), json!({"type": "string"}), "/type"),
            (json!({"type": "number"}), json!({"type": "integer"}), "/type"),
            (
                json!({"properties": {"a": {"type": "string"}}}),
                json!({"properties": {"a": {"type": "integer"}}}),
                "/properties/a/type",
            ),
            (json!({"properties": {"a/b": {}}}), json!({}), "/properties/a~1b"),
            (
                json!({"properties": {"a": {"properties": {"b": {}}}}}),
                json!({"properties": {"a": true}}),
                "/properties/a/properties/b",
            ),
            (json!({"required": ["a"]}), json!({"required": ["a", "b"]}), "/required"),
            (json!({"enum": ["a", "b"]}), json!({"enum": ["a"]}), "/enum"),
            (json!({"type": "string"}), json!({"type": "string", "enum": ["a"]}), "/enum"),
            (json!({"const": 1}), json!({"const": 2}), "/const"),
            (json!({"minimum": 2}), json!({"exclusiveMinimum": 2}), "/exclusiveMinimum"),
            (json!({"maximum": 2}), json!({"maximum": 1}), "/maximum"),
            (json!({}), json!({"maxLength": 9}), "/maxLength"),
            (json!({}), json!({"minItems": 1}), "/minItems"),
            (json!({"pattern": "a"}), json!({"pattern": "b"}), "/pattern"),
            (json!({}), json!({"uniqueItems": true}), "/uniqueItems"),
            (json!({"multipleOf": 3}), json!({"multipleOf": 6}), "/multipleOf"),
            (json!({}), json!({"additionalProperties": false}), "/additionalProperties"),
            (
                json!({"additionalProperties": {"type": "string"}}),
                json!({"additionalProperties": {"type": "null"}}),
                "/additionalProperties/type",
            ),
            (
                json!({"additionalProperties": {"type": "string"}}),
                json!({"properties": {"a": {"type": "null"}}}),
                "/properties/a/type",
            ),
            (json!({"items": {"type": "string"}}), json!({"items": {"type": "null"}}), "/items/type"),
            (json!({}), json!({"prefixItems": [{"type": "null"}]}), "/prefixItems/0/type"),
            (json!({"prefixItems": [{}], "items": false}), json!({"items": {"type": "null"}}), "/items/type"),
            (json!({}), json!({"contains": {}}), "/contains"),
            (json!({}), json!({"propertyNames": {"maxLength": 2}}), "/propertyNames/maxLength"),
            (json!({}), json!({"dependentRequired": {"a": ["b"]}}), "/dependentRequired/a"),
            (json!({}), json!({"allOf": [{"minimum": 1}]}), "/allOf/0"),
            (json!({}), json!({"anyOf": [{"minimum": 1}]}), "/anyOf"),
            (json!({"oneOf": [{}]}), json!({"oneOf": [{}, {}]}), "/oneOf"),
            (json!({}), json!({"not": {}}), "/not"),
            (json!({"if": {"minimum": 1}}), json!({"if": {"minimum": 1}, "then": {"maximum": 5}}), "/then"),
            (json!({"if": {"minimum": 1}, "then": false}), json!({"if": {"minimum": 0}, "then": false}), "/if"),
            (json!({"patternProperties": {"a": {}}}), json!({"minProperties": 0}), "/patternProperties/a"),
            (json!({}), json!({"patternProperties": {"a": {"type": "null"}}}), "/patternProperties/a/type"),
            (
                json!({"patternProperties": {"a": {"type": ["string", "null"]}}}),
                json!({"patternProperties": {"a": {"type": ["string", "null"]}}, "properties": {"ab": {"type": "null"}}}),
                "/properties/ab/type",
            ),
            (json!({}), json!(false), ""),
        ] {
            let found = pointers(&old, &new);
            assert!(found.contains(&pointer.to_owned()), "{old} to {new}: {found:?}");
        }
    }
}
