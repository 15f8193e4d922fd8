//! Checks a payload against a schema, and says in the words of this API what is wrong.
//!
//! Every visit of a keyword is charged before it is made, so a check ends in bounded time whatever the schema and the payload
//! are. The recursion is as deep as the schema, which is bounded as well.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash, Hasher};

use http_kit::problem::FieldError;
use serde_json::{Map, Number, Value};

use super::steps::{Exhausted, Steps};
use crate::event_types::schema::{CountLimits, IfThenElse, Node, NodeId, NumberLimits, Schema, Types, below};

/// Errors of one payload that are reported together.
const ERRORS_MAX: usize = 20;
/// Names and values that an error lists.
const LISTED_MAX: usize = 10;
/// Characters of a listed value.
const LISTED_CHARS_MAX: usize = 100;
/// Bytes of a text that are compared, or counted, in one step.
const BYTES_PER_STEP: u64 = 16;
/// Steps to note an item of a list whose items must differ, besides the visits of its values.
const UNIQUE_ITEM_STEPS: u64 = 20;
/// Steps of `multipleOf`, which compares decimal digits.
const MULTIPLE_OF_STEPS: u64 = 20;

impl Schema {
    /// What is wrong with a payload; `pointer` is where it is in the request body. Empty if it is valid.
    pub(crate) fn errors(
        &self,
        payload: &Value,
        pointer: &str,
        steps: &mut Steps,
    ) -> Result<Vec<FieldError>, Exhausted> {
        let mut check = Check { schema: self, steps, path: Vec::new(), errors: Some(Vec::new()) };
        check.node(self.root(), payload)?;
        let errors = check.errors.unwrap_or_default().into_iter();
        Ok(errors.map(|(at, detail)| FieldError::body(format!("{pointer}{at}"), detail)).collect())
    }

    /// Whether a node accepts a value.
    pub(crate) fn accepts(&self, node: NodeId, value: &Value, steps: &mut Steps) -> Result<bool, Exhausted> {
        Check { schema: self, steps, path: Vec::new(), errors: None }.node(node, value)
    }
}

struct Check<'c> {
    schema: &'c Schema,
    steps: &'c mut Steps,
    path: Vec<Part<'c>>,
    /// Pointers and details. None: only the verdict is wanted.
    errors: Option<Vec<(String, String)>>,
}

/// A part of the path to a value.
#[derive(Clone, Copy)]
enum Part<'c> {
    Property(&'c str),
    Item(usize),
}

/// Checks a value against some keywords of a node. Returns whether they accept it.
type KeywordCheck<'c> = fn(&mut Check<'c>, &'c Node, &'c Value) -> Result<bool, Exhausted>;

impl<'c> Check<'c> {
    /// Notes an error. Returns whether the check goes on, to find others.
    fn fail(&mut self, detail: impl FnOnce() -> String) -> bool {
        let Some(errors) = &mut self.errors else { return false };
        let pointer = self.path.iter().fold(String::new(), |pointer, part| match part {
            Part::Property(name) => below(&pointer, name),
            Part::Item(at) => below(&pointer, &at.to_string()),
        });
        errors.push((pointer, detail()));
        errors.len() < ERRORS_MAX
    }

    /// Whether a value is accepted, without errors.
    fn accepts(&mut self, node: NodeId, value: &'c Value) -> Result<bool, Exhausted> {
        let errors = self.errors.take();
        let accepts = self.node(node, value);
        self.errors = errors;
        accepts
    }

    /// Checks a value within the one that is being checked.
    fn within(&mut self, part: Part<'c>, node: NodeId, value: &'c Value) -> Result<bool, Exhausted> {
        self.path.push(part);
        let accepts = self.node(node, value);
        self.path.pop();
        accepts
    }

    /// Whether errors are full, or only the verdict is wanted: after the first error there is nothing left to do.
    fn is_done(&self, is_valid: bool) -> bool {
        !is_valid && self.errors.as_ref().is_none_or(|errors| errors.len() >= ERRORS_MAX)
    }

