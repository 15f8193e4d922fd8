//! A schema in the form in which it is applied and compared: nodes in one list, which refer to each other.
//!
//! A definition that is used several times is one node, so the size of a schema is that of its text, whatever it refers to.

pub(crate) mod applied;
pub(crate) mod compatibility;
mod compile;
mod digest;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod hostile_test;
mod pattern;
pub(crate) mod steps;
mod validator;
pub(crate) mod work;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http_kit::problem::FieldError;
use serde_json::value::RawValue;
use serde_json::{Number, Value};

use crate::event_types::schema::pattern::Pattern;

/// Characters of a name in a pointer, and bytes after which a pointer ends.
const POINTER_NAME_CHARS_MAX: usize = 100;
const POINTER_BYTES_MAX: usize = 500;

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct Schema {
    nodes: Vec<Node>,
    root: NodeId,
    /// The memory that it occupies.
    bytes: usize,
    /// The digest of a node without keywords.
    empty_digest: [u8; 16],
}

/// The place of a node in its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeId(u32);

/// A schema within a schema: its keywords. An absent keyword accepts everything.
#[derive(Debug, Default)]
pub(crate) struct Node {
    /// Whether it is `false`, which accepts nothing.
    pub(crate) is_never: bool,
    pub(crate) types: Types,
    pub(crate) values: Option<Listed>,
    pub(crate) number: NumberLimits,
    pub(crate) length: CountLimits,
    pub(crate) pattern: Option<Arc<Pattern>>,
    pub(crate) array: ArrayKeywords,
    pub(crate) object: ObjectKeywords,
    pub(crate) all_of: Vec<NodeId>,
    pub(crate) any_of: Vec<NodeId>,
    pub(crate) one_of: Vec<NodeId>,
    pub(crate) not: Option<NodeId>,
    pub(crate) if_then_else: Option<IfThenElse>,
    /// A digest of all keywords, also of the nodes below: two nodes with the same digest are the same.
    pub(crate) digest: [u8; 16],
}

/// Keywords for arrays.
#[derive(Debug, Default)]
pub(crate) struct ArrayKeywords {
    pub(crate) count: CountLimits,
    pub(crate) has_unique_items: bool,
    pub(crate) prefix_items: Vec<NodeId>,
    pub(crate) items: Option<NodeId>,
    pub(crate) contains: Option<NodeId>,
}

/// Keywords for objects.
#[derive(Debug, Default)]
pub(crate) struct ObjectKeywords {
    pub(crate) count: CountLimits,
    pub(crate) required: BTreeSet<String>,
    pub(crate) properties: BTreeMap<String, NodeId>,
    pub(crate) pattern_properties: Vec<(Arc<Pattern>, NodeId)>,
    pub(crate) additional_properties: Option<NodeId>,
    pub(crate) property_names: Option<NodeId>,
    pub(crate) dependent_required: BTreeMap<String, BTreeSet<String>>,
}

/// The values of `enum` and `const`: a value must be in both, as far as they are there.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    pub(crate) of_enum: Option<Vec<Value>>,
    pub(crate) of_const: Option<Value>,
}

#[derive(Debug, Default)]
pub(crate) struct NumberLimits {
    pub(crate) minimum: Option<Number>,
    pub(crate) maximum: Option<Number>,
    pub(crate) exclusive_minimum: Option<Number>,
    pub(crate) exclusive_maximum: Option<Number>,
    pub(crate) multiple_of: Option<Number>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct CountLimits {
    pub(crate) min: Option<u64>,
    pub(crate) max: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct IfThenElse {
    pub(crate) condition: NodeId,
    pub(crate) then: Option<NodeId>,
    pub(crate) otherwise: Option<NodeId>,
}

/// The types in `type`, as bits; all of them without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Types(u8);

/// The names of the types, in the order of their bits.
pub(crate) const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];

impl Types {
    pub(crate) const ALL: Types = Types(0b111_1111);
    pub(crate) const ARRAY: Types = Types(1);
    pub(crate) const OBJECT: Types = Types(1 << 5);
    pub(crate) const STRING: Types = Types(1 << 6);
    pub(crate) const NUMBERS: Types = Types(1 << 2 | 1 << 4);

    /// The type with this name.
    pub(crate) fn named(name: &str) -> Option<Types> {
        TYPES.iter().position(|one| *one == name).map(|at| Types(1 << at))
    }

    /// The type of a value. A number without a fraction is an integer.
    pub(crate) fn of(value: &Value) -> Types {
        match value {
            Value::Array(_) => Types::ARRAY,
            Value::Bool(_) => Types(1 << 1),
            Value::Null => Types(1 << 3),
            Value::Number(number) if is_integer(number) => Types(1 << 2),
            Value::Number(_) => Types(1 << 4),
            Value::Object(_) => Types::OBJECT,
            Value::String(_) => Types::STRING,
        }
    }

    pub(crate) fn with(self, other: Types) -> Types {
        Types(self.0 | other.0)
    }

    /// Whether it has one of these types.
    pub(crate) fn has(self, other: Types) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether a value of this one type is accepted: an integer is a number.
    pub(crate) fn accepts(self, of_value: Types) -> bool {
        self.has(of_value) || (of_value == Types(1 << 2) && self.has(Types(1 << 4)))
    }

    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> {
        TYPES.into_iter().enumerate().filter(move |(at, _)| self.0 >> at & 1 == 1).map(|(_, name)| name)
    }

    /// The names of the types that another set does not accept.
    pub(crate) fn not_in(self, other: Types) -> Vec<&'static str> {
        let is_lost = |name: &&str| Types::named(name).is_some_and(|one| !other.accepts(one));
        self.names().filter(is_lost).collect()
    }
}

impl Default for Types {
    fn default() -> Types {
        Types::ALL
    }
}

fn is_integer(number: &Number) -> bool {
    number.is_i64() || number.is_u64() || number.as_f64().is_some_and(|number| number.fract() == 0.0)
}

impl Schema {
    /// Compiles a schema. Fails with pointers into it.
    pub(crate) fn parse(text: &RawValue) -> Result<Schema, Vec<FieldError>> {
        compile::compile(text)
    }

    pub(super) fn new(nodes: Vec<Node>, root: NodeId, bytes: usize, empty_digest: [u8; 16]) -> Schema {
        Schema { nodes, root, bytes, empty_digest }
    }

    pub(crate) fn root(&self) -> NodeId {
        self.root
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Whether a node is `true` or `{}`.
    pub(crate) fn accepts_everything(&self, id: NodeId) -> bool {
        self.node(id).digest == self.empty_digest
    }

    /// The memory that it occupies.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl NodeId {
    pub(super) fn new(index: usize) -> NodeId {
        NodeId(index as u32)
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The pointer to a part of what another pointer leads to. It is at most about 1 KB: a name may be as long as a schema or a payload,
/// and would be in the pointers to all that is below it.
pub(crate) fn below(pointer: &str, part: &str) -> String {
    if pointer.len() > POINTER_BYTES_MAX {
        return pointer.to_owned();
    }
    let name = cut(part, POINTER_NAME_CHARS_MAX).replace('~', "~0").replace('/', "~1");
    let end = if pointer.len() + 1 + name.len() > POINTER_BYTES_MAX { "/..." } else { "" };
    format!("{pointer}/{name}{end}")
}

/// The text, or its beginning if it is too long.
pub(crate) fn cut(text: &str, chars_max: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => Cow::Owned(format!("{}...", &text[..end])),
        None => Cow::Borrowed(text),
    }
}
