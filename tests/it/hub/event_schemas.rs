//! The validator of payloads agrees with the library `jsonschema-rs` about every accepted schema, and a version that only adds
//! refuses nothing that the previous one accepted.

use std::io::Write;
use std::process::{Command, Stdio};

use hub::AppliedSchema;
use proptest::collection::vec;
use proptest::prelude::{BoxedStrategy, Just, Strategy, any, prop_oneof};
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::hub::fixture::test_size;

const PYTHON: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin/python");
const SCRIPTS: &str = env!("CARGO_MANIFEST_DIR");

fn names() -> BoxedStrategy<String> {
    proptest::sample::select(vec!["a", "b", "ab", "c/d", "x~y", "é"]).prop_map(str::to_owned).boxed()
}

fn scalars() -> BoxedStrategy<Value> {
    // No U+2028: for the library, a `.` matches it, against ECMA 262.
    let texts = vec!["", "a", "ab", "aba", "é", "😀a", "a\nb", "\n", "1", "12", "-", "a b", "A_9", "a.b"];
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3_i64..6).prop_map(Value::from),
        proptest::sample::select(vec![0.5, 1.0, 1.5, -0.1, 0.3, 2.0, 1e3, 12.25]).prop_map(Value::from),
        proptest::sample::select(texts).prop_map(Value::from),
    ]
    .boxed()
}

fn payloads() -> BoxedStrategy<Value> {
    scalars()
        .prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..4).prop_map(Value::from),
                vec((names(), inner), 0..4).prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
        .boxed()
}

fn patterns() -> BoxedStrategy<String> {
    let patterns = vec![
        "^a",
        "b$",
        "^$|a",
        r"^\d+$",
        r"\w",
        r"^\W",
        r"\s",
        r"^\S*$",
        "^a.b$",
        "^.$",
        "^[a-c]{1,2}$",
        "[^a]",
        r"^(?:a|b)+$",
        "(ab)?a$",
        r"\.",
        "-",
        "[-.]",
        "é",
        "^.{2}$",
        r"\u2028",
        "^[^\\s]+$",
        "a{2,}",
        "[A-Z_]",
        "a|1",
    ];
    proptest::sample::select(patterns).prop_map(str::to_owned).boxed()
}

fn named(name: &'static str, values: BoxedStrategy<Value>) -> BoxedStrategy<(String, Value)> {
    values.prop_map(move |value| (name.to_owned(), value)).boxed()
}

fn by_name(keys: BoxedStrategy<String>, values: &BoxedStrategy<Value>) -> BoxedStrategy<Value> {
    vec((keys, values.clone()), 0..3).prop_map(|entries| Value::Object(entries.into_iter().collect())).boxed()
}

/// A keyword without schemas within it.
fn simple_keywords() -> BoxedStrategy<(String, Value)> {
    let types = proptest::sample::select(vec!["null", "boolean", "integer", "number", "string", "array", "object"]);
    let numbers = || prop_oneof![(-2_i64..4).prop_map(Value::from), Just(json!(0.5)), Just(json!(1.5))].boxed();
    let counts = || (0_i64..4).prop_map(Value::from).boxed();
    let multiples = vec![json!(1), json!(2), json!(0.5), json!(0.1), json!(1.5)];
    let unique = |mut names: Vec<String>| {
        names.sort();
        names.dedup();
        Value::from(names)
    };
    let required = vec(names(), 0..3).prop_map(unique).boxed();
    proptest::strategy::Union::new([
        named("type", prop_oneof![types.prop_map(Value::from), Just(json!(["string", "object"]))].boxed()),
        named("enum", vec(scalars(), 1..4).prop_map(Value::from).boxed()),
        named("const", payloads()),
        named("minimum", numbers()),
        named("maximum", numbers()),
        named("exclusiveMinimum", numbers()),
        named("exclusiveMaximum", numbers()),
        named("multipleOf", proptest::sample::select(multiples).boxed()),
        named("minLength", counts()),
        named("maxLength", counts()),
        named("pattern", patterns().prop_map(Value::from).boxed()),
        named("minItems", counts()),
        named("maxItems", counts()),
        named("uniqueItems", any::<bool>().prop_map(Value::from).boxed()),
        named("minProperties", counts()),
        named("maxProperties", counts()),
        named("required", required.clone()),
        named("dependentRequired", by_name(names(), &required)),
    ])
    .boxed()
}

