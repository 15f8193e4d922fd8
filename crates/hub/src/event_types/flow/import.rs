//! Export and import of a catalogue as one file.
//!
//! An import changes the types that the file contains, all of them or none. Versions that exist must be the same in the file;
//! the file may add versions to them. Types that are not in the file stay, unless the caller wants them removed.

use std::collections::HashSet;
use std::time::Duration;

use chrono::{DateTime, Utc};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::Tenant;
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Hub;
use crate::error::{Error, NoVerdict};
use crate::event_types::domain::{CatalogueSettings, EventType, TypeVersion, UnknownTypes};
use crate::event_types::flow::version::{CheckedVersion, NewVersion, VersionChecker};
use crate::event_types::flow::{
    TYPES_MAX, VERSIONS_MAX, breaking, check_description, check_name, finish, finish_removal, invalid, remove, save,
};
use crate::event_types::store;
use crate::event_types::view::{CatalogueFile, FileType, FileVersion, ImportResult};

/// How long a file is checked: each of its types and versions may take as long as a verdict.
const CHECK_TIME_MAX: Duration = Duration::from_secs(10);
/// When an import that found no place should be sent again.
const IMPORT_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How a file is imported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportOptions {
    /// Changes nothing.
    pub is_dry_run: bool,
    /// Accepts versions that may break what the previous one accepted.
    pub is_forced: bool,
    /// Removes the types that are not in the file.
    pub removes_others: bool,
}

/// Checks a file before the transaction that applies it. Fails if other imports occupy all places, or if the check takes too long.
pub(crate) async fn check(
    hub: &Hub,
    tenant: &Tenant,
    file: CatalogueFile,
    now: DateTime<Utc>,
) -> Result<CheckedFile, Problem> {
    let checker = VersionChecker { work: hub.catalogue.work(), tenant };
    let place = hub.limits.catalogue_imports.enter().await;
    let _place = place.map_err(|exhausted| Problem::overloaded(exhausted, IMPORT_AGAIN_AFTER))?;
    let stamp = async { store::stamp_of(&mut *hub.db.acquire().await?, tenant).await };
    let stamp = stamp.await.map_err(Error::from)?;
    // No connection is held while the file is checked.
    let stored = async |name: String| store::versions(&mut *hub.db.acquire().await?, tenant, &name).await;
    Ok(within(CHECK_TIME_MAX, check_against(checker, file, stamp, now, stored)).await?)
}

/// Finds out what an import would do.
pub(crate) async fn try_out(
    hub: &Hub,
    tenant: &Tenant,
    file: CheckedFile,
    options: ImportOptions,
    now: DateTime<Utc>,
) -> Result<ImportResult, Error> {
    let mut tx = hub.db.begin().await?;
    apply(&mut tx, tenant, file, options, now).await
}

/// A file that was checked against the catalogue as it was.
#[derive(Debug)]
pub(crate) struct CheckedFile {
    unknown_types: Option<UnknownTypes>,
    types: Vec<CheckedType>,
    /// The stamp of the tenant's catalogue; None if it had none.
    stamp: Option<Uuid>,
}

/// A type of a file, with the versions that it adds.
#[derive(Debug)]
struct CheckedType {
    file: FileType,
    stored_versions: usize,
    new: Vec<(CheckedVersion, DateTime<Utc>)>,
}

/// Checks a file: its names, that existing versions are the same in it, and the new versions. `stamp` was read before; `stored`
/// reads the versions of one type at a time, because those of all types may be large. If they change in between, the stamp does,
/// and [`apply`] fails.
async fn check_against<F: Future<Output = sqlx::Result<Vec<TypeVersion>>>>(
    checker: VersionChecker<'_>,
    file: CatalogueFile,
    stamp: Option<Uuid>,
    now: DateTime<Utc>,
    stored: impl Fn(String) -> F,
) -> Result<CheckedFile, Error> {
    invalid(check_names(&file.event_types))?;
    let mut types = Vec::new();
    for (at, event_type) in file.event_types.into_iter().enumerate() {
        let stored = stored(event_type.name.clone()).await?;
        types.push(check_type(checker, event_type, stored, &format!("/event_types/{at}"), now).await?);
    }
    Ok(CheckedFile { unknown_types: file.unknown_types, types, stamp })
}

