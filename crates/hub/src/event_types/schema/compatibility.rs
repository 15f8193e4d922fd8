//! Whether a new version of a schema only adds to the previous one.
//!
//! The comparison is structural and errs on the side of a refusal: a version passes if the rules below can tell that payloads
//! which are valid under the previous version are valid under the new one, and that no property that receivers may read has
//! lost its definition. One exception is wanted: an object that accepted any further property may define some of them, as long
//! as they are optional, because that is how payloads grow.
//!
//! Alternatives are compared with each other, so the number of comparisons is bounded: see [`COMPARISON_STEPS`].

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use http_kit::problem::FieldError;
use serde_json::Number;

use super::pattern::Pattern;
use super::steps::{Exhausted, Steps};
use super::validator::{compare as compare_numbers, is_multiple, short};
use crate::event_types::schema::{CountLimits, Listed, Node, NodeId, Schema, Types, below, cut};

/// What the comparison of two nodes costs, without the values and names that are compared.
const COMPARISON_STEPS: u64 = 100;
/// What each name costs, which is looked up and may become a part of a pointer.
const NAME_STEPS: u64 = 20;
/// Changes that are reported together.
const CHANGES_MAX: usize = 100;

/// Accepts everything: an absent schema.
static ANY: LazyLock<Node> = LazyLock::new(Node::default);

/// What breaks, with pointers into the new schema. Empty if the new version only adds.
pub(crate) fn breaking_changes(old: &Schema, new: &Schema, steps: &mut Steps) -> Result<Vec<FieldError>, Exhausted> {
    let mut comparer = Comparer { old, new, steps, found: Vec::new() };
    comparer.compare(Some(old.root()), Some(new.root()), "")?;
    Ok(comparer.found.into_iter().map(|(pointer, detail)| FieldError::body(pointer, detail)).collect())
}

struct Comparer<'c> {
    old: &'c Schema,
    new: &'c Schema,
    steps: &'c mut Steps,
    /// Pointers and details.
    found: Vec<(String, String)>,
}

type Compared = Result<(), Exhausted>;

impl<'c> Comparer<'c> {
    fn report(&mut self, at: &str, part: &str, detail: impl Into<String>) {
        if self.found.len() < CHANGES_MAX {
            self.found.push((format!("{at}{part}"), detail.into()));
        }
    }

    /// Whether a schema only adds to another. The changes that it finds are not part of the result.
    fn is_addition(&mut self, old: Option<NodeId>, new: NodeId) -> Result<bool, Exhausted> {
        let found = std::mem::take(&mut self.found);
        let compared = self.compare(old, Some(new), "");
        let is_addition = self.found.is_empty();
        self.found = found;
        compared.map(|()| is_addition)
    }

    /// Compares two schemas; None accepts everything.
    fn compare(&mut self, old_id: Option<NodeId>, new_id: Option<NodeId>, at: &str) -> Compared {
        self.steps.spend(COMPARISON_STEPS)?;
        if old_id.is_none() && new_id.is_none() {
            return Ok(());
        }
        let old = old_id.map_or(&*ANY, |id| self.old.node(id));
        let new = new_id.map_or(&*ANY, |id| self.new.node(id));
        if (old_id.is_some() && new_id.is_some() && old.digest == new.digest) || old.is_never {
            return Ok(());
        }
        if new.is_never {
            self.report(at, "", "nothing would be accepted here any more");
            return Ok(());
        }
        // A list of values can be compared value by value, exactly.
        if let (Some(listed), Some(old_id)) = (&old.values, old_id) {
            return self.values(listed, old_id, new, new_id, at);
        }
        let pair = Pair { old, new, at };
        self.types(&pair);
        self.constraints(&pair);
        self.limits(&pair);
        self.arrays(&pair)?;
        self.objects(&pair)?;
        self.combinations(&pair, old_id)
    }

    /// Compares with a schema that lists its values.
    fn values(&mut self, listed: &'c Listed, old_id: NodeId, new: &Node, new_id: Option<NodeId>, at: &str) -> Compared {
        let values = match (&listed.of_const, &listed.of_enum) {
            (Some(value), _) => std::slice::from_ref(value),
            (None, Some(values)) => values,
            (None, None) => &[],
        };
        let Some(new_id) = new_id else { return Ok(()) };
        for value in values {
            if self.old.accepts(old_id, value, self.steps)? && !self.new.accepts(new_id, value, self.steps)? {
                let part = match &new.values {
                    Some(Listed { of_enum: Some(_), .. }) => "/enum",
                    Some(Listed { of_const: Some(_), .. }) => "/const",
                    Some(_) | None if new.types != Types::ALL => "/type",
                    Some(_) | None => "",
                };
                self.report(at, part, format!("{} was accepted and would be refused", short(value)));
                return Ok(());
            }
        }
        Ok(())
    }

