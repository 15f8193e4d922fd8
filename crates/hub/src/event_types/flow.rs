//! Managing the catalogue of event types.

pub(crate) mod document;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod version;

use chrono::{DateTime, Utc};
use http_kit::problem::FieldError;
use pillarbox::log::Tenant;
use serde_json::value::RawValue;
use sqlx::{PgConnection, Postgres, Transaction};

use crate::Hub;
use crate::directory::domain::is_reserved;
use crate::error::Error;
use crate::event_types::domain::{CatalogueSettings, EventType, TypeVersion, UnknownTypes};
use crate::event_types::flow::version::{CheckedVersion, NewVersion, VersionChecker};
use crate::event_types::store;
use crate::event_types::view::{CatalogueView, EventTypeWithVersions};

/// Event types of a tenant.
pub(crate) const TYPES_MAX: i64 = 1_000;
pub(crate) const VERSIONS_MAX: i32 = 100;
/// Bytes of the schemas and examples of all versions of a tenant.
const CATALOGUE_BYTES_MAX: i64 = 16 * 1024 * 1024;
/// Bytes of the schemas and examples of all versions of a type: a response has all of them, and fits into the memory that each
/// caller may have for its responses (2 MB).
const TYPE_BYTES_MAX: i64 = 1024 * 1024;
/// Bytes that the newest schemas of a tenant occupy when they are compiled.
const COMPILED_BYTES_MAX: i64 = 8 * 1024 * 1024;
const DESCRIPTION_CHARS_MAX: usize = 10_000;
const NAME_BYTES_MAX: usize = 200;

/// The fields of a new or changed event type. None: not given.
#[derive(Debug, Default)]
pub(crate) struct TypeFields {
    pub(crate) description: Option<String>,
    pub(crate) is_deprecated: Option<bool>,
    pub(crate) is_enforced: Option<bool>,
}

/// Checks a new event type, and its first version if one is given, before the transaction that saves it.
pub(crate) async fn check(
    hub: &Hub,
    tenant: &Tenant,
    name: &str,
    fields: &TypeFields,
    version: Option<NewVersion>,
) -> Result<Option<CheckedVersion>, Error> {
    let mut errors = check_name(name, "/name");
    errors.extend(check_description(fields.description.as_deref(), ""));
    invalid(errors)?;
    let Some(version) = version else { return Ok(None) };
    let checker = VersionChecker { work: hub.catalogue.work(), tenant };
    checker.check(version, None, "").await.map(Some)
}

/// Creates an event type, with its first version if one is given.
pub(crate) async fn create(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    name: String,
    fields: TypeFields,
    version: Option<CheckedVersion>,
    now: DateTime<Utc>,
) -> Result<EventTypeWithVersions, Error> {
    store::lock(tx, tenant).await?;
    if store::find(tx, tenant, &name).await?.is_some() {
        return Err(Error::EventTypeExists(name));
    }
    if store::count(tx, tenant).await? >= TYPES_MAX {
        return Err(Error::TooManyEventTypes(TYPES_MAX));
    }
    let event_type = EventType {
        name,
        description: fields.description.unwrap_or_default(),
        is_deprecated: fields.is_deprecated.unwrap_or_default(),
        is_enforced: fields.is_enforced.unwrap_or(true),
        newest: i32::from(version.is_some()),
        version: 1,
        created_at: now,
        updated_at: now,
    };
    let versions: Vec<_> = version.into_iter().map(|version| version.numbered(1, now)).collect();
    save(tx, tenant, &event_type, &versions).await?;
    finish(tx, tenant).await?;
    with_versions(tx, tenant, event_type).await
}

async fn with_versions(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    event_type: EventType,
) -> Result<EventTypeWithVersions, Error> {
    let versions = store::versions(tx, tenant, &event_type.name).await?;
    Ok(EventTypeWithVersions::new(event_type, versions))
}

/// Changes the given fields.
pub(crate) async fn update(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    name: String,
    fields: TypeFields,
    now: DateTime<Utc>,
) -> Result<EventTypeWithVersions, Error> {
    invalid(check_description(fields.description.as_deref(), ""))?;
    store::lock(tx, tenant).await?;
    let mut event_type = find(tx, tenant, &name).await?;
    event_type.description = fields.description.unwrap_or(event_type.description);
    event_type.is_deprecated = fields.is_deprecated.unwrap_or(event_type.is_deprecated);
    event_type.is_enforced = fields.is_enforced.unwrap_or(event_type.is_enforced);
    (event_type.version, event_type.updated_at) = (event_type.version + 1, now);
    save(tx, tenant, &event_type, &[]).await?;
    finish(tx, tenant).await?;
    with_versions(tx, tenant, event_type).await
}

/// A version that was checked against an event type as it was.
#[derive(Debug)]
pub(crate) struct CheckedAddition {
    compared: EventType,
    version: CheckedVersion,
}

