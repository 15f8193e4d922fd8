//! Whatever hostile schema is accepted is compiled, compared and checked, or refused as too expensive, within a bounded CPU time and
//! memory.

use std::sync::LazyLock;
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::compatibility::breaking_changes;
use super::compile::CONSTRAINTS;
use super::hostile::{APPLICATORS, Largest, Repeated, keywords, numbered, payloads, placed};
use super::steps::Steps;
use super::work::{CHECK_STEPS, COMPARE_STEPS};
use crate::event_types::cache::payload_errors;
use crate::event_types::schema::Schema;

/// CPU time of compiling a schema, in the build for tests, which is slower than a release build.
const COMPILE_TIME_MAX: Duration = Duration::from_secs(1);
/// Of all steps of a check or a comparison, the tests allow one of so many, because each of them is fast then. The time of a step
/// is the same.
const PART: u64 = 10;
/// CPU time of that part: the whole takes at most ten times as long, in a build in which a step takes twice as long.
const CPU_TIME_MAX: Duration = Duration::from_millis(150);

/// The CPU time of this thread, which other work on the machine does not change.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

fn parse(schema: &Value) -> Option<Schema> {
    Schema::parse(&RawValue::from_string(schema.to_string()).unwrap()).ok()
}

/// The hostile schemas, each with its keyword as often as it is accepted, in each place.
static SCHEMAS: LazyLock<Vec<(&str, Vec<Value>)>> = LazyLock::new(|| {
    let at_most = |(keyword, schema): (&'static str, Repeated)| {
        let mut largest = Largest::new();
        while let Some(number) = largest.next() {
            largest.tried(number, parse(&placed(APPLICATORS[2].1, schema(number))).is_some());
        }
        let schema = || schema(largest.found());
        (keyword, APPLICATORS.iter().map(|(_, place)| placed(*place, schema())).collect())
    };
    keywords().into_iter().map(at_most).collect()
});

#[test]
fn every_keyword_is_in_a_hostile_schema() {
    let schemas = SCHEMAS.iter().map(|(_, placed)| json!(placed).to_string()).collect::<String>();
    for keyword in CONSTRAINTS {
        assert!(schemas.contains(&format!("\"{keyword}\":")), "{keyword}");
    }
}

/// Memory of compiling and checking, in addition to that of the schemas and payloads. Two threads do this at the same time.
const MEMORY_MAX: u64 = 64 * 1024 * 1024;
/// The variable tells the test that it is the process that [`every_check_needs_bounded_memory`] has started.
const IS_MEASURED: &str = "PBX_MEASURED_ALONE";

/// A value of this process in `/proc/self/status`, in bytes.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let kibibytes: u64 = line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap();
    kibibytes * 1024
}

/// Other tests would need memory at the same time, so it is measured in a process without them.
#[test]
fn every_check_needs_bounded_memory() {
    if std::env::var_os(IS_MEASURED).is_none() {
        let (_, module) = module_path!().split_once("::").unwrap();
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", &format!("{module}::every_check_needs_bounded_memory")]).env(IS_MEASURED, "1");
        let output = alone.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let payloads: Vec<Box<RawValue>> =
        payloads().iter().map(|payload| RawValue::from_string(payload.to_string()).unwrap()).collect();
    let schemas = &*SCHEMAS;
    let before = memory("VmRSS");
    for (keyword, placed) in schemas {
        // Resets the peak.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        for schema in placed {
            let compiled = parse(schema).unwrap();
            for payload in &payloads {
                let _ = payload_errors(&compiled, payload, "", &mut Steps::new(CHECK_STEPS / PART));
            }
        }
        let grown = memory("VmHWM").saturating_sub(before);
        assert!(grown < MEMORY_MAX, "{keyword} needs {} KiB", grown / 1024);
    }
}

#[test]
fn every_check_ends_in_bounded_time() {
    let payloads = payloads();
    for (keyword, placed) in &*SCHEMAS {
        for (schema, (place, _)) in placed.iter().zip(APPLICATORS) {
            let compiling = cpu_time();
            let compiled = parse(schema).unwrap_or_else(|| panic!("{keyword} {place} is not accepted"));
            assert!(cpu_time() - compiling < COMPILE_TIME_MAX, "compiling {keyword} took {:?}", cpu_time() - compiling);
            for (at, payload) in payloads.iter().enumerate() {
                let before = cpu_time();
                let verdict = compiled.errors(payload, "", &mut Steps::new(CHECK_STEPS / PART));
                let (took, verdict) = (cpu_time() - before, verdict.map(|errors| errors.len()));
                assert!(took < CPU_TIME_MAX, "{keyword} {place} took {took:?} for payload {at}: {verdict:?}");
            }
        }
    }
}

/// Each of these patterns is compiled until it is too large.
#[test]
fn a_schema_of_many_refused_patterns_is_refused_in_bounded_time() {
    let patterns = numbered(1_500, |n| (format!(r"\W{{990}}{n}"), json!(true))).into_iter().collect::<Map<_, _>>();
    let before = cpu_time();
    assert!(parse(&json!({"patternProperties": patterns})).is_none());
    let took = cpu_time() - before;
    assert!(took < Duration::from_millis(200), "{took:?}");
}

#[test]
fn every_comparison_ends_in_bounded_time() {
    let schemas: Vec<(&str, Schema)> =
        SCHEMAS.iter().filter_map(|(keyword, placed)| Some((*keyword, parse(&placed[0])?))).collect();
    for (old, old_schema) in &schemas {
        for (new, new_schema) in &schemas {
            let before = cpu_time();
            let _ = breaking_changes(old_schema, new_schema, &mut Steps::new(COMPARE_STEPS / PART));
            let took = cpu_time() - before;
            assert!(took < CPU_TIME_MAX, "{old} to {new} took {took:?}");
        }
    }
}

#[test]
fn a_real_schema_is_far_below_the_limits() {
    let line = json!({"type": "object", "required": ["sku", "quantity"], "additionalProperties": false, "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{2,4}-\\d{1,10}$"}, "quantity": {"type": "integer", "minimum": 1},
        "price": {"type": "number", "multipleOf": 0.01}, "note": {"type": "string", "maxLength": 500}}});
    let schema = json!({"type": "object", "required": ["id", "lines"], "properties": {
        "id": {"type": "string", "pattern": "^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        "state": {"enum": ["open", "paid", "sent"]}, "lines": {"type": "array", "items": line}}});
    let line = json!({"sku": "AB-12345", "quantity": 2, "price": 19.99, "note": "a gift"});
    let payload = json!({"id": "01890a5d-ac96-774b-bcce-b302099a8057", "state": "paid", "lines": vec![line; 20]});
    let mut steps = Steps::new(super::work::INLINE_STEPS);
    assert_eq!(parse(&schema).unwrap().errors(&payload, "", &mut steps), Ok(Vec::new()));
    assert!(steps.left() > super::work::INLINE_STEPS / 2, "{}", steps.left());
}
