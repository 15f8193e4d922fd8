//! Which JSON Schemas the catalogue accepts, and how they are compiled.
//!
//! The limits are chosen so that a schema of any real event is far below them, and what they admit is cheap: the depth and the
//! number of schemas, the memory of the compiled form, and the *cost*, which is what a check of one value needs at most.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http_kit::problem::FieldError;
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

use super::digest::digest;
use super::pattern::Pattern;
use crate::event_types::schema::{CountLimits, IfThenElse, Node, NodeId, Schema, TYPES, Types, below};

/// Bytes of a schema.
pub(crate) const BYTES_MAX: usize = 64 * 1024;
/// Bytes of a compiled schema.
const COMPILED_BYTES_MAX: usize = 1024 * 1024;
/// Schemas within a schema.
const SUBSCHEMAS_MAX: usize = 1_000;
/// What a schema costs at most: see [`Compiler::cost`].
const COST_MAX: u64 = 10_000;
/// Bytes of the values of `enum` and `const` that cost as much as a schema.
const BYTES_PER_COST: usize = 16;
/// Levels of schemas within a schema, each reference followed.
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
/// Keywords that constrain.
pub(super) const CONSTRAINTS: [&str; 33] = [
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "dependentRequired",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "if",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "uniqueItems",
];
/// Keywords of the whole schema.
const OF_ROOT: [&str; 3] = ["$defs", "$id", "$schema"];

/// Compiles a schema. Fails with pointers into it.
pub(super) fn compile(text: &RawValue) -> Result<Schema, Vec<FieldError>> {
    let refused = |detail: String| vec![FieldError::body("", detail)];
    if text.get().len() > BYTES_MAX {
        return Err(refused(format!("must have at most {BYTES_MAX} bytes")));
    }
    let document: Value = serde_json::from_str(text.get()).map_err(|_| {
        refused("must be JSON that is not nested deeply, without numbers beyond double precision".to_owned())
    })?;
    let empty = Map::new();
    let defs = document.get("$defs").and_then(Value::as_object).unwrap_or(&empty);
    let mut compiler = Compiler {
        defs,
        nodes: Vec::new(),
        built: Vec::new(),
        by_def: BTreeMap::new(),
        open: Vec::new(),
        patterns: BTreeMap::new(),
        bytes: 0,
        refused_patterns: 0,
        errors: BTreeMap::new(),
    };
    let root = compiler.schema(&document, "", 0);
    // Definitions that nothing refers to are also checked.
    for name in defs.keys() {
        compiler.definition(name, &below("/$defs", name), 1);
    }
    compiler.check_cost(root);
    if compiler.errors.is_empty() {
        let empty_digest = digest(&Node::default(), &[]);
        Ok(Schema::new(compiler.nodes, root, compiler.bytes, empty_digest))
    } else {
        let errors = compiler.errors.into_iter();
        Err(errors.map(|(pointer, detail)| FieldError::body(pointer, detail)).collect())
    }
}

struct Compiler<'d> {
    defs: &'d Map<String, Value>,
    nodes: Vec<Node>,
    /// What is known about each node.
    built: Vec<Built>,
    by_def: BTreeMap<String, NodeId>,
    /// The definitions that are being compiled.
    open: Vec<String>,
    /// A pattern that is used twice is compiled once.
    patterns: BTreeMap<String, Arc<Pattern>>,
    /// The memory of what is compiled.
    bytes: usize,
    /// How many patterns are refused. Their memory is not counted, and compiling them took as long as that of others.
    refused_patterns: usize,
    /// By pointer: the same place is reported once.
    errors: BTreeMap<String, String>,
}

#[derive(Default)]
struct Built {
    /// Levels of schemas, itself included.
    height: usize,
    cost: u64,
    /// The cost by keyword, and the most expensive schema of each.
    parts: Vec<CostPart>,
}