    fn types(&mut self, pair: &Pair<'_>) {
        // Without `type` every type was accepted; `integer` is part of `number`.
        let lost = pair.old.types.not_in(pair.new.types);
        if !lost.is_empty() {
            self.report(pair.at, "/type", format!("{} was accepted and would be refused", lost.join(", ")));
        }
    }

    /// Constraints of single values, where the old schema listed none.
    fn constraints(&mut self, pair: &Pair<'_>) {
        let Pair { old, new, at } = pair;
        if let Some(listed) = &new.values {
            for (is_given, part) in [(listed.of_enum.is_some(), "/enum"), (listed.of_const.is_some(), "/const")] {
                if is_given {
                    self.report(at, part, "only listed values would be accepted");
                }
            }
        }
        let text = |pattern: &Option<Arc<Pattern>>| pattern.as_ref().map(|pattern| pattern.text().to_owned());
        if new.pattern.is_some() && text(&new.pattern) != text(&old.pattern) && old.types.has(Types::STRING) {
            self.report(at, "/pattern", "another pattern may refuse what was accepted");
        }
        if new.array.has_unique_items && !old.array.has_unique_items && old.types.has(Types::ARRAY) {
            self.report(at, "/uniqueItems", "equal items would be refused");
        }
        if let Some(divisor) = &new.number.multiple_of
            && old.types.has(Types::NUMBERS)
            && old.number.multiple_of.as_ref().is_none_or(|before| !is_multiple(before, divisor))
        {
            self.report(at, "/multipleOf", "numbers that were accepted would be refused");
        }
    }

    fn limits(&mut self, pair: &Pair<'_>) {
        let Pair { old, new, at } = pair;
        if old.types.has(Types::NUMBERS) {
            let sides = [
                (lower_limit(old), lower_limit(new), Ordering::Greater, ["/minimum", "/exclusiveMinimum"]),
                (upper_limit(old), upper_limit(new), Ordering::Less, ["/maximum", "/exclusiveMaximum"]),
            ];
            for (before, now, side, [inclusive, exclusive]) in sides {
                if let Some(limit) = now
                    && before.is_none_or(|before| limit.compare(&before, side) == side)
                {
                    let part = if limit.excludes { exclusive } else { inclusive };
                    self.report(at, part, "is stricter than before");
                }
            }
        }
        for (before, now, kind, [min, max]) in [
            (old.length, new.length, Types::STRING, ["/minLength", "/maxLength"]),
            (old.array.count, new.array.count, Types::ARRAY, ["/minItems", "/maxItems"]),
            (old.object.count, new.object.count, Types::OBJECT, ["/minProperties", "/maxProperties"]),
        ] {
            if !old.types.has(kind) {
                continue;
            }
            let CountLimits { min: lowest, max: highest } = now;
            // Every count is at least 0.
            if lowest.is_some_and(|now| now > before.min.unwrap_or(0)) {
                self.report(at, min, "is stricter than before");
            }
            if highest.is_some_and(|now| before.max.is_none_or(|before| now < before)) {
                self.report(at, max, "is stricter than before");
            }
        }
    }

    fn arrays(&mut self, pair: &Pair<'_>) -> Compared {
        let Pair { old, new, at } = pair;
        if !old.types.has(Types::ARRAY) {
            return Ok(());
        }
        let item = |node: &Node, index: usize| node.array.prefix_items.get(index).copied().or(node.array.items);
        for index in 0..old.array.prefix_items.len().max(new.array.prefix_items.len()) {
            let part = if index < new.array.prefix_items.len() {
                below(&below(at, "prefixItems"), &index.to_string())
            } else {
                below(at, "items")
            };
            self.compare(item(old, index), item(new, index), &part)?;
        }
        self.compare(old.array.items, new.array.items, &below(at, "items"))?;
        if new.array.contains.is_some() {
            self.compare(old.array.contains, new.array.contains, &below(at, "contains"))?;
            if old.array.contains.is_none() {
                self.report(at, "/contains", "lists without such an item would be refused");
            }
        }
        Ok(())
    }

