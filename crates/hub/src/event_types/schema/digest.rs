//! The digest of a schema: two schemas with the same digest accept the same values, so their comparison ends there.
//!
//! A keyword that is missing here would make two different schemas equal, so each struct is taken apart completely.

use sha2::{Digest as _, Sha256};

use crate::event_types::schema::{ArrayKeywords, IfThenElse, Listed, Node, NodeId, ObjectKeywords};

/// Returns the digest of all keywords of a node. `nodes` are those within it, which have their digests.
pub(super) fn digest(node: &Node, nodes: &[Node]) -> [u8; 16] {
    let mut hasher = Hasher { hash: Sha256::new(), nodes };
    hasher.keywords(node);
    let mut digest = [0; 16];
    digest.copy_from_slice(&hasher.hash.finalize()[..16]);
    digest
}

struct Hasher<'n> {
    hash: Sha256,
    nodes: &'n [Node],
}

impl Hasher<'_> {
    fn keywords(&mut self, node: &Node) {
        let Node {
            is_never,
            types,
            values,
            number,
            length,
            pattern,
            array,
            object,
            all_of,
            any_of,
            one_of,
            not,
            if_then_else,
            digest: _,
        } = node;
        self.field("never", &[u8::from(*is_never)]);
        self.field("types", types.names().collect::<Vec<_>>().join(",").as_bytes());
        if let Some(Listed { of_enum, of_const }) = values {
            self.field("enum", format!("{of_enum:?}").as_bytes());
            self.field("const", format!("{of_const:?}").as_bytes());
        }
        self.field("number", format!("{number:?}").as_bytes());
        self.field("length", format!("{length:?}").as_bytes());
        self.field("pattern", format!("{pattern:?}").as_bytes());
        self.of_arrays(array);
        self.of_objects(object);
        self.nodes("allOf", all_of);
        self.nodes("anyOf", any_of);
        self.nodes("oneOf", one_of);
        self.nodes("not", not.as_slice());
        if let Some(IfThenElse { condition, then, otherwise }) = if_then_else {
            self.nodes("if", &[*condition]);
            self.nodes("then", then.as_slice());
            self.nodes("else", otherwise.as_slice());
        }
    }

    fn of_arrays(&mut self, array: &ArrayKeywords) {
        let ArrayKeywords { count, has_unique_items, prefix_items, items, contains } = array;
        self.field("items", format!("{count:?}").as_bytes());
        self.field("uniqueItems", &[u8::from(*has_unique_items)]);
        self.nodes("prefixItems", prefix_items);
        self.nodes("items", items.as_slice());
        self.nodes("contains", contains.as_slice());
    }

    fn of_objects(&mut self, object: &ObjectKeywords) {
        let ObjectKeywords {
            count,
            required,
            properties,
            pattern_properties,
            additional_properties,
            property_names,
            dependent_required,
        } = object;
        self.field("properties", format!("{count:?}").as_bytes());
        self.field("required", format!("{required:?}{dependent_required:?}").as_bytes());
        for (name, id) in properties {
            self.field("property", name.as_bytes());
            self.nodes("schema", &[*id]);
        }
        for (pattern, id) in pattern_properties {
            self.field("pattern property", pattern.text().as_bytes());
            self.nodes("schema", &[*id]);
        }
        self.nodes("additionalProperties", additional_properties.as_slice());
        self.nodes("propertyNames", property_names.as_slice());
    }

    fn nodes(&mut self, name: &str, ids: &[NodeId]) {
        let digests: Vec<u8> = ids.iter().flat_map(|id| self.nodes[id.index()].digest).collect();
        self.field(name, &digests);
    }

    fn field(&mut self, name: &str, content: &[u8]) {
        self.hash.update(name.as_bytes());
        self.hash.update((content.len() as u64).to_be_bytes());
        self.hash.update(content);
    }
}