/// What a keyword costs.
struct CostPart {
    pointer: String,
    cost: u64,
    /// The most expensive of its schemas, with its pointer.
    dearest: Option<(String, NodeId)>,
}

impl<'d> Compiler<'d> {
    fn refuse(&mut self, pointer: &str, detail: impl Into<String>) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.entry(pointer.to_owned()).or_insert_with(|| detail.into());
        }
    }

    /// Adds memory. Refuses the schema if it needs too much.
    fn reserve(&mut self, bytes: usize, pointer: &str) {
        let before = self.bytes;
        self.bytes = self.bytes.saturating_add(bytes);
        if before <= COMPILED_BYTES_MAX && self.bytes > COMPILED_BYTES_MAX {
            let detail = format!(
                "makes the compiled schema larger than {COMPILED_BYTES_MAX} bytes, which is accepted: use fewer or smaller patterns"
            );
            self.refuse(pointer, detail);
        }
    }

    /// Compiles a schema within the document.
    fn schema(&mut self, schema: &'d Value, pointer: &str, depth: usize) -> NodeId {
        if depth > DEPTH_MAX || self.nodes.len() >= SUBSCHEMAS_MAX {
            let detail = format!(
                "must have at most {SUBSCHEMAS_MAX} schemas within it, at most {DEPTH_MAX} levels deep, each reference followed"
            );
            self.refuse(if depth > DEPTH_MAX { pointer } else { "" }, detail);
            return self.add(Node::default(), Built::default(), pointer);
        }
        let (mut node, mut built) = (Node::default(), Built { height: 1, cost: 1, ..Built::default() });
        match schema {
            Value::Bool(accepts) => node.is_never = !accepts,
            Value::Object(keywords) => {
                // Counted before those within it, which bounds the recursion.
                let id = self.add(Node::default(), Built::default(), pointer);
                for (keyword, value) in keywords {
                    let at = KeywordPosition { keyword, pointer: below(pointer, keyword), depth };
                    self.keyword(&mut node, &mut built, &at, value, keywords);
                }
                node.digest = digest(&node, &self.nodes);
                // Only a reference: it is what it refers to.
                if let ([target], true) = (node.all_of.as_slice(), keywords.contains_key("$ref"))
                    && node.digest == digest(&Node { all_of: vec![*target], ..Node::default() }, &self.nodes)
                {
                    return *target;
                }
                (self.nodes[id.index()], self.built[id.index()]) = (node, built);
                return id;
            }
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                self.refuse(pointer, "must be a schema: an object with keywords, or `true` or `false`");
            }
        }
        node.digest = digest(&node, &self.nodes);
        self.add(node, built, pointer)
    }

    fn add(&mut self, node: Node, built: Built, pointer: &str) -> NodeId {
        self.reserve(size_of::<Node>(), pointer);
        self.nodes.push(node);
        self.built.push(built);
        NodeId::new(self.nodes.len() - 1)
    }

    fn keyword(
        &mut self,
        node: &mut Node,
        built: &mut Built,
        at: &KeywordPosition<'_>,
        value: &'d Value,
        keywords: &'d Map<String, Value>,
    ) {
        let mut part = CostPart { pointer: at.pointer.clone(), cost: 0, dearest: None };
        let mut inner = Inner { height: 0, part: &mut part };
        if !self.keyword_with_schemas(node, at, value, keywords, &mut inner) {
            self.keyword_without_schemas(node, at, value, inner.part);
        }
        built.height = built.height.max(inner.height + 1);
        built.cost = built.cost.saturating_add(part.cost);
        if part.cost > 0 {
            built.parts.push(part);
        }
    }

    /// Compiles a keyword that has schemas within it. Returns false if it has none.
    fn keyword_with_schemas(
        &mut self,
        node: &mut Node,
        at: &KeywordPosition<'_>,
        value: &'d Value,
        keywords: &'d Map<String, Value>,
        inner: &mut Inner<'_>,
    ) -> bool {
        match at.keyword {
            "$ref" => node.all_of.extend(self.reference(value, at, inner)),
            "additionalProperties" => node.object.additional_properties = Some(self.one(value, at, inner)),
            "allOf" => node.all_of.extend(self.list(value, at, inner)),
            "anyOf" => node.any_of = self.list(value, at, inner),
            "oneOf" => node.one_of = self.list(value, at, inner),
            "prefixItems" => node.array.prefix_items = self.list(value, at, inner),
            "contains" => node.array.contains = Some(self.one(value, at, inner)),
            "items" => node.array.items = Some(self.one(value, at, inner)),
            "not" => node.not = Some(self.one(value, at, inner)),
            "propertyNames" => node.object.property_names = Some(self.one(value, at, inner)),
            "if" => {
                let condition = self.one(value, at, inner);
                let if_then_else =
                    node.if_then_else.get_or_insert(IfThenElse { condition, then: None, otherwise: None });
                if_then_else.condition = condition;
            }
            "then" | "else" => {
                let branch = self.one(value, at, inner);
                // Without `if`, it is not applied.
                if keywords.contains_key("if") {
                    let unknown = IfThenElse { condition: branch, then: None, otherwise: None };
                    let if_then_else = node.if_then_else.get_or_insert(unknown);
                    let which = match at.keyword {
                        "then" => &mut if_then_else.then,
                        _ => &mut if_then_else.otherwise,
                    };
                    *which = Some(branch);
                }
            }
            "properties" => node.object.properties = self.properties(value, at, inner),
            "patternProperties" => node.object.pattern_properties = self.pattern_properties(value, at, inner),
            _ => return false,
        }
        true
    }

    fn keyword_without_schemas(
        &mut self,
        node: &mut Node,
        at: &KeywordPosition<'_>,
        value: &'d Value,
        part: &mut CostPart,
    ) {
        match at.keyword {
            "pattern" => node.pattern = self.pattern(value, &at.pointer, part),
            "required" => node.object.required = self.names(value, &at.pointer, part),
            "dependentRequired" => {
                for (name, list) in self.object(value, at, "lists of names") {
                    let pointer = below(&at.pointer, name);
                    let names = self.names(list, &pointer, part);
                    part.cost += 1;
                    self.reserve(name.len() + size_of::<String>() * 4, &at.pointer);
                    node.object.dependent_required.insert(name.clone(), names);
                }
            }
            "type" => node.types = self.types(value, at),
            "const" => {
                self.copied(value, at, part);
                node.values.get_or_insert_default().of_const = Some(value.clone());
            }
            "enum" => match value.as_array() {
                Some(values) if (1..=ENUM_MAX).contains(&values.len()) => {
                    self.copied(value, at, part);
                    node.values.get_or_insert_default().of_enum = Some(values.clone());
                }
                _ => self.refuse(&at.pointer, format!("must be a list of 1 to {ENUM_MAX} values")),
            },
            "uniqueItems" => match value {
                Value::Bool(is_unique) => node.array.has_unique_items = *is_unique,
                _ => self.refuse(&at.pointer, "must be `true` or `false`"),
            },
            "minimum" => node.number.minimum = self.number(value, at),
            "maximum" => node.number.maximum = self.number(value, at),
            "exclusiveMinimum" => node.number.exclusive_minimum = self.number(value, at),
            "exclusiveMaximum" => node.number.exclusive_maximum = self.number(value, at),
            "multipleOf" => {
                node.number.multiple_of = self.number(value, at);
                if value.as_f64().is_some_and(|number| number <= 0.0) {
                    self.refuse(&at.pointer, "must be greater than 0");
                }
            }
            "minLength" | "maxLength" => self.count(&mut node.length, value, at),
            "minItems" | "maxItems" => self.count(&mut node.array.count, value, at),
            "minProperties" | "maxProperties" => self.count(&mut node.object.count, value, at),
            "$schema" if at.depth == 0 && value != DIALECT => self.refuse(&at.pointer, format!("must be `{DIALECT}`")),
            "$defs" if at.depth == 0 => drop(self.object(value, at, "schemas")),
            "$id" if at.depth == 0 && !value.is_string() => self.refuse(&at.pointer, "must be a text"),
            of_root if OF_ROOT.contains(&of_root) => {
                if at.depth > 0 {
                    self.refuse(&at.pointer, "is accepted at the root of the schema only");
                }
            }
            annotation if ANNOTATIONS.contains(&annotation) => self.annotation(value, at),
            _ => self.refuse(&at.pointer, format!("is not an accepted keyword; accepted are {}", accepted_keywords())),
        }
    }

    fn annotation(&mut self, value: &Value, at: &KeywordPosition<'_>) {
        let (is_valid, expected) = match at.keyword {
            "default" => (true, ""),
            "examples" => (value.is_array(), "must be a list"),
            "deprecated" | "readOnly" | "writeOnly" => (value.is_boolean(), "must be `true` or `false`"),
            _ => (value.is_string(), "must be a text"),
        };
        if !is_valid {
            self.refuse(&at.pointer, expected);
        }
    }

    /// Compiles the schema of a keyword.
    fn one(&mut self, value: &'d Value, at: &KeywordPosition<'_>, inner: &mut Inner<'_>) -> NodeId {
        let id = self.schema(value, &at.pointer, at.depth + 1);
        self.within(id, at.pointer.clone(), inner);
        id
    }

    /// Compiles the schemas of a keyword.
    fn list(&mut self, value: &'d Value, at: &KeywordPosition<'_>, inner: &mut Inner<'_>) -> Vec<NodeId> {
        let Some(schemas) = value.as_array().filter(|schemas| !schemas.is_empty()) else {
            self.refuse(&at.pointer, "must be a list of at least one schema");
            return Vec::new();
        };
        let compile = |(index, schema): (usize, &'d Value)| {
            let pointer = below(&at.pointer, &index.to_string());
            let id = self.schema(schema, &pointer, at.depth + 1);
            self.within(id, pointer, inner);
            id
        };
        schemas.iter().enumerate().map(compile).collect()
    }

    fn object(&mut self, value: &'d Value, at: &KeywordPosition<'_>, of: &str) -> Vec<(&'d String, &'d Value)> {
        match value.as_object() {
            Some(entries) => entries.iter().collect(),
            None => {
                self.refuse(&at.pointer, format!("must be an object whose values are {of}"));
                Vec::new()
            }
        }
    }

    fn properties(
        &mut self,
        value: &'d Value,
        at: &KeywordPosition<'_>,
        inner: &mut Inner<'_>,
    ) -> BTreeMap<String, NodeId> {
        let mut properties = BTreeMap::new();
        for (name, schema) in self.object(value, at, "schemas") {
            let pointer = below(&at.pointer, name);
            self.reserve(name.len() + size_of::<String>() * 2, &pointer);
            let id = self.schema(schema, &pointer, at.depth + 1);
            self.within(id, pointer, inner);
            properties.insert(name.clone(), id);
        }
        properties
    }

    fn pattern_properties(
        &mut self,
        value: &'d Value,
        at: &KeywordPosition<'_>,
        inner: &mut Inner<'_>,
    ) -> Vec<(Arc<Pattern>, NodeId)> {
        let mut properties = Vec::new();
        for (text, schema) in self.object(value, at, "schemas") {
            let pointer = below(&at.pointer, text);
            let pattern = self.compiled_pattern(text, &pointer, inner.part);
            let id = self.schema(schema, &pointer, at.depth + 1);
            self.within(id, pointer, inner);
            properties.extend(pattern.map(|pattern| (pattern, id)));
        }
        properties
    }

    /// Follows a reference. None if it is refused.
    fn reference(&mut self, target: &Value, at: &KeywordPosition<'_>, inner: &mut Inner<'_>) -> Option<NodeId> {
        let found =
            target.as_str().and_then(|target| target.strip_prefix(DEFS)).filter(|name| self.defs.contains_key(*name));
        let Some(name) = found else {
            self.refuse(&at.pointer, "must be a reference to a definition of this schema, such as `#/$defs/address`; others are not followed");
            return None;
        };
        let id = self.definition(name, &at.pointer, at.depth + 1)?;
        self.within(id, below("/$defs", name), inner);
        Some(id)
    }

    /// Compiles a definition, unless it is. `pointer` is where it is used.
    fn definition(&mut self, name: &str, pointer: &str, depth: usize) -> Option<NodeId> {
        if self.open.iter().any(|open| open == name) {
            self.refuse(pointer, "must not lead back to itself: the cost of checking a payload would not be bounded");
            return None;
        }
        if let Some(id) = self.by_def.get(name).copied() {
            if depth + self.built[id.index()].height > DEPTH_MAX + 1 {
                self.refuse(pointer, format!("leads to more than {DEPTH_MAX} levels of schemas"));
            }
            return Some(id);
        }
        let (name, schema) = self.defs.get_key_value(name)?;
        self.open.push(name.clone());
        let id = self.schema(schema, &below("/$defs", name), depth);
        self.open.pop();
        self.by_def.insert(name.clone(), id);
        Some(id)
    }

    /// Notes a schema within a keyword.
    fn within(&mut self, id: NodeId, pointer: String, inner: &mut Inner<'_>) {
        let built = &self.built[id.index()];
        inner.height = inner.height.max(built.height);
        inner.part.cost = inner.part.cost.saturating_add(built.cost);
        let dearest = inner.part.dearest.as_ref().map_or(0, |(_, dearest)| self.built[dearest.index()].cost);
        if built.cost > dearest {
            inner.part.dearest = Some((pointer, id));
        }
    }

    fn pattern(&mut self, value: &Value, pointer: &str, part: &mut CostPart) -> Option<Arc<Pattern>> {
        match value.as_str() {
            Some(text) => self.compiled_pattern(text, pointer, part),
            None => {
                self.refuse(pointer, "must be a pattern");
                None
            }
        }
    }

    fn compiled_pattern(&mut self, text: &str, pointer: &str, part: &mut CostPart) -> Option<Arc<Pattern>> {
        if self.bytes > COMPILED_BYTES_MAX || self.refused_patterns >= ERRORS_MAX {
            return None; // the schema is refused already: compile no more
        }
        let pattern = match self.patterns.get(text) {
            Some(pattern) => pattern.clone(),
            None => match Pattern::new(text) {
                Ok(pattern) => {
                    let pattern = Arc::new(pattern);
                    self.reserve(pattern.bytes(), pointer);
                    self.patterns.insert(text.to_owned(), pattern.clone());
                    pattern
                }
                Err(error) => {
                    self.refused_patterns += 1;
                    self.refuse(pointer, error.to_string());
                    return None;
                }
            },
        };
        part.cost = part.cost.saturating_add(pattern.cost());
        Some(pattern)
    }

    fn names(&mut self, value: &Value, pointer: &str, part: &mut CostPart) -> BTreeSet<String> {
        let names: Option<Vec<&str>> = value.as_array().and_then(|names| names.iter().map(Value::as_str).collect());
        let Some(names) = names else {
            self.refuse(pointer, "must be a list of names");
            return BTreeSet::new();
        };
        part.cost = part.cost.saturating_add(names.len() as u64);
        self.reserve(names.iter().map(|name| name.len() + size_of::<String>() * 2).sum(), pointer);
        let unique: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
        if unique.len() < names.len() {
            self.refuse(pointer, "must not have a name twice");
        }
        unique
    }

    fn types(&mut self, value: &Value, at: &KeywordPosition<'_>) -> Types {
        let names = match value {
            Value::String(one) => Some(vec![one.as_str()]),
            Value::Array(many) if !many.is_empty() => many.iter().map(Value::as_str).collect(),
            _ => None,
        };
        let types: Option<Vec<Types>> = names.and_then(|names| names.into_iter().map(Types::named).collect());
        match types.and_then(|types| types.into_iter().reduce(Types::with)) {
            Some(types) => types,
            None => {
                self.refuse(&at.pointer, format!("must be one of the types {}, or a list of them", TYPES.join(", ")));
                Types::ALL
            }
        }
    }

    fn number(&mut self, value: &Value, at: &KeywordPosition<'_>) -> Option<Number> {
        match value {
            Value::Number(number) if number.as_f64().is_some_and(|number| number.abs() <= NUMBER_MAX) => {
                Some(number.clone())
            }
            _ => {
                self.refuse(&at.pointer, format!("must be a number from -{NUMBER_MAX} to {NUMBER_MAX}"));
                None
            }
        }
    }

    fn count(&mut self, limits: &mut CountLimits, value: &Value, at: &KeywordPosition<'_>) {
        let count = value.as_f64().filter(|count| count.fract() == 0.0 && (0.0..=NUMBER_MAX).contains(count));
        let Some(count) = count else {
            return self.refuse(&at.pointer, format!("must be an integer from 0 to {NUMBER_MAX}"));
        };
        let limit = if at.keyword.starts_with("min") { &mut limits.min } else { &mut limits.max };
        *limit = Some(count as u64);
    }

    /// Counts listed values.
    fn copied(&mut self, value: &Value, at: &KeywordPosition<'_>, part: &mut CostPart) {
        let bytes = value.to_string().len();
        part.cost = part.cost.saturating_add((bytes / BYTES_PER_COST) as u64);
        // A value occupies more than its text, and none occupies less than 32 bytes.
        self.reserve(bytes * 16, &at.pointer);
    }

    /// Refuses a schema that costs too much, with the keyword that costs most.
    fn check_cost(&mut self, root: NodeId) {
        let total = self.built[root.index()].cost;
        if total <= COST_MAX {
            return;
        }
        let (mut pointer, mut cost, mut at) = (String::new(), total, root);
        while let Some(dearest) = self.built[at.index()].parts.iter().max_by_key(|part| part.cost) {
            (pointer, cost) = (dearest.pointer.clone(), dearest.cost);
            match &dearest.dearest {
                // One of its schemas is most of it.
                Some((inner, id)) if self.built[id.index()].cost > dearest.cost / 2 => {
                    (pointer, cost, at) = (inner.clone(), self.built[id.index()].cost, *id);
                }
                Some(_) | None => break,
            }
        }
        let detail = format!(
            "costs {cost} of the {total} that the schema costs, and a schema may cost at most {COST_MAX}. Each schema, each name in a \
             list, each {BYTES_PER_COST} bytes of `enum` and `const`, and about each character of a pattern cost 1, with repetitions \
             written out; a reference costs as much as what it refers to"
        );
        self.refuse(&pointer, detail);
    }
}

