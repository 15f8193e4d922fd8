//! Managing the catalogue of event types. A change is answered when it holds for every event that is posted afterwards.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use http::header::LOCATION;
use http::{HeaderValue, StatusCode};
use kit::auth::Tenant;
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::{FieldError, Problem};
use mailbox::idempotency::StoreResponse;
use mailbox::log::{
    EventRule, compile_patterns, remove_event_rules, remove_event_schema, set_event_rule, set_event_schema,
};
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::{PgConnection, Postgres, Transaction};

use super::run_once;
use crate::Hub;
use crate::catalogue::cache::VALID_TIME;
use crate::catalogue::compatibility::breaking_changes;
use crate::catalogue::schema::{Schema, patterns};
use crate::catalogue::validator::Validator;
use crate::catalogue::{CatalogueSettings, EventType, TypeVersion, UnknownTypes};
use crate::domain::is_reserved;
use crate::error::Error;
use crate::store::catalogue as store;
use crate::view::{CatalogueView, EventTypeWithVersions};

/// Event types of a tenant.
pub(crate) const TYPES_MAX: i64 = 1_000;
pub(crate) const VERSIONS_MAX: i32 = 100;
const EXAMPLES_MAX: usize = 10;
/// Bytes of all examples of a version.
const EXAMPLE_BYTES_MAX: usize = 64 * 1024;
const DESCRIPTION_CHARS_MAX: usize = 10_000;
const NAME_BYTES_MAX: usize = 200;

/// The fields of a new or changed event type. None: not given.
#[derive(Debug, Default)]
pub(crate) struct TypeFields {
    pub(crate) description: Option<String>,
    pub(crate) is_deprecated: Option<bool>,
    pub(crate) is_enforced: Option<bool>,
}

/// A schema with its examples, as they were posted.
#[derive(Debug)]
pub(crate) struct NewVersion {
    pub(crate) schema: Box<RawValue>,
    pub(crate) examples: Vec<Box<RawValue>>,
}

/// Creates an event type, with its first version if one is given.
pub(crate) async fn create(
    hub: &Arc<Hub>,
    tenant: Tenant,
    (name, fields, version): (String, TypeFields, Option<NewVersion>),
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    let created = run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            let mut errors = check_name(&name, "/name");
            errors.extend(check_description(fields.description.as_deref(), ""));
            invalid(errors)?;
            store::lock(tx, &tenant).await.map_err(Error::from)?;
            if store::find(tx, &tenant, &name).await.map_err(Error::from)?.is_some() {
                return Err(Error::EventTypeExists(name).into());
            }
            if store::count(tx, &tenant).await.map_err(Error::from)? >= TYPES_MAX {
                return Err(Error::TooManyEventTypes(TYPES_MAX).into());
            }
            let mut event_type = EventType {
                name,
                description: fields.description.unwrap_or_default(),
                is_deprecated: fields.is_deprecated.unwrap_or_default(),
                is_enforced: fields.is_enforced.unwrap_or(true),
                newest: 0,
                version: 1,
                created_at: now,
                updated_at: now,
            };
            let mut versions = Vec::new();
            if let Some(new) = version {
                let schema = check_version(tx, &new, "").await?;
                event_type.newest = 1;
                versions.push((
                    TypeVersion { version: 1, schema: new.schema, examples: new.examples, created_at: now },
                    schema,
                ));
            }
            save(tx, &tenant, &event_type, &versions).await?;
            finish(tx, &tenant).await?;
            let path = format!("/hub/v1/event-types/{}", event_type.name);
            let location = HeaderValue::try_from(path).map_err(|error| Problem::internal(&error))?;
            let view =
                EventTypeWithVersions::new(event_type, versions.into_iter().map(|(version, _)| version).collect());
            Ok(StoredResponse::json(StatusCode::CREATED, &view).with_header(LOCATION, location))
        })
    })
    .await;
    when_effective(created).await
}