    fn objects(&mut self, pair: &Pair<'_>) -> Compared {
        let Pair { old, new, at } = pair;
        if !old.types.has(Types::OBJECT) {
            return Ok(());
        }
        let names = old.object.required.len()
            + new.object.required.len()
            + old.object.properties.len()
            + new.object.properties.len();
        self.steps.spend(NAME_STEPS * names as u64)?;
        for name in new.object.required.difference(&old.object.required) {
            self.report(at, "/required", format!("`{}` was optional and would be required", cut(name, 100)));
        }
        self.properties(pair)?;
        self.compare(
            old.object.additional_properties,
            new.object.additional_properties,
            &below(at, "additionalProperties"),
        )?;
        let patterns = old.object.pattern_properties.len() + new.object.pattern_properties.len();
        self.steps.spend(NAME_STEPS * patterns as u64)?;
        let (before, now) = (patterns_of(old), patterns_of(new));
        for (pattern, schema) in &now {
            let part = below(&below(at, "patternProperties"), pattern);
            self.compare(before.get(pattern).copied(), Some(*schema), &part)?;
        }
        for pattern in before.keys().filter(|pattern| !now.contains_key(*pattern)) {
            self.report(&below(&below(at, "patternProperties"), pattern), "", "is removed");
        }
        self.compare(old.object.property_names, new.object.property_names, &below(at, "propertyNames"))?;
        for (name, wanted) in &new.object.dependent_required {
            self.steps.spend(NAME_STEPS * (wanted.len() as u64 + 1))?;
            let before = old.object.dependent_required.get(name);
            let is_new =
                |one: &String| !before.is_some_and(|before| before.contains(one)) && !old.object.required.contains(one);
            if wanted.iter().any(is_new) {
                let part = below(&below(at, "dependentRequired"), name);
                self.report(&part, "", "more properties would be required");
            }
        }
        Ok(())
    }

    fn properties(&mut self, pair: &Pair<'_>) -> Compared {
        let Pair { old, new, at } = pair;
        for (name, schema) in &old.object.properties {
            let part = below(&below(at, "properties"), name);
            match new.object.properties.get(name) {
                Some(changed) => self.compare(Some(*schema), Some(*changed), &part)?,
                // A property that was never accepted may go.
                None if self.old.node(*schema).is_never => {}
                None => self.report(&part, "", "is removed: receivers may read it"),
            }
        }
        for (name, schema) in
            new.object.properties.iter().filter(|(name, _)| !old.object.properties.contains_key(*name))
        {
            let part = below(&below(at, "properties"), name);
            if let Some(before) =
                old.object.additional_properties.filter(|before| !self.old.accepts_everything(*before))
            {
                self.compare(Some(before), Some(*schema), &part)?;
            }
            // Which of the patterns match the name is not examined: any of them may have defined it.
            for (_, before) in &old.object.pattern_properties {
                self.compare(Some(*before), Some(*schema), &part)?;
            }
        }
        Ok(())
    }

    fn combinations(&mut self, pair: &Pair<'_>, whole: Option<NodeId>) -> Compared {
        let Pair { old, new, at } = pair;
        for (index, schema) in new.all_of.iter().enumerate() {
            let mut is_implied = self.is_addition(whole, *schema)?;
            for before in &old.all_of {
                is_implied = is_implied || self.is_addition(Some(*before), *schema)?;
            }
            if !is_implied {
                self.report(at, &format!("/allOf/{index}"), "is another condition that may refuse what was accepted");
            }
        }
        if !new.any_of.is_empty() && !self.has_alternative(whole, new)? {
            let mut have_alternatives = !old.any_of.is_empty();
            for before in &old.any_of {
                have_alternatives = have_alternatives && self.has_alternative(Some(*before), new)?;
            }
            if !have_alternatives {
                self.report(at, "/anyOf", "may refuse what was accepted");
            }
        }
        let digest = |schema: &Schema, id: NodeId| schema.node(id).digest;
        let digests =
            |schema: &Schema, ids: &[NodeId]| -> Vec<[u8; 16]> { ids.iter().map(|id| digest(schema, *id)).collect() };
        let differs = "differs from before and may refuse what was accepted";
        self.steps.spend((old.one_of.len() + new.one_of.len()) as u64)?;
        if !new.one_of.is_empty() && digests(self.old, &old.one_of) != digests(self.new, &new.one_of) {
            self.report(at, "/oneOf", differs);
        }
        if let Some(refused) = new.not
            && old.not.is_none_or(|before| digest(self.old, before) != digest(self.new, refused))
        {
            self.report(at, "/not", differs);
        }
        let Some(now) = new.if_then_else else { return Ok(()) };
        let condition = old.if_then_else.map(|before| digest(self.old, before.condition));
        let parts = |part: fn(&crate::event_types::schema::IfThenElse) -> Option<NodeId>| {
            let before = old.if_then_else.as_ref().and_then(part).map(|id| digest(self.old, id));
            (before, part(&now).map(|id| digest(self.new, id)))
        };
        let (then, otherwise) = (parts(|part| part.then), parts(|part| part.otherwise));
        if (then.1.is_some() || otherwise.1.is_some()) && condition != Some(digest(self.new, now.condition)) {
            self.report(at, "/if", differs);
        }
        for ((before, now), part) in [(then, "/then"), (otherwise, "/else")] {
            if now.is_some() && before != now {
                self.report(at, part, differs);
            }
        }
        Ok(())
    }

