//! Checks new versions of event types, before the transaction that saves them begins.

use chrono::{DateTime, Utc};
use http_kit::problem::FieldError;
use pillarbox::log::Tenant;
use serde_json::value::RawValue;

use crate::error::{Error, NoVerdict};
use crate::event_types::cache::{payload_errors, too_expensive};
use crate::event_types::domain::TypeVersion;
use crate::event_types::flow::under;
use crate::event_types::schema::Schema;
use crate::event_types::schema::compatibility::breaking_changes;
use crate::event_types::schema::steps::Steps;
use crate::event_types::schema::work::{COMPARE_STEPS, REQUEST_STEPS, SchemaWork};

const EXAMPLES_MAX: usize = 10;
/// Bytes of all examples of a version.
const EXAMPLE_BYTES_MAX: usize = 64 * 1024;

/// A schema with its examples, as they were posted.
#[derive(Debug)]
pub(crate) struct NewVersion {
    pub(crate) schema: Box<RawValue>,
    pub(crate) examples: Vec<Box<RawValue>>,
}

/// A version that may be saved.
#[derive(Debug)]
pub(crate) struct CheckedVersion {
    version: NewVersion,
    /// What the schema occupies when it is compiled.
    compiled_bytes: usize,
    /// What it may break of the previous version.
    pub(crate) changes: Vec<FieldError>,
}

/// Checks versions on the threads for work on schemas, in the turn of the tenant.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VersionChecker<'w> {
    pub(crate) work: &'w SchemaWork,
    pub(crate) tenant: &'w Tenant,
}

impl VersionChecker<'_> {
    /// Checks a version, its examples, and what it changes compared with the previous one; `pointer` is where the version is in
    /// the request body.
    pub(crate) async fn check(
        self,
        new: NewVersion,
        previous: Option<Box<RawValue>>,
        pointer: &str,
    ) -> Result<CheckedVersion, Error> {
        let pointer = pointer.to_owned();
        self.run(move || check(new, previous.as_deref(), &pointer)).await?
    }

    /// Runs other work on schemas.
    pub(crate) async fn run<T: Send + 'static>(self, job: impl FnOnce() -> T + Send + 'static) -> Result<T, NoVerdict> {
        self.work.verdict(self.tenant, job).await
    }
}

impl CheckedVersion {
    /// The version with its number, and what its schema occupies when it is compiled.
    pub(crate) fn numbered(self, version: i32, created_at: DateTime<Utc>) -> (TypeVersion, usize) {
        let NewVersion { schema, examples } = self.version;
        (TypeVersion { version, schema, examples, created_at }, self.compiled_bytes)
    }
}

fn check(new: NewVersion, previous: Option<&RawValue>, pointer: &str) -> Result<CheckedVersion, Error> {
    let at_schema = format!("{pointer}/schema");
    let schema = Schema::parse(&new.schema).map_err(|errors| Error::Invalid(under(errors, &at_schema)))?;
    check_examples(&schema, &new.examples, pointer)?;
    let changes = match previous {
        Some(previous) => {
            let previous =
                Schema::parse(previous).map_err(|errors| Error::InvalidStoredSchema(format!("{errors:?}")))?;
            let compared = breaking_changes(&previous, &schema, &mut Steps::new(COMPARE_STEPS));
            under(compared.unwrap_or_else(|_| vec![FieldError::body("", TOO_DIFFERENT)]), &at_schema)
        }
        None => Vec::new(),
    };
    Ok(CheckedVersion { version: new, compiled_bytes: schema.bytes(), changes })
}

/// A comparison that needs too many steps is a change that may break.
const TOO_DIFFERENT: &str = "is too expensive to compare with the previous version: it has many alternatives, listed values or \
                             patterns that differ; add it with `force: true` if it accepts what the previous version accepts";

fn check_examples(schema: &Schema, examples: &[Box<RawValue>], pointer: &str) -> Result<(), Error> {
    let bytes: usize = examples.iter().map(|example| example.get().len()).sum();
    if examples.len() > EXAMPLES_MAX || bytes > EXAMPLE_BYTES_MAX {
        let detail =
            format!("must be at most {EXAMPLES_MAX} examples, with at most {EXAMPLE_BYTES_MAX} bytes together");
        return Err(Error::field(&format!("{pointer}/examples"), detail));
    }
    let (mut errors, mut steps) = (Vec::new(), Steps::new(REQUEST_STEPS));
    for (at, example) in examples.iter().enumerate() {
        let pointer = format!("{pointer}/examples/{at}");
        let found = payload_errors(schema, example, &pointer, &mut steps);
        errors.extend(found.unwrap_or_else(|_| too_expensive(&pointer)));
    }
    if errors.is_empty() { Ok(()) } else { Err(Error::Invalid(errors)) }
}
