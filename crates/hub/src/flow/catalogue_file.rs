//! Export and import of a catalogue as one file.
//!
//! An import changes the types that the file contains, all of them or none. Versions that exist must be the same in the file;
//! the file may add versions to them. Types that are not in the file stay, unless the caller wants them removed.

use std::collections::HashSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use http::StatusCode;
use kit::auth::Tenant;
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::{FieldError, Problem};
use mailbox::idempotency::StoreResponse;
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::{PgConnection, Postgres, Transaction};

use super::event_type::{
    NewVersion, TYPES_MAX, VERSIONS_MAX, applied, breaking, check_description, check_name, check_version, created_at,
    finish, finish_removal, invalid, remove, save, stored_schema, under, when_effective,
};
use super::run_once;
use crate::Hub;
use crate::catalogue::compatibility::breaking_changes;
use crate::catalogue::schema::Schema;
use crate::catalogue::{CatalogueSettings, EventType, TypeVersion};
use crate::error::Error;
use crate::store::catalogue as store;
use crate::view::{CatalogueFile, FileType, FileVersion, ImportResult};

/// How a file is imported.
#[derive(Debug, Clone, Copy)]
pub struct ImportOptions {
    /// Changes nothing.
    pub is_dry_run: bool,
    /// Accepts versions that may break what the previous one accepted.
    pub is_forced: bool,
    /// Removes the types that are not in the file.
    pub removes_others: bool,
}

/// The whole catalogue that applies to a tenant, in the order of the names.
pub(crate) async fn export(hub: &Hub, tenant: &Tenant) -> Result<CatalogueFile, Error> {
    export_in(&mut *hub.db.acquire().await?, tenant).await
}

/// Like [`export`], with a connection.
pub(crate) async fn export_in(db: &mut PgConnection, tenant: &Tenant) -> Result<CatalogueFile, Error> {
    let (tenant, settings) = applied(db, tenant).await?;
    let mut event_types = Vec::new();
    for event_type in store::list(db, &tenant, None, TYPES_MAX).await? {
        let versions = store::versions(db, &tenant, &event_type.name).await?;
        event_types.push(FileType::new(event_type, versions));
    }
    Ok(CatalogueFile { unknown_types: Some(settings.unknown_types), event_types })
}

/// Imports a file, or finds out what an import would do.
pub(crate) async fn import(
    hub: &Arc<Hub>,
    tenant: Tenant,
    (file, options): (CatalogueFile, ImportOptions),
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    if options.is_dry_run {
        let mut tx = hub.db.begin().await.map_err(Error::from)?;
        let result = apply(&mut tx, &tenant, file, options, now).await?;
        drop(tx);
        return Ok(StoredResponse::json(StatusCode::OK, &result));
    }
    let imported = run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            let result = apply(tx, &tenant, file, options, now).await?;
            Ok(StoredResponse::json(StatusCode::OK, &result))
        })
    })
    .await;
    when_effective(imported).await
}

/// Applies a file in the caller's transaction, which a dry run does not commit.
pub(crate) async fn apply(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    file: CatalogueFile,
    options: ImportOptions,
    now: DateTime<Utc>,
) -> Result<ImportResult, Error> {
    invalid(check_names(&file.event_types))?;
    let settings = store::lock(tx, tenant).await?;
    if let Some(unknown_types) = file.unknown_types {
        store::save_settings(tx, tenant, CatalogueSettings { unknown_types, ..settings }).await?;
    }
    let mut result = ImportResult { dry_run: options.is_dry_run, ..ImportResult::default() };
    let names: HashSet<String> = file.event_types.iter().map(|event_type| event_type.name.clone()).collect();
    for (at, event_type) in file.event_types.into_iter().enumerate() {
        apply_type(tx, tenant, (event_type, format!("/event_types/{at}")), now, &mut result).await?;
    }
    if !options.is_forced {
        breaking(std::mem::take(&mut result.forced))?;
    }
    if options.removes_others {
        for event_type in store::list(tx, tenant, None, TYPES_MAX).await? {
            if !names.contains(&event_type.name) {
                remove(tx, tenant, &event_type.name).await?;
                result.removed.push(event_type.name);
            }
        }
    }
    if store::count(tx, tenant).await? > TYPES_MAX {
        return Err(Error::TooManyEventTypes(TYPES_MAX));
    }
    match result.removed.is_empty() {
        true => finish(tx, tenant).await?,
        false => finish_removal(tx, tenant).await?,
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
    (file, pointer): (FileType, String),
    now: DateTime<Utc>,
    result: &mut ImportResult,
) -> Result<(), Error> {
    let existing = store::find(tx, tenant, &file.name).await?;
    let stored = store::versions(tx, tenant, &file.name).await?;
    if stored.len() > file.versions.len() {
        let detail = format!("must contain the {} versions that exist: versions are not removed", stored.len());
        return Err(Error::field(&format!("{pointer}/versions"), detail));
    }
    for (at, (stored, version)) in stored.iter().zip(&file.versions).enumerate() {
        if !is_same(stored, version) {
            let detail = "must be the same as the existing version: versions do not change, add another one";
            return Err(Error::field(&format!("{pointer}/versions/{at}"), detail));
        }
    }
    let (first_new, mut new) = (stored.len(), Vec::new());
    let mut previous = stored.last().map(stored_schema).transpose()?;
    for (at, version) in file.versions.into_iter().enumerate().skip(first_new) {
        let pointer = format!("{pointer}/versions/{at}");
        let (number, at) = (version.version, created_at(version.created_at, now));
        let version = NewVersion { schema: version.schema, examples: version.examples };
        let schema = check_version(tx, &version, &pointer).await?;
        if let Some(previous) = &previous {
            result.forced.extend(under(breaking_changes(&previous.plain, &schema.plain), &format!("{pointer}/schema")));
        }
        let stored =
            TypeVersion { version: number, schema: version.schema, examples: version.examples, created_at: at };
        previous = Some(schema.clone());
        new.push((stored, schema));
    }
    let fields = (file.description, file.deprecated, file.enforce);
    save_type(tx, tenant, (file.name, existing), fields, (&new, stored.len() + new.len()), (now, result)).await
}

async fn save_type(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    (name, existing): (String, Option<EventType>),
    (description, is_deprecated, is_enforced): (String, bool, bool),
    (new, newest): (&[(TypeVersion, Schema)], usize),
    (now, result): (DateTime<Utc>, &mut ImportResult),
) -> Result<(), Error> {
    let is_changed = existing.as_ref().is_none_or(|old| {
        !new.is_empty()
            || old.description != description
            || (old.is_deprecated, old.is_enforced) != (is_deprecated, is_enforced)
    });
    if !is_changed {
        result.unchanged += 1;
        return Ok(());
    }
    if existing.is_some() { &mut result.changed } else { &mut result.created }.push(name.clone());
    let (version, created_at) = existing.map_or((1, now), |old| (old.version + 1, old.created_at));
    let newest = newest as i32;
    let saved =
        EventType { name, description, is_deprecated, is_enforced, newest, version, created_at, updated_at: now };
    save(tx, tenant, &saved, new).await
}

fn is_same(stored: &TypeVersion, version: &FileVersion) -> bool {
    let value = |text: &RawValue| serde_json::from_str::<Value>(text.get()).unwrap_or_default();
    let values = |texts: &[Box<RawValue>]| texts.iter().map(|text| value(text)).collect::<Vec<_>>();
    value(&stored.schema) == value(&version.schema) && values(&stored.examples) == values(&version.examples)
}