/// Waits for a check at most for this time.
async fn within<T>(time_max: Duration, checking: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(time_max, checking).await.unwrap_or(Err(NoVerdict::FileTooLong.into()))
}

async fn check_type(
    checker: VersionChecker<'_>,
    mut file: FileType,
    stored: Vec<TypeVersion>,
    pointer: &str,
    now: DateTime<Utc>,
) -> Result<CheckedType, Error> {
    let stored_versions = stored.len();
    if stored_versions > file.versions.len() {
        let detail = format!("must contain the {stored_versions} versions that exist: versions are not removed");
        return Err(Error::field(&format!("{pointer}/versions"), detail));
    }
    let added = file.versions.split_off(stored_versions);
    let mut previous = stored.last().map(|version| version.schema.clone());
    let given = std::mem::take(&mut file.versions);
    let different = checker.run(move || stored.iter().zip(&given).position(|(stored, given)| !is_same(stored, given)));
    if let Some(at) = different.await? {
        let detail = "must be the same as the existing version: versions do not change, add another one";
        return Err(Error::field(&format!("{pointer}/versions/{at}"), detail));
    }
    let mut new = Vec::new();
    for (at, version) in (stored_versions..).zip(added) {
        let (schema, pointer) = (version.schema.clone(), format!("{pointer}/versions/{at}"));
        let created_at = version.created_at.unwrap_or(now);
        let version = NewVersion { schema: version.schema, examples: version.examples };
        let checked = checker.check(version, previous.replace(schema), &pointer).await?;
        new.push((checked, created_at));
    }
    Ok(CheckedType { file, stored_versions, new })
}

/// Applies a file in the caller's transaction, which a dry run does not commit. Fails if the catalogue has changed since the file
/// was checked.
pub(crate) async fn apply(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    file: CheckedFile,
    options: ImportOptions,
    now: DateTime<Utc>,
) -> Result<ImportResult, Error> {
    if store::lock_stamp(tx, tenant).await? != file.stamp {
        return Err(Error::CatalogueChanged);
    }
    let settings = store::lock(tx, tenant).await?;
    if let Some(unknown_types) = file.unknown_types {
        store::save_settings(tx, tenant, CatalogueSettings { unknown_types, ..settings }).await?;
    }
    let mut result = ImportResult { dry_run: options.is_dry_run, ..ImportResult::default() };
    let names: HashSet<String> = file.types.iter().map(|checked| checked.file.name.clone()).collect();
    for checked in file.types {
        apply_type(tx, tenant, checked, now, &mut result).await?;
    }
    if !options.is_forced {
        breaking(std::mem::take(&mut result.forced))?;
    }
    if options.removes_others {
        for name in store::names(tx, tenant).await? {
            if !names.contains(&name) {
                remove(tx, tenant, &name).await?;
                result.removed.push(name);
            }
        }
    }
    if store::count(tx, tenant).await? > TYPES_MAX {
        return Err(Error::TooManyEventTypes(TYPES_MAX));
    }
    if result.removed.is_empty() {
        finish(tx, tenant).await?
    } else {
        finish_removal(tx, tenant).await?
    }
    Ok(result)
}