    /// Whether one of the new alternatives accepts everything that a schema does.
    fn has_alternative(&mut self, before: Option<NodeId>, new: &Node) -> Result<bool, Exhausted> {
        for schema in &new.any_of {
            if self.is_addition(before, *schema)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Two nodes that are compared.
struct Pair<'p> {
    old: &'p Node,
    new: &'p Node,
    /// The pointer to the new one.
    at: &'p str,
}

fn patterns_of(node: &Node) -> BTreeMap<&str, NodeId> {
    node.object.pattern_properties.iter().map(|(pattern, id)| (pattern.text(), *id)).collect()
}

/// A limit of a number.
struct Limit<'n> {
    number: &'n Number,
    /// Whether the number itself is refused.
    excludes: bool,
}

impl Limit<'_> {
    /// Which of two limits is further on a side. Of the same number, the one that excludes it.
    fn compare(&self, other: &Limit<'_>, side: Ordering) -> Ordering {
        let excluding = match side {
            Ordering::Less => other.excludes.cmp(&self.excludes),
            Ordering::Greater | Ordering::Equal => self.excludes.cmp(&other.excludes),
        };
        compare_numbers(self.number, other.number).unwrap_or(Ordering::Equal).then(excluding)
    }
}

fn lower_limit(node: &Node) -> Option<Limit<'_>> {
    stricter(&node.number.minimum, &node.number.exclusive_minimum, Ordering::Greater)
}

fn upper_limit(node: &Node) -> Option<Limit<'_>> {
    stricter(&node.number.maximum, &node.number.exclusive_maximum, Ordering::Less)
}

/// The stricter one of two limits on the same side.
fn stricter<'n>(inclusive: &'n Option<Number>, exclusive: &'n Option<Number>, side: Ordering) -> Option<Limit<'n>> {
    let inclusive = inclusive.as_ref().map(|number| Limit { number, excludes: false });
    let exclusive = exclusive.as_ref().map(|number| Limit { number, excludes: true });
    match (inclusive, exclusive) {
        (Some(one), Some(other)) => Some(if one.compare(&other, side) == side { one } else { other }),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;
    use serde_json::{Value, json};

    use super::*;

    fn schema(schema: &Value) -> Schema {
        Schema::parse(&RawValue::from_string(schema.to_string()).unwrap()).unwrap()
    }

    fn pointers(old: &Value, new: &Value) -> Vec<String> {
        let changes = breaking_changes(&schema(old), &schema(new), &mut Steps::new(1_000_000)).unwrap();
        changes.into_iter().map(|error| error.pointer).collect()
    }

    #[test]
    fn many_alternatives_are_compared_in_bounded_time() {
        let patterns: Vec<Value> = (0..120).map(|n| json!({"pattern": format!("^a{{{n}}}b*$")})).collect();
        let enums: Vec<Value> = (0..150).map(|n| json!({"enum": [format!("x{n}"), "y".repeat(n)]})).collect();
        let (old, new) = (schema(&json!({"anyOf": enums})), schema(&json!({"anyOf": patterns})));
        let changes = breaking_changes(&old, &new, &mut Steps::new(20_000_000)).unwrap();
        assert_eq!(changes[0].pointer, "/anyOf");
        assert_eq!(breaking_changes(&old, &new, &mut Steps::new(1_000)), Err(Exhausted));
    }

    #[test]
    fn the_pointers_to_what_breaks_are_short_whatever_the_names_are() {
        let long = "x".repeat(15_000);
        let removed: serde_json::Map<String, Value> = (0..200).map(|n| (format!("{n}"), json!({}))).collect();
        let old =
            json!({"properties": {&long: {"properties": {&long: {"properties": removed}}}}, "patternProperties": {}});
        let mut found = pointers(&old, &json!({"properties": {&long: {"properties": {&long: {}}}}}));
        found.extend(pointers(&json!({}), &json!({"dependentRequired": {&long: ["a"]}})));
        assert_eq!(found.len(), CHANGES_MAX + 1);
        assert!(found.iter().all(|pointer| pointer.len() < 1_000), "{}", found[0].len());
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