/// Where a keyword is.
struct KeywordPosition<'k> {
    keyword: &'k str,
    pointer: String,
    /// The depth of its schema.
    depth: usize,
}

/// The schemas within a keyword.
struct Inner<'p> {
    height: usize,
    part: &'p mut CostPart,
}

/// The keywords that are accepted, for an error.
fn accepted_keywords() -> String {
    let mut keywords = [&CONSTRAINTS[..], &ANNOTATIONS, &OF_ROOT].concat();
    keywords.sort_unstable();
    keywords.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(schema: &Value) -> Result<Schema, Vec<(String, String)>> {
        let text = RawValue::from_string(schema.to_string()).unwrap();
        compile(&text).map_err(|errors| errors.into_iter().map(|error| (error.pointer, error.detail)).collect())
    }

    /// The only error about a schema.
    fn refused(schema: &Value) -> (String, String) {
        let mut errors = parse(schema).unwrap_err();
        assert_eq!(errors.len(), 1, "{errors:?}");
        errors.remove(0)
    }

    #[test]
    fn annotations_and_references_are_accepted() {
        let schema = json!({
            "$schema": DIALECT, "$id": "https://example.com/order", "title": "An order",
            "type": "object",
            "properties": {
                "total": {"$ref": "#/$defs/amount", "description": "With tax"},
                "title": {"$ref": "#/$defs/amount", "maximum": 5},
                "code": {"type": "string", "pattern": r"^\d+$", "format": "whatever", "default": 5, "examples": []},
            },
            "then": {"minimum": 5},
            "$defs": {"amount": {"type": "number", "minimum": 0}},
        });
        let schema = parse(&schema).unwrap();
        let root = schema.node(schema.root());
        let total = schema.node(root.object.properties["total"]);
        assert!(total.all_of.is_empty() && total.number.minimum.is_some(), "a mere reference is what it refers to");
        assert_eq!(schema.node(root.object.properties["title"]).all_of, [root.object.properties["total"]]);
        assert!(root.if_then_else.is_none(), "`then` without `if` is not applied");
    }

    #[test]
    fn a_schema_that_cannot_be_applied_is_refused_with_a_pointer() {
        for (schema, pointer, words) in [
            (json!({"unevaluatedProperties": false}), "/unevaluatedProperties", "accepted are"),
            (json!({"properties": {"a/b": {"minContains": 2}}}), "/properties/a~1b/minContains", "accepted are"),
            (json!({"$ref": "https://example.com/x"}), "/$ref", "not followed"),
            (json!({"$ref": "#"}), "/$ref", "not followed"),
            (json!({"$ref": 5}), "/$ref", "not followed"),
            (json!({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}), "/$defs/a/items/$ref", "back to itself"),
            (json!({"pattern": "(?=a)"}), "/pattern", "look-around"),
            (json!({"pattern": 5}), "/pattern", "must be a pattern"),
            (json!({"patternProperties": {"a**": true}}), "/patternProperties/a**", "quantifiers"),
            (json!({"type": "text"}), "/type", "must be one of the types"),
            (json!({"type": []}), "/type", "must be one of the types"),
            (json!({"minLength": -1}), "/minLength", "must be an integer"),
            (json!({"maxItems": 1.5}), "/maxItems", "must be an integer"),
            (json!({"multipleOf": 0}), "/multipleOf", "greater than 0"),
            (json!({"maximum": 1e300}), "/maximum", "must be a number from"),
            (json!({"minimum": "1"}), "/minimum", "must be a number from"),
            (json!({"required": "a"}), "/required", "must be a list of names"),
            (json!({"required": ["a", "a"]}), "/required", "twice"),
            (json!({"dependentRequired": {"a": [1]}}), "/dependentRequired/a", "must be a list of names"),
            (json!({"enum": []}), "/enum", "1 to 500"),
            (json!({"uniqueItems": 1}), "/uniqueItems", "`true` or `false`"),
            (json!({"properties": []}), "/properties", "must be an object"),
            (json!({"anyOf": []}), "/anyOf", "at least one"),
            (json!({"items": [true]}), "/items", "must be a schema"),
            (json!({"title": 5}), "/title", "must be a text"),
            (json!({"$defs": 5}), "/$defs", "must be an object"),
            (json!({"items": {"$id": "x"}}), "/items/$id", "at the root"),
            (json!({"$schema": "http://json-schema.org/draft-07/schema#"}), "/$schema", "2020-12"),
            (json!(5), "", "must be a schema"),
        ] {
            let (at, detail) = refused(&schema);
            assert!(at == pointer && detail.contains(words), "{schema}: {at} {detail}");
        }
    }

    #[test]
    fn a_schema_that_is_too_large_or_too_deep_is_refused() {
        let many = json!({"prefixItems": vec![json!({}); 1_100]});
        assert!(parse(&many).unwrap_err().iter().any(|(_, detail)| detail.contains("at most 1000 schemas")));
        let deep = (0..40).fold(json!({}), |inner, _| json!({"items": inner}));
        assert!(refused(&deep).1.contains("32 levels"));
        let references: Map<String, Value> = (0..40)
            .map(|n| (format!("d{n:02}"), json!({"items": {"$ref": format!("#/$defs/d{:02}", n + 1)}})))
            .collect();
        let mut chain = json!({"$ref": "#/$defs/d00", "$defs": references});
        chain["$defs"]["d40"] = json!({});
        assert!(parse(&chain).unwrap_err().iter().any(|(_, detail)| detail.contains("32 levels")));
        let large = json!({"description": "x".repeat(BYTES_MAX)});
        assert!(refused(&large).1.contains("bytes"));
        let patterns: Vec<Value> = (0..40).map(|n| json!({"pattern": format!(r"^{n}\W{{100}}")})).collect();
        let (pointer, detail) = parse(&json!({"anyOf": patterns})).unwrap_err().remove(0);
        assert!(pointer.starts_with("/anyOf") && detail.contains("compiled"), "{pointer} {detail}");
    }

    #[test]
    fn the_errors_of_a_schema_are_few_and_short_whatever_its_names_are() {
        let wrong: Map<String, Value> = (0..100).map(|n| (format!("{n}{}", "x".repeat(200)), json!(1))).collect();
        let schema = json!({"properties": {"x".repeat(30_000): {"items": wrong, "minLength": -1}}});
        let errors = parse(&schema).unwrap_err();
        assert!(errors.len() <= ERRORS_MAX, "{}", errors.len());
        assert!(errors.iter().all(|(pointer, _)| pointer.len() < 1_000 && pointer.starts_with("/properties/xxx")));
    }

    #[test]
    fn a_schema_that_costs_too_much_is_refused_with_the_keyword_that_costs_most() {
        let names: Vec<String> = (0..5_100).map(|n| format!("{n:x}")).collect();
        let dependent: Map<String, Value> = names.iter().map(|name| (name.clone(), json!(["a"]))).collect();
        let (pointer, detail) = refused(&json!({"items": {"minProperties": 1, "dependentRequired": dependent}}));
        assert!(pointer == "/items/dependentRequired" && detail.contains("10200"), "{pointer} {detail}");
        assert_eq!(
            refused(&json!({"properties": {"a": {"required": names}, "b": {"required": names}}})).0,
            "/properties"
        );
        // Each level doubles what it refers to.
        let mut doubling: Map<String, Value> = (0..12)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{:02}", n + 1)});
                (format!("d{n:02}"), json!({"allOf": [next, next]}))
            })
            .collect();
        doubling.insert("d12".to_owned(), json!({"type": "string", "minLength": 1, "pattern": "[ab]*a[ab]{10}y"}));
        let (_, detail) = refused(&json!({"$ref": "#/$defs/d00", "$defs": doubling}));
        assert!(detail.contains("a schema may cost at most 10000"), "{detail}");
        let alternatives = vec![json!({"type": "string"}); 900];
        assert!(parse(&json!({"items": {"anyOf": alternatives}})).is_ok());
    }

    #[test]
    fn equal_schemas_have_the_same_digest() {
        let digest = |schema: &Value| {
            let schema = parse(schema).unwrap();
            schema.node(schema.root()).digest
        };
        let one = json!({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"minimum": 1}}, "title": "one"});
        assert_eq!(digest(&one), digest(&json!({"properties": {"a": {"minimum": 1, "description": "two"}}})));
        for other in [
            json!({"properties": {"a": {"minimum": 2}}}),
            json!({"properties": {"b": {"minimum": 1}}}),
            json!({}),
            json!(false),
        ] {
            assert_ne!(digest(&one), digest(&other), "{other}");
        }
    }
}