/// Checks a version, before the transaction that adds it. It is compared with the newest one unless `is_forced`.
pub(crate) async fn check_addition(
    hub: &Hub,
    tenant: &Tenant,
    name: &str,
    new: NewVersion,
    is_forced: bool,
) -> Result<CheckedAddition, Error> {
    let (compared, previous) = compared_with(hub, tenant, name, is_forced).await?;
    let checker = VersionChecker { work: hub.catalogue.work(), tenant };
    Ok(CheckedAddition { compared, version: checker.check(new, previous, "").await? })
}

/// Adds a version. Fails if it may break what the previous one accepted, or if the event type has changed since the check.
pub(crate) async fn add_version(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    CheckedAddition { compared, version }: CheckedAddition,
    now: DateTime<Utc>,
) -> Result<EventTypeWithVersions, Error> {
    store::lock(tx, tenant).await?;
    let mut event_type = find(tx, tenant, &compared.name).await?;
    if event_type.newest >= VERSIONS_MAX {
        return Err(Error::TooManyVersions(VERSIONS_MAX));
    }
    if (event_type.newest, event_type.created_at) != (compared.newest, compared.created_at) {
        return Err(Error::CatalogueChanged);
    }
    breaking(version.changes.clone())?;
    event_type.newest += 1;
    (event_type.version, event_type.updated_at) = (event_type.version + 1, now);
    let version = version.numbered(event_type.newest, now);
    save(tx, tenant, &event_type, &[version]).await?;
    finish(tx, tenant).await?;
    with_versions(tx, tenant, event_type).await
}

/// An event type as it is now, and its newest schema unless a new one is not compared with it.
async fn compared_with(
    hub: &Hub,
    tenant: &Tenant,
    name: &str,
    is_forced: bool,
) -> Result<(EventType, Option<Box<RawValue>>), Error> {
    let mut db = hub.db.acquire().await?;
    let event_type = find(&mut db, tenant, name).await?;
    let previous = if is_forced { None } else { store::schema(&mut db, tenant, name, event_type.newest).await? };
    Ok((event_type, previous))
}

/// Deletes an event type with its versions.
pub(crate) async fn delete(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant, name: &str) -> Result<(), Error> {
    store::lock(tx, tenant).await?;
    remove(tx, tenant, name).await?;
    finish_removal(tx, tenant).await
}

/// Changes what happens to events whose type is not in the catalogue, and whether the catalogue is shared. None: not given.
pub(crate) async fn change_settings(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    unknown_types: Option<UnknownTypes>,
    is_shared: Option<bool>,
) -> Result<CatalogueView, Error> {
    if is_shared == Some(true) && *tenant != Tenant::main() {
        return Err(Error::field("/shared", "must be false: only the catalogue of the tenant main can be shared"));
    }
    let settings = store::lock(tx, tenant).await?;
    let settings = CatalogueSettings {
        unknown_types: unknown_types.unwrap_or(settings.unknown_types),
        is_shared: is_shared.unwrap_or(settings.is_shared),
    };
    store::save_settings(tx, tenant, settings).await?;
    finish(tx, tenant).await?;
    view(tx, tenant).await
}

/// The settings of the catalogue that applies to a tenant.
pub(crate) async fn catalogue(hub: &Hub, tenant: &Tenant) -> Result<CatalogueView, Error> {
    view(&mut *hub.db.acquire().await?, tenant).await
}

async fn view(db: &mut PgConnection, tenant: &Tenant) -> Result<CatalogueView, Error> {
    let (tenant, settings) = applied(db, tenant).await?;
    let types = store::count(db, &tenant).await?;
    Ok(CatalogueView { tenant, unknown_types: settings.unknown_types, shared: settings.is_shared, types })
}

/// The tenant whose catalogue applies to a tenant, with the settings of the catalogue.
pub(crate) async fn applied(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<(Tenant, CatalogueSettings)> {
    let found = store::find_applied(db, tenant).await?;
    Ok(found.map_or_else(|| (tenant.clone(), CatalogueSettings::default()), |found| (found.tenant, found.settings)))
}

/// Returns types in the order of their names, those after `after`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    after: Option<String>,
    limit: u32,
) -> Result<Vec<EventType>, Error> {
    let mut db = hub.db.acquire().await?;
    let (tenant, _) = applied(&mut db, tenant).await?;
    Ok(store::list(&mut db, &tenant, after.as_deref(), i64::from(limit)).await?)
}

/// Returns an event type and its versions, oldest first.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, name: &str) -> Result<(EventType, Vec<TypeVersion>), Error> {
    let mut db = hub.db.acquire().await?;
    let (tenant, _) = applied(&mut db, tenant).await?;
    Ok((find(&mut db, &tenant, name).await?, store::versions(&mut db, &tenant, name).await?))
}