/// Changes the given fields.
pub(crate) async fn update(
    hub: &Arc<Hub>,
    tenant: Tenant,
    (name, fields): (String, TypeFields),
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    let updated = run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            invalid(check_description(fields.description.as_deref(), ""))?;
            store::lock(tx, &tenant).await.map_err(Error::from)?;
            let mut event_type = find(tx, &tenant, &name).await?;
            event_type.description = fields.description.unwrap_or(event_type.description);
            event_type.is_deprecated = fields.is_deprecated.unwrap_or(event_type.is_deprecated);
            event_type.is_enforced = fields.is_enforced.unwrap_or(event_type.is_enforced);
            (event_type.version, event_type.updated_at) = (event_type.version + 1, now);
            save(tx, &tenant, &event_type, &[]).await?;
            finish(tx, &tenant).await?;
            let versions = store::versions(tx, &tenant, &name).await.map_err(Error::from)?;
            Ok(StoredResponse::json(StatusCode::OK, &EventTypeWithVersions::new(event_type, versions)))
        })
    })
    .await;
    when_effective(updated).await
}

/// Adds a version. Fails if it may break what the previous one accepted, unless `is_forced`.
pub(crate) async fn add_version(
    hub: &Arc<Hub>,
    tenant: Tenant,
    (name, new, is_forced): (String, NewVersion, bool),
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    let added = run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            store::lock(tx, &tenant).await.map_err(Error::from)?;
            let mut event_type = find(tx, &tenant, &name).await?;
            if event_type.newest >= VERSIONS_MAX {
                return Err(Error::TooManyVersions(VERSIONS_MAX).into());
            }
            let schema = check_version(tx, &new, "").await?;
            if let Some(previous) = newest(tx, &tenant, &event_type).await?
                && !is_forced
            {
                let changes = breaking_changes(&stored_schema(&previous)?.plain, &schema.plain);
                breaking(under(changes, "/schema"))?;
            }
            event_type.newest += 1;
            (event_type.version, event_type.updated_at) = (event_type.version + 1, now);
            let number = event_type.newest;
            let version = TypeVersion { version: number, schema: new.schema, examples: new.examples, created_at: now };
            save(tx, &tenant, &event_type, &[(version, schema)]).await?;
            finish(tx, &tenant).await?;
            let versions = store::versions(tx, &tenant, &name).await.map_err(Error::from)?;
            Ok(StoredResponse::json(StatusCode::CREATED, &EventTypeWithVersions::new(event_type, versions)))
        })
    })
    .await;
    when_effective(added).await
}

/// Deletes an event type with its versions.
pub(crate) async fn delete(
    hub: &Arc<Hub>,
    tenant: Tenant,
    name: String,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let deleted = run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            store::lock(tx, &tenant).await.map_err(Error::from)?;
            remove(tx, &tenant, &name).await?;
            finish_removal(tx, &tenant).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await;
    when_effective(deleted).await
}

/// Changes what happens to events whose type is not in the catalogue, and whether the catalogue is shared. None: not given.
pub(crate) async fn change_settings(
    hub: &Arc<Hub>,
    tenant: Tenant,
    (unknown_types, is_shared): (Option<UnknownTypes>, Option<bool>),
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let changed = run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            if is_shared == Some(true) && tenant != Tenant::main() {
                let detail = "must be false: only the catalogue of the tenant main can be shared";
                return Err(Error::field("/shared", detail).into());
            }
            let settings = store::lock(tx, &tenant).await.map_err(Error::from)?;
            let settings = CatalogueSettings {
                unknown_types: unknown_types.unwrap_or(settings.unknown_types),
                is_shared: is_shared.unwrap_or(settings.is_shared),
            };
            store::save_settings(tx, &tenant, settings).await.map_err(Error::from)?;
            finish(tx, &tenant).await?;
            Ok(StoredResponse::json(StatusCode::OK, &view(tx, &tenant).await?))
        })
    })
    .await;
    when_effective(changed).await
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
    Ok(found.unwrap_or_else(|| (tenant.clone(), CatalogueSettings::default())))
}

/// Returns types in the order of their names, those after `after`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    (after, limit): (Option<String>, u32),
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

/// All types that apply to a tenant, with their newest versions.
pub(crate) async fn all(hub: &Hub, tenant: &Tenant) -> Result<Vec<(EventType, Option<TypeVersion>)>, Error> {
    let mut db = hub.db.acquire().await?;
    let (tenant, _) = applied(&mut db, tenant).await?;
    let mut types = Vec::new();
    for event_type in store::list(&mut db, &tenant, None, TYPES_MAX).await? {
        let version = newest(&mut db, &tenant, &event_type).await?;
        types.push((event_type, version));
    }
    Ok(types)
}