    fn node(&mut self, id: NodeId, value: &'c Value) -> Result<bool, Exhausted> {
        self.steps.spend(1)?;
        let node = self.schema.node(id);
        if node.is_never {
            self.fail(|| "is not accepted here".to_owned());
            return Ok(false);
        }
        let mut is_valid = true;
        let checks: [KeywordCheck<'c>; 4] = [Check::any, Check::of_type, Check::combinations, Check::condition];
        for check in checks {
            is_valid &= check(self, node, value)?;
            if self.is_done(is_valid) {
                return Ok(false);
            }
        }
        Ok(is_valid)
    }

    /// Keywords for values of any type.
    fn any(&mut self, node: &'c Node, value: &'c Value) -> Result<bool, Exhausted> {
        if !node.types.accepts(Types::of(value)) {
            let expected = || format!("must be of type {}", node.types.names().collect::<Vec<_>>().join(" or "));
            self.fail(expected);
            return Ok(false);
        }
        let Some(listed) = &node.values else { return Ok(true) };
        let mut is_valid = true;
        if let Some(expected) = &listed.of_const
            && !equal(expected, value, self.steps)?
        {
            is_valid = false;
            self.fail(|| format!("must be {}", short(expected)));
        }
        if let Some(values) = &listed.of_enum
            && !contains(values, value, self.steps)?
        {
            is_valid = false;
            self.fail(|| {
                let rest = if values.len() > LISTED_MAX { " and others" } else { "" };
                let listed: Vec<String> = values.iter().take(LISTED_MAX).map(short).collect();
                format!("must be one of {}{rest}", listed.join(", "))
            });
        }
        Ok(is_valid)
    }

    /// Keywords for values of one type.
    fn of_type(&mut self, node: &'c Node, value: &'c Value) -> Result<bool, Exhausted> {
        match value {
            Value::Number(number) => self.number(&node.number, number),
            Value::String(text) => self.text(node, text),
            Value::Array(items) => self.array(node, items),
            Value::Object(properties) => self.object(node, properties),
            Value::Null | Value::Bool(_) => Ok(true),
        }
    }

    fn number(&mut self, limits: &NumberLimits, number: &Number) -> Result<bool, Exhausted> {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let is = |limit: &Option<Number>, refused: &[std::cmp::Ordering]| {
            limit.as_ref().filter(|limit| compare(number, limit).is_some_and(|order| refused.contains(&order))).cloned()
        };
        let mut is_valid = true;
        for (broken, words) in [
            (is(&limits.minimum, &[Less]), "must be at least"),
            (is(&limits.maximum, &[Greater]), "must be at most"),
            (is(&limits.exclusive_minimum, &[Less, Equal]), "must be greater than"),
            (is(&limits.exclusive_maximum, &[Greater, Equal]), "must be less than"),
        ] {
            if let Some(limit) = broken {
                is_valid = false;
                self.fail(|| format!("{words} {limit}"));
            }
        }
        if let Some(divisor) = &limits.multiple_of {
            self.steps.spend(MULTIPLE_OF_STEPS)?;
            if !is_multiple(number, divisor) {
                is_valid = false;
                self.fail(|| format!("must be a multiple of {divisor}"));
            }
        }
        Ok(is_valid)
    }

    fn count(&mut self, limits: CountLimits, count: u64, what: &str) -> bool {
        let CountLimits { min, max } = limits;
        if let Some(min) = min.filter(|min| count < *min) {
            self.fail(|| format!("must have at least {min} {what}"));
            return false;
        }
        if let Some(max) = max.filter(|max| count > *max) {
            self.fail(|| format!("must have at most {max} {what}"));
            return false;
        }
        true
    }

    fn text(&mut self, node: &'c Node, text: &str) -> Result<bool, Exhausted> {
        let mut is_valid = true;
        if node.length.min.is_some() || node.length.max.is_some() {
            self.steps.spend(text.len() as u64 / BYTES_PER_STEP)?;
            is_valid &= self.count(node.length, text.chars().count() as u64, "characters");
        }
        if let Some(pattern) = &node.pattern
            && !pattern.is_match(text, self.steps)?
        {
            is_valid = false;
            self.fail(|| "must match the pattern of the schema".to_owned());
        }
        Ok(is_valid)
    }

    fn array(&mut self, node: &'c Node, items: &'c [Value]) -> Result<bool, Exhausted> {
        let mut is_valid = self.count(node.array.count, items.len() as u64, "items");
        if node.array.has_unique_items && !self.are_unique(items)? {
            is_valid = false;
            self.fail(|| "must not have two equal items".to_owned());
        }
        if let Some(wanted) = node.array.contains {
            let mut is_found = false;
            for item in items {
                is_found = is_found || self.accepts(wanted, item)?;
            }
            if !is_found {
                is_valid = false;
                self.fail(|| "must have an item that matches `contains`".to_owned());
            }
        }
        for (at, item) in items.iter().enumerate() {
            let schema = node.array.prefix_items.get(at).copied().or(node.array.items);
            let Some(schema) = schema else { break };
            is_valid &= self.within(Part::Item(at), schema, item)?;
            if self.is_done(is_valid) {
                break;
            }
        }
        Ok(is_valid)
    }

    fn are_unique(&mut self, items: &[Value]) -> Result<bool, Exhausted> {
        self.steps.spend(UNIQUE_ITEM_STEPS.saturating_mul(items.len() as u64))?;
        let hashes = RandomState::new();
        let mut by_hash: HashMap<u64, Vec<&Value>> = HashMap::with_capacity(items.len());
        for item in items {
            let mut hasher = hashes.build_hasher();
            hash(item, &mut hasher, self.steps)?;
            let same = by_hash.entry(hasher.finish()).or_default();
            for other in same.iter() {
                if equal(item, other, self.steps)? {
                    return Ok(false);
                }
            }
            same.push(item);
        }
        Ok(true)
    }

    fn object(&mut self, node: &'c Node, properties: &'c Map<String, Value>) -> Result<bool, Exhausted> {
        let mut is_valid = self.count(node.object.count, properties.len() as u64, "properties");
        is_valid &= self.required(node, properties)?;
        if self.is_done(is_valid) {
            return Ok(false);
        }
        // Whichever is shorter is walked over.
        self.steps.spend(node.object.properties.len().min(properties.len()) as u64)?;
        let is_listed = node.object.pattern_properties.is_empty()
            && node.object.additional_properties.is_none()
            && node.object.property_names.is_none()
            && node.object.properties.len() < properties.len();
        if is_listed {
            for (name, schema) in &node.object.properties {
                if let Some(value) = properties.get(name) {
                    is_valid &= self.within(Part::Property(name), *schema, value)?;
                    if self.is_done(is_valid) {
                        return Ok(false);
                    }
                }
            }
            return Ok(is_valid);
        }
        let mut unexpected = Vec::new();
        for (name, value) in properties {
            is_valid &= self.property(node, name, value, &mut unexpected)?;
            if self.is_done(is_valid) {
                return Ok(false);
            }
        }
        if !unexpected.is_empty() {
            self.fail(|| format!("must not have the properties {}", names(&unexpected)));
        }
        Ok(is_valid)
    }

    fn required(&mut self, node: &'c Node, properties: &Map<String, Value>) -> Result<bool, Exhausted> {
        self.steps.spend(node.object.required.len() as u64)?;
        let mut is_valid = true;
        for name in node.object.required.iter().filter(|name| !properties.contains_key(*name)) {
            is_valid = false;
            if !self.fail(|| format!("must have the property {}", short(&Value::from(name.as_str())))) {
                return Ok(false);
            }
        }
        // Whichever is shorter is walked over.
        self.steps.spend(node.object.dependent_required.len().min(properties.len()) as u64)?;
        let dependent: Vec<_> = if node.object.dependent_required.len() < properties.len() {
            node.object.dependent_required.iter().filter(|(name, _)| properties.contains_key(*name)).collect()
        } else {
            properties.keys().filter_map(|name| node.object.dependent_required.get_key_value(name)).collect()
        };
        for (_, names) in dependent {
            self.steps.spend(names.len() as u64)?;
            for name in names.iter().filter(|name| !properties.contains_key(*name)) {
                is_valid = false;
                if !self.fail(|| format!("must have the property {}", short(&Value::from(name.as_str())))) {
                    return Ok(false);
                }
            }
        }
        Ok(is_valid)
    }

    fn property(
        &mut self,
        node: &'c Node,
        name: &'c str,
        value: &'c Value,
        unexpected: &mut Vec<&'c str>,
    ) -> Result<bool, Exhausted> {
        self.steps.spend(1)?;
        let (mut is_valid, mut is_known) = (true, false);
        if let Some(wanted) = node.object.property_names {
            let text = Value::from(name);
            if !self.schema.accepts(wanted, &text, self.steps)? {
                is_valid = false;
                self.fail(|| format!("must have valid property names, and {} is not", short(&text)));
            }
        }
        if let Some(schema) = node.object.properties.get(name) {
            is_known = true;
            is_valid &= self.within(Part::Property(name), *schema, value)?;
        }
        for (pattern, schema) in &node.object.pattern_properties {
            if pattern.is_match(name, self.steps)? {
                is_known = true;
                is_valid &= self.within(Part::Property(name), *schema, value)?;
            }
        }
        match node.object.additional_properties {
            Some(schema) if !is_known && self.schema.node(schema).is_never => {
                unexpected.push(name);
                Ok(false)
            }
            Some(schema) if !is_known => Ok(self.within(Part::Property(name), schema, value)? && is_valid),
            Some(_) | None => Ok(is_valid),
        }
    }

    fn combinations(&mut self, node: &'c Node, value: &'c Value) -> Result<bool, Exhausted> {
        let mut is_valid = true;
        for schema in &node.all_of {
            is_valid &= self.node(*schema, value)?;
            if self.is_done(is_valid) {
                return Ok(false);
            }
        }
        if !node.any_of.is_empty() {
            let mut is_found = false;
            for schema in &node.any_of {
                is_found = is_found || self.accepts(*schema, value)?;
            }
            if !is_found {
                is_valid = false;
                self.fail(|| "must match at least one of the schemas in `anyOf`".to_owned());
            }
        }
        if !node.one_of.is_empty() {
            let mut found = 0;
            for schema in &node.one_of {
                if found < 2 {
                    found += usize::from(self.accepts(*schema, value)?);
                }
            }
            if found != 1 {
                is_valid = false;
                self.fail(|| match found {
                    0 => "must match one of the schemas in `oneOf`".to_owned(),
                    _ => "must match only one of the schemas in `oneOf`, and matches several".to_owned(),
                });
            }
        }
        if let Some(refused) = node.not
            && self.accepts(refused, value)?
        {
            is_valid = false;
            self.fail(|| "must not match the schema in `not`".to_owned());
        }
        Ok(is_valid)
    }

    fn condition(&mut self, node: &'c Node, value: &'c Value) -> Result<bool, Exhausted> {
        let Some(IfThenElse { condition, then, otherwise }) = node.if_then_else else { return Ok(true) };
        let branch = if self.accepts(condition, value)? { then } else { otherwise };
        branch.map_or(Ok(true), |schema| self.node(schema, value))
    }
}

/// Whether a list contains a value.
fn contains(values: &[Value], value: &Value, steps: &mut Steps) -> Result<bool, Exhausted> {
    for one in values {
        if equal(one, value, steps)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether two values are equal in JSON Schema: 1 equals 1.0.
pub(super) fn equal(one: &Value, other: &Value, steps: &mut Steps) -> Result<bool, Exhausted> {
    steps.spend(1)?;
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => Ok(compare(one, other) == Some(std::cmp::Ordering::Equal)),
        (Value::String(one), Value::String(other)) => {
            if one.len() != other.len() {
                return Ok(false);
            }
            steps.spend(one.len() as u64 / BYTES_PER_STEP)?;
            Ok(one == other)
        }
        (Value::Array(one), Value::Array(other)) => {
            if one.len() != other.len() {
                return Ok(false);
            }
            for (one, other) in one.iter().zip(other) {
                if !equal(one, other, steps)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (Value::Object(one), Value::Object(other)) => {
            if one.len() != other.len() {
                return Ok(false);
            }
            for (name, value) in one {
                let Some(other) = other.get(name) else { return Ok(false) };
                if !equal(value, other, steps)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (one, other) => Ok(one == other),
    }
}

/// The same for equal values.
fn hash(value: &Value, hasher: &mut impl Hasher, steps: &mut Steps) -> Result<(), Exhausted> {
    steps.spend(1)?;
    std::mem::discriminant(value).hash(hasher);
    match value {
        Value::Null => {}
        Value::Bool(value) => value.hash(hasher),
        // Equal numbers have the same nearest double, and 0 equals -0.
        Value::Number(number) => (number.as_f64().unwrap_or_default() + 0.0).to_bits().hash(hasher),
        Value::String(text) => {
            steps.spend(text.len() as u64 / BYTES_PER_STEP)?;
            text.hash(hasher);
        }
        Value::Array(items) => {
            items.len().hash(hasher);
            for item in items {
                hash(item, hasher, steps)?;
            }
        }
        // Whatever the order of the properties is.
        Value::Object(properties) => {
            let mut sorted: Vec<_> = properties.iter().collect();
            sorted.sort_unstable_by_key(|(name, _)| *name);
            for (name, value) in sorted {
                steps.spend(name.len() as u64 / BYTES_PER_STEP)?;
                name.hash(hasher);
                hash(value, hasher, steps)?;
            }
        }
    }
    Ok(())
}

/// Integers are compared exactly.
pub(super) fn compare(one: &Number, other: &Number) -> Option<std::cmp::Ordering> {
    match (integer(one), integer(other)) {
        (Some(one), Some(other)) => Some(one.cmp(&other)),
        _ => one.as_f64()?.partial_cmp(&other.as_f64()?),
    }
}

fn integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Whether a number is a multiple of another one, as decimal numbers: 0.3 is a multiple of 0.1.
pub(super) fn is_multiple(number: &Number, divisor: &Number) -> bool {
    let (Some((number, exponent)), Some((divisor, divisor_exponent))) = (decimal(number), decimal(divisor)) else {
        return false;
    };
    if number == 0 || divisor == 0 {
        return number == 0;
    }
    let shift = exponent.abs_diff(divisor_exponent);
    if exponent < divisor_exponent {
        let scaled = 10_u128.checked_pow(shift).and_then(|power| power.checked_mul(divisor));
        // Otherwise the divisor is larger than the number.
        return scaled.is_some_and(|divisor| number.is_multiple_of(divisor));
    }
    // `number * 10^shift` modulo the divisor. The digits of both are below 2^64, so no product overflows.
    let (mut rest, mut power, mut left) = (number % divisor, 10 % divisor, shift);
    while left > 0 {
        if left % 2 == 1 {
            rest = rest * power % divisor;
        }
        (power, left) = (power * power % divisor, left / 2);
    }
    rest == 0
}

/// The absolute value of a number as digits and a power of ten.
fn decimal(number: &Number) -> Option<(u128, i32)> {
    let text = number.to_string();
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, "0"));
    let (whole, fraction) =
        digits.trim_start_matches('-').split_once('.').unwrap_or((digits.trim_start_matches('-'), ""));
    let fraction = fraction.trim_end_matches('0');
    let exponent: i32 = exponent.parse().ok()?;
    Some((format!("{whole}{fraction}").parse().ok()?, exponent - fraction.len() as i32))
}

fn names(names: &[&str]) -> String {
    let listed: Vec<String> = names.iter().take(LISTED_MAX).map(|name| short(&Value::from(*name))).collect();
    format!("{}{}", listed.join(", "), if names.len() > LISTED_MAX { " and others" } else { "" })
}

/// The JSON of a value, cut to a length that fits in an error.
pub(super) fn short(value: &Value) -> String {
    let mut text = String::new();
    // The whole text of a long list would be written only to be cut.
    if write_short(value, &mut text) {
        return text;
    }
    let end = text.char_indices().nth(LISTED_CHARS_MAX).map_or(text.len(), |(end, _)| end);
    format!("{}...", &text[..end])
}

/// Appends the JSON of a value. Returns false when the text is long enough.
fn write_short(value: &Value, text: &mut String) -> bool {
    match value {
        Value::Array(items) => {
            text.push('[');
            for (at, item) in items.iter().enumerate() {
                text.push_str(if at > 0 { "," } else { "" });
                if !write_short(item, text) {
                    return false;
                }
            }
            text.push(']');
        }
        Value::Object(properties) => {
            text.push('{');
            for (at, (name, value)) in properties.iter().enumerate() {
                text.push_str(if at > 0 { "," } else { "" });
                if !write_short(&Value::from(name.as_str()), text) {
                    return false;
                }
                text.push(':');
                if !write_short(value, text) {
                    return false;
                }
            }
            text.push('}');
        }
        Value::String(long) if long.len() > 8 * LISTED_CHARS_MAX => {
            let start: String = long.chars().take(LISTED_CHARS_MAX).collect();
            text.push_str(&Value::from(start).to_string());
            return false;
        }
        scalar => text.push_str(&scalar.to_string()),
    }
    text.chars().nth(LISTED_CHARS_MAX).is_none()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use serde_json::value::RawValue;

    use super::*;

    fn schema(schema: &Value) -> Schema {
        Schema::parse(&RawValue::from_string(schema.to_string()).unwrap()).unwrap()
    }

    fn accepts(rules: &Value, value: &Value) -> bool {
        let schema = schema(rules);
        let accepts = schema.accepts(schema.root(), value, &mut Steps::new(1_000_000)).unwrap();
        let errors = schema.errors(value, "", &mut Steps::new(1_000_000)).unwrap();
        assert_eq!(errors.is_empty(), accepts, "{rules} {value}: {errors:?}");
        accepts
    }

    #[test]
    fn errors_point_into_the_payload() {
        let schema = schema(&json!({
            "type": "object", "required": ["id"], "additionalProperties": false,
            "properties": {"id": {"type": "integer"}, "tags": {"items": {"enum": ["a", "b"]}}, "x~y": {"type": ["null", "string"]}},
        }));
        let errors = |payload: &Value| {
            let errors = schema.errors(payload, "/events/3/payload", &mut Steps::new(1_000)).unwrap();
            let mut errors: Vec<_> = errors.into_iter().map(|error| (error.pointer, error.detail)).collect();
            errors.sort();
            errors
        };
        assert_eq!(errors(&json!({"id": 1.0})), []);
        let expected = [
            ("/events/3/payload", "must have the property \"id\""),
            ("/events/3/payload", "must not have the properties \"other\""),
            ("/events/3/payload/tags/1", "must be one of \"a\", \"b\""),
            ("/events/3/payload/x~0y", "must be of type null or string"),
        ];
        let payload = json!({"tags": ["a", "c"], "other": 1, "x~y": 5});
        assert_eq!(errors(&payload), expected.map(|(pointer, detail)| (pointer.to_owned(), detail.to_owned())));
    }

    #[test]
    fn numbers_are_compared_as_decimal_numbers() {
        for (rules, value, expected) in [
            (json!({"multipleOf": 0.1}), json!(0.3), true),
            (json!({"multipleOf": 0.01}), json!(19.99), true),
            (json!({"multipleOf": 0.01}), json!(19.999), false),
            (json!({"multipleOf": 3}), json!(1e300), false),
            (json!({"multipleOf": 3}), json!(3e300), true),
            (json!({"multipleOf": 7}), json!(-21), true),
            (json!({"multipleOf": 1e15}), json!(0.5), false),
            (json!({"multipleOf": 0.5}), json!(0), true),
            (json!({"const": 1}), json!(1.0), true),
            (json!({"enum": [[0]]}), json!([-0.0]), true),
            (json!({"uniqueItems": true}), json!([0, -0.0]), false),
            (json!({"uniqueItems": true}), json!([{"a": 1, "b": 2}, {"b": 2.0, "a": 1}]), false),
            (json!({"uniqueItems": true}), json!([1, true, "1", [1], {"1": 1}]), true),
            (json!({"maximum": 9_007_199_254_740_991_u64}), json!(9_007_199_254_740_993_u64), false),
            (json!({"type": "integer"}), json!(1e20), true),
        ] {
            assert_eq!(accepts(&rules, &value), expected, "{rules} {value}");
        }
    }

    #[test]
    fn a_check_ends_when_its_steps_are_spent() {
        let alternatives: Vec<Value> = (0..900).map(|n| json!({"const": n})).collect();
        let schema = schema(&json!({"items": {"anyOf": alternatives}}));
        let payload = Value::from(vec![json!(899); 10_000]);
        let mut steps = Steps::new(100_000);
        assert_eq!(schema.errors(&payload, "", &mut steps), Err(Exhausted));
        assert_eq!(steps.left(), 0);
        let few = Value::from(vec![json!(0); 10]);
        assert_eq!(schema.errors(&few, "", &mut Steps::new(100_000)), Ok(Vec::new()));
    }

    #[test]
    fn an_error_is_short_whatever_the_schema_and_the_payload_are() {
        let long = json!({"enum": [vec!["x".repeat(1_000); 50]]});
        let schema = schema(&long);
        let errors = schema.errors(&json!(1), "", &mut Steps::new(1_000)).unwrap();
        assert!(errors[0].detail.len() < 300, "{}", errors[0].detail);
    }
}