fn check_names(types: &[FileType]) -> Vec<FieldError> {
    let (mut errors, mut seen) = (Vec::new(), HashSet::new());
    for (at, event_type) in types.iter().enumerate() {
        let pointer = format!("/event_types/{at}");
        errors.extend(check_name(&event_type.name, &format!("{pointer}/name")));
        errors.extend(check_description(Some(&event_type.description), &pointer));
        if !seen.insert(&event_type.name) {
            errors.push(FieldError::body(format!("{pointer}/name"), "must not be repeated"));
        }
        let numbers = event_type.versions.iter().map(|version| version.version);
        if !numbers.eq(1..=event_type.versions.len() as i32) || event_type.versions.len() > VERSIONS_MAX as usize {
            let detail = format!("must have the numbers 1, 2, 3 and so on, at most {VERSIONS_MAX}");
            errors.push(FieldError::body(format!("{pointer}/versions"), detail));
        }
    }
    errors
}

async fn apply_type(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    checked: CheckedType,
    now: DateTime<Utc>,
    result: &mut ImportResult,
) -> Result<(), Error> {
    let CheckedType { file, stored_versions, new } = checked;
    let existing = store::find(tx, tenant, &file.name).await?;
    let is_changed = existing.as_ref().is_none_or(|old| {
        !new.is_empty()
            || old.description != file.description
            || (old.is_deprecated, old.is_enforced) != (file.deprecated, file.enforce)
    });
    if !is_changed {
        result.unchanged += 1;
        return Ok(());
    }
    if existing.is_some() { &mut result.changed } else { &mut result.created }.push(file.name.clone());
    let mut versions = Vec::new();
    for (number, (mut version, created_at)) in (stored_versions as i32 + 1..).zip(new) {
        result.forced.append(&mut version.changes);
        versions.push(version.numbered(number, created_at));
    }
    let (version, created_at) = existing.map_or((1, now), |old| (old.version + 1, old.created_at));
    let saved = EventType {
        name: file.name,
        description: file.description,
        is_deprecated: file.deprecated,
        is_enforced: file.enforce,
        newest: (stored_versions + versions.len()) as i32,
        version,
        created_at,
        updated_at: now,
    };
    save(tx, tenant, &saved, &versions).await
}

fn is_same(stored: &TypeVersion, version: &FileVersion) -> bool {
    let value = |text: &RawValue| serde_json::from_str::<Value>(text.get()).unwrap_or_default();
    let values = |texts: &[Box<RawValue>]| texts.iter().map(|text| value(text)).collect::<Vec<_>>();
    value(&stored.schema) == value(&version.schema) && values(&stored.examples) == values(&version.examples)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::event_types::schema::work::SchemaWork;

    #[tokio::test]
    async fn an_import_reads_the_stored_versions_of_one_type_at_a_time() {
        let file = r#"{"event_types": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}"#;
        let (file, read) = (serde_json::from_str(file).unwrap(), RefCell::new(Vec::new()));
        let now = DateTime::UNIX_EPOCH;
        let stored = async |name: String| {
            let version =
                TypeVersion { version: 1, schema: RawValue::TRUE.to_owned(), examples: Vec::new(), created_at: now };
            let versions = if name == "b" { vec![version] } else { Vec::new() };
            read.borrow_mut().push(name);
            Ok(versions)
        };
        let (work, tenant) = (SchemaWork::start().unwrap(), Tenant::try_from("acme".to_owned()).unwrap());
        let checker = VersionChecker { work: &work, tenant: &tenant };
        let refused = check_against(checker, file, None, now, stored).await.unwrap_err();
        assert!(matches!(&refused, Error::Invalid(errors) if errors[0].pointer == "/event_types/1/versions"));
        assert_eq!(*read.borrow(), ["a", "b"], "those of c were not needed yet");
    }

    #[tokio::test]
    async fn an_import_that_is_checked_for_too_long_is_a_503() {
        let checking = std::future::pending::<Result<(), Error>>();
        let problem = Problem::from(within(Duration::from_millis(1), checking).await.unwrap_err());
        assert_eq!((problem.status(), problem.code()), (http::StatusCode::SERVICE_UNAVAILABLE, "overloaded"));
    }
}