/// The first example of an event type. Fails if there is no such type, or if it has none.
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

/// The schema of a stored version, which was checked when it was stored.
pub(crate) fn stored_schema(version: &TypeVersion) -> Result<Schema, Error> {
    Schema::parse(&version.schema).map_err(|errors| Error::InvalidStoredSchema(format!("{errors:?}")))
}

/// Checks a schema and its examples; `pointer` is where they are in the request body.
pub(crate) async fn check_version(db: &mut PgConnection, new: &NewVersion, pointer: &str) -> Result<Schema, Error> {
    let schema =
        Schema::parse(&new.schema).map_err(|errors| Error::Invalid(under(errors, &format!("{pointer}/schema"))))?;
    let at_schema = |detail: String| Error::field(&format!("{pointer}/schema"), detail);
    let validator = Validator::new(&schema.rust).map_err(at_schema)?;
    let patterns = patterns(&schema.sql);
    compile_patterns(db, &patterns).await.map_err(|error| match error.as_database_error() {
        Some(_) => at_schema("must have patterns that PostgreSQL can compile".to_owned()),
        None => error.into(),
    })?;
    let bytes: usize = new.examples.iter().map(|example| example.get().len()).sum();
    if new.examples.len() > EXAMPLES_MAX || bytes > EXAMPLE_BYTES_MAX {
        let detail =
            format!("must be at most {EXAMPLES_MAX} examples, with at most {EXAMPLE_BYTES_MAX} bytes together");
        return Err(Error::field(&format!("{pointer}/examples"), detail));
    }
    let mut errors = Vec::new();
    for (at, example) in new.examples.iter().enumerate() {
        let pointer = format!("{pointer}/examples/{at}");
        match serde_json::from_str::<Value>(example.get()) {
            Ok(example) => errors.extend(validator.errors(&example, &pointer)),
            Err(_) => errors.push(FieldError::body(
                pointer,
                "must be JSON that is not nested deeply, without numbers beyond double precision",
            )),
        }
    }
    invalid(errors)?;
    Ok(schema)
}

/// Saves a type and its new versions, and what posts in SQL are checked against.
pub(crate) async fn save(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    event_type: &EventType,
    new: &[(TypeVersion, Schema)],
) -> Result<(), Error> {
    store::save(tx, tenant, event_type).await?;
    for (version, _) in new {
        store::insert_version(tx, tenant, &event_type.name, version).await?;
    }
    let applied = match (event_type.is_enforced, new.last()) {
        (false, _) => None,
        (true, Some((_, schema))) => Some(schema.sql.clone()),
        (true, None) => match newest(tx, tenant, event_type).await? {
            Some(version) => Some(stored_schema(&version)?.sql),
            None => None,
        },
    };
    Ok(set_event_schema(tx, tenant.as_str(), &event_type.name, applied.as_ref()).await?)
}

pub(crate) async fn remove(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant, name: &str) -> Result<(), Error> {
    if !store::delete(tx, tenant, name).await? {
        return Err(Error::NoEventType);
    }
    Ok(remove_event_schema(tx, tenant.as_str(), name).await?)
}

/// The end of a change.
pub(crate) async fn finish(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant) -> Result<(), Error> {
    let settings = store::lock(tx, tenant).await?;
    let refuses_unknown = settings.unknown_types == UnknownTypes::Refuse;
    set_event_rule(tx, tenant.as_str(), EventRule { refuses_unknown, is_shared: settings.is_shared }).await?;
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
    remove_event_rules(tx, tenant.as_str()).await?;
    Ok(store::set_stamp(tx).await?)
}

/// Waits until no process uses the catalogue as it was before the commit.
pub(crate) async fn when_effective(response: Result<StoredResponse, Problem>) -> Result<StoredResponse, Problem> {
    if response.as_ref().is_ok_and(|response| response.status().is_success()) {
        tokio::time::sleep(VALID_TIME).await;
    }
    response
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

/// When a version was created: the time in the file, or the time of the import.
pub(crate) fn created_at(given: Option<DateTime<Utc>>, now: DateTime<Utc>) -> DateTime<Utc> {
    given.unwrap_or(now)
}