/// Any keyword with its value.
fn keywords(inner: BoxedStrategy<Value>) -> BoxedStrategy<(String, Value)> {
    let schemas = |inner: &BoxedStrategy<Value>| vec(inner.clone(), 1..3).prop_map(Value::from).boxed();
    let references = proptest::sample::select(vec!["#/$defs/one", "#/$defs/two"]).prop_map(Value::from).boxed();
    let nested = proptest::strategy::Union::new([
        named("properties", by_name(names(), &inner)),
        named("properties", by_name(names(), &inner)),
        named("patternProperties", by_name(patterns(), &inner)),
        named("additionalProperties", inner.clone()),
        named("propertyNames", inner.clone()),
        named("items", inner.clone()),
        named("prefixItems", schemas(&inner)),
        named("contains", inner.clone()),
        named("allOf", schemas(&inner)),
        named("anyOf", schemas(&inner)),
        named("oneOf", schemas(&inner)),
        named("not", inner.clone()),
        named("if", inner.clone()),
        named("then", inner.clone()),
        named("else", inner),
        named("$ref", references),
        named("title", Just(json!("ignored")).boxed()),
    ]);
    prop_oneof![simple_keywords(), nested].boxed()
}

fn object(entries: Vec<(String, Value)>) -> Value {
    Value::Object(entries.into_iter().collect::<Map<_, _>>())
}

fn schemas_within() -> BoxedStrategy<Value> {
    let leaf = prop_oneof![4 => Just(json!({})), 1 => any::<bool>().prop_map(Value::from)].boxed();
    leaf.prop_recursive(3, 16, 3, move |inner| vec(keywords(inner.boxed()), 0..4).prop_map(object)).boxed()
}

fn schemas() -> BoxedStrategy<Value> {
    let defs = json!({"one": {"type": ["integer", "string", "object"]}, "two": {"anyOf": [{"$ref": "#/$defs/one"}, {"minItems": 1}]}});
    let root = vec(keywords(schemas_within()), 1..5).prop_map(object);
    root.prop_map(move |mut schema| {
        schema["$defs"] = defs.clone();
        schema
    })
    .boxed()
}

/// Whether the library accepts the payloads of each schema.
fn verdicts_of_another_validator(cases: &[(Value, Vec<Value>)]) -> Vec<Vec<bool>> {
    let mut script = Command::new(PYTHON);
    script.arg(format!("{SCRIPTS}/python/validate_schemas.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = script.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let lines: String = cases.iter().map(|case| format!("{}\n", json!(case))).collect();
    let writing = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "`scripts/setup test` installs the library");
    writing.join().unwrap().unwrap();
    let verdicts: Vec<Vec<bool>> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(verdicts.len(), cases.len());
    verdicts
}

#[test]
fn the_validator_agrees_with_another_one_about_random_schemas_and_payloads() {
    let seed = rand::random::<[u8; 32]>();
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let cases: Vec<(Value, Vec<Value>)> = (0..test_size(1_500, 100_000))
        .map(|_| {
            let mut payload = || payloads().new_tree(&mut runner).unwrap().current();
            let payloads = (0..4).map(|_| payload()).collect();
            (schemas().new_tree(&mut runner).unwrap().current(), payloads)
        })
        .collect();
    let verdicts = verdicts_of_another_validator(&cases);
    let (mut accepted, mut checked) = (0, 0);
    let mut different: Option<(usize, String)> = None;
    for ((schema, payloads), verdicts) in cases.iter().zip(verdicts) {
        let text = RawValue::from_string(schema.to_string()).unwrap();
        let applied = AppliedSchema::parse(&text).unwrap_or_else(|error| panic!("{schema} is not accepted: {error:?}"));
        for (payload, expected) in payloads.iter().zip(verdicts) {
            let accepts = applied.accepts(payload).unwrap();
            (accepted, checked) = (accepted + usize::from(accepts), checked + 1);
            let text = format!("{schema} accepts {payload}: {accepts}");
            if accepts != expected && different.as_ref().is_none_or(|(length, _)| text.len() < *length) {
                different = Some((text.len(), text));
            }
        }
    }
    assert!(different.is_none(), "{different:?}; seed {seed:?}");
    assert!((checked / 10..checked * 9 / 10).contains(&accepted), "{accepted} of {checked} were accepted");
}

fn accepts(schema: &AppliedSchema, payload: &Value) -> bool {
    schema.accepts(payload).unwrap()
}

fn random(runner: &mut TestRunner, below: usize) -> usize {
    (0..below.max(1)).new_tree(runner).unwrap().current()
}

/// The schemas directly within a schema.
fn inner_schemas(schema: &mut Value) -> Vec<&mut Value> {
    let mut found = Vec::new();
    for (keyword, value) in schema.as_object_mut().into_iter().flatten() {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(schemas)) => found.extend(schemas.values_mut()),
            ("allOf" | "anyOf" | "oneOf" | "prefixItems", Value::Array(schemas)) => found.extend(schemas),
            (
                "additionalProperties" | "propertyNames" | "items" | "contains" | "not" | "if" | "then" | "else",
                schema,
            ) => found.push(schema),
            _ => {}
        }
    }
    found
}