/// The first example of an event type. Fails if the type does not exist, or if it has none.
pub(crate) async fn example(hub: &Hub, tenant: &Tenant, name: &str) -> Result<Box<RawValue>, Error> {
    let mut db = hub.db.acquire().await?;
    let (tenant, _) = applied(&mut db, tenant).await?;
    let found = store::find(&mut db, &tenant, name).await?;
    let version = match &found {
        Some(event_type) => newest(&mut db, &tenant, event_type).await?,
        None => None,
    };
    let example = version.and_then(|version| version.examples.into_iter().next());
    example.ok_or_else(|| {
        Error::field("/event_type", "must be an event type of the catalogue whose newest version has an example")
    })
}

// ---- parts of a change, shared with the import of a file

pub(crate) async fn find(db: &mut PgConnection, tenant: &Tenant, name: &str) -> Result<EventType, Error> {
    store::find(db, tenant, name).await?.ok_or(Error::NoEventType)
}

pub(crate) async fn newest(
    db: &mut PgConnection,
    tenant: &Tenant,
    event_type: &EventType,
) -> Result<Option<TypeVersion>, Error> {
    Ok(store::find_version(db, tenant, &event_type.name, event_type.newest).await?)
}

/// Saves a type and its new versions, each with what its schema occupies when it is compiled. Fails if the type has become too large
/// to be shown.
pub(crate) async fn save(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    event_type: &EventType,
    new: &[(TypeVersion, usize)],
) -> Result<(), Error> {
    store::save(tx, tenant, event_type).await?;
    for (version, compiled_bytes) in new {
        store::insert_version(tx, tenant, &event_type.name, version, *compiled_bytes).await?;
    }
    let bytes = store::type_bytes(tx, tenant, &event_type.name).await?;
    if bytes > TYPE_BYTES_MAX {
        return Err(Error::EventTypeTooLarge { name: event_type.name.clone(), bytes, max: TYPE_BYTES_MAX });
    }
    Ok(())
}

pub(crate) async fn remove(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant, name: &str) -> Result<(), Error> {
    if store::delete(tx, tenant, name).await? { Ok(()) } else { Err(Error::NoEventType) }
}

/// The end of a change. Fails if the catalogue has become too large.
pub(crate) async fn finish(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant) -> Result<(), Error> {
    let size = store::size(tx, tenant).await?;
    if size.stored_bytes > CATALOGUE_BYTES_MAX {
        return Err(Error::CatalogueTooLarge { bytes: size.stored_bytes, max: CATALOGUE_BYTES_MAX });
    }
    if size.compiled_bytes > COMPILED_BYTES_MAX {
        return Err(Error::CatalogueTooExpensive { bytes: size.compiled_bytes, max: COMPILED_BYTES_MAX });
    }
    Ok(store::set_stamp(tx).await?)
}

/// The end of a change that removes types. A catalogue without types and with default settings is deleted, so that the tenant
/// uses the shared one again.
pub(crate) async fn finish_removal(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant) -> Result<(), Error> {
    let settings = store::lock(tx, tenant).await?;
    if settings != CatalogueSettings::default() || store::count(tx, tenant).await? > 0 {
        return finish(tx, tenant).await;
    }
    store::delete_settings(tx, tenant).await?;
    Ok(store::set_stamp(tx).await?)
}

pub(crate) fn check_name(name: &str, pointer: &str) -> Vec<FieldError> {
    let is_part =
        |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let detail = match name {
        _ if name.len() > NAME_BYTES_MAX || !name.split('.').all(is_part) => {
            "must be up to 200 letters, digits and _, in parts joined by dots"
        }
        _ if is_reserved(name) => "is reserved: types that begin with `hub.` are posted by the hub itself",
        _ => return Vec::new(),
    };
    vec![FieldError::body(pointer, detail)]
}

pub(crate) fn check_description(description: Option<&str>, pointer: &str) -> Vec<FieldError> {
    match description {
        Some(text) if text.chars().count() > DESCRIPTION_CHARS_MAX || text.contains('\0') => {
            let detail = format!("must have at most {DESCRIPTION_CHARS_MAX} characters, without NUL");
            vec![FieldError::body(format!("{pointer}/description"), detail)]
        }
        _ => Vec::new(),
    }
}

pub(crate) fn invalid(errors: Vec<FieldError>) -> Result<(), Error> {
    if errors.is_empty() { Ok(()) } else { Err(Error::Invalid(errors)) }
}

pub(crate) fn breaking(errors: Vec<FieldError>) -> Result<(), Error> {
    if errors.is_empty() { Ok(()) } else { Err(Error::BreakingChange(errors)) }
}

/// The errors with their pointers below another one.
pub(crate) fn under(errors: Vec<FieldError>, pointer: &str) -> Vec<FieldError> {
    errors.into_iter().map(|error| FieldError::body(format!("{pointer}{}", error.pointer), error.detail)).collect()
}