/// Changes one of the schemas within this one, or the schema itself: a keyword less, one more, or another number.
fn change(schema: &mut Value, runner: &mut TestRunner) {
    let mut inner = inner_schemas(schema);
    if !inner.is_empty() && random(runner, 3) > 0 {
        let at = random(runner, inner.len());
        return change(inner.swap_remove(at), runner);
    }
    let Some(keywords_of) = schema.as_object_mut() else {
        *schema = json!({});
        return;
    };
    let names: Vec<String> = keywords_of.keys().filter(|name| *name != "$defs").cloned().collect();
    match (random(runner, 4), names.is_empty()) {
        (0, false) => {
            keywords_of.remove(&names[random(runner, names.len())]);
        }
        (1, false) => {
            let step = random(runner, 2) as i64 * 2 - 1;
            for name in &names {
                if let Some(number) = keywords_of[name].as_i64().filter(|_| name != "const") {
                    keywords_of[name] = (number + step).max(i64::from(name.ends_with("Of"))).into();
                    if name.ends_with('s') || name.ends_with("Length") {
                        keywords_of[name] = (number + step).max(0).into();
                    }
                }
            }
        }
        _ => {
            let (name, value) = keywords(schemas_within()).new_tree(runner).unwrap().current();
            keywords_of.insert(name, value);
        }
    }
}

/// The schema without the freedom that a later version may use up: objects with no further properties than those that it
/// defines, also in arrays whose items it does not define. Not below `not`, `oneOf` and `if`, which would then accept more.
fn closed(schema: &Value) -> Value {
    let Value::Object(keywords) = schema else {
        return if *schema == json!(true) { closed_value(ARRAYS_MAX) } else { schema.clone() };
    };
    let mut closed_one = keywords.clone();
    for (keyword, value) in &mut closed_one {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs", Value::Object(schemas)) => {
                schemas.values_mut().for_each(|schema| *schema = closed(schema));
            }
            ("allOf" | "anyOf" | "prefixItems", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| *schema = closed(schema));
            }
            ("items" | "contains", schema) => *schema = closed(schema),
            ("additionalProperties", schema) if schema.is_object() => *schema = closed(schema),
            _ => {}
        }
    }
    if keywords.get("additionalProperties").is_none_or(|schema| *schema == json!(true)) {
        closed_one.insert("additionalProperties".to_owned(), json!(false));
    }
    closed_one.entry("items").or_insert_with(|| closed_value(ARRAYS_MAX));
    Value::Object(closed_one)
}

/// Arrays within arrays that the payloads have at most.
const ARRAYS_MAX: u32 = 3;

/// Accepts any value whose objects have no properties.
fn closed_value(arrays: u32) -> Value {
    match arrays {
        0 => json!({"additionalProperties": false}),
        _ => json!({"additionalProperties": false, "items": closed_value(arrays - 1)}),
    }
}

/// The one freedom that a version has is to define properties which were not defined before, so payloads with such properties
/// are left out.
#[test]
fn a_version_that_is_accepted_accepts_every_payload_of_the_previous_one() {
    let seed = rand::random::<[u8; 32]>();
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let applied = |schema: &Value| AppliedSchema::parse(&RawValue::from_string(schema.to_string()).unwrap());
    let (mut accepted, mut refused, mut checked) = (0, 0, 0);
    let mut wrong: Option<(usize, String)> = None;
    for _ in 0..test_size(1_200, 200_000) {
        let old = schemas().new_tree(&mut runner).unwrap().current();
        let mut new = old.clone();
        (0..=random(&mut runner, 2)).for_each(|_| change(&mut new, &mut runner));
        let (Ok(old_applied), Ok(new_applied)) = (applied(&old), applied(&new)) else { continue };
        if old == new || !new_applied.is_addition_to(&old_applied) {
            refused += 1;
            continue;
        }
        accepted += 1;
        let closed = applied(&closed(&old)).unwrap();
        for _ in 0..40 {
            let payload = payloads().new_tree(&mut runner).unwrap().current();
            if !accepts(&old_applied, &payload) || !accepts(&closed, &payload) {
                continue;
            }
            checked += 1;
            let text = format!("{payload} is accepted by {old}, and refused by {new}");
            if !accepts(&new_applied, &payload) && wrong.as_ref().is_none_or(|(length, _)| text.len() < *length) {
                wrong = Some((text.len(), text));
            }
        }
    }
    assert!(wrong.is_none(), "{wrong:?}; seed {seed:?}");
    assert!(
        accepted > 100 && refused > 100 && checked > 1_000,
        "{accepted} and {refused} versions, {checked} payloads"
    );
}
