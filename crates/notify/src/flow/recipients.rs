//! The users behind aggregates.

use std::collections::{BTreeMap, BTreeSet};

use http_kit::problem::FieldError;
use pillarbox::database::Database;
use pillarbox::log::{aggregate_types, lock_aggregate_types, unknown_tenant_text, unknown_tenants};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::address;
use crate::error::Error;
use crate::flow::contacts;
use crate::store::recipients::{self as store, NewContact, Recipient, RecipientFilter};

/// The errors, or the ignored rows, of an import that are listed.
const ERRORS_MAX: usize = 100;
/// The longest name of a user, in characters.
const NAME_CHARS_MAX: usize = 200;

/// A row of an import.
#[derive(Debug)]
pub(crate) struct ImportedRow {
    pub(crate) recipient: Recipient,
    /// None if the row has no contact.
    pub(crate) contact: Option<NewContact>,
    /// The fields whose types are wrong, relative to the row.
    pub(crate) errors: Vec<FieldError>,
}

impl ImportedRow {
    /// A row of which nothing is known but its errors.
    pub(crate) fn invalid(errors: Vec<FieldError>) -> ImportedRow {
        let recipient = Recipient { aggregate_type: String::new(), aggregate_id: None, user_id: Uuid::nil() };
        ImportedRow { recipient, contact: None, errors }
    }
}

/// The result of an import.
#[derive(Debug)]
pub(crate) struct ImportResult {
    /// How many users were not recipients before.
    pub(crate) added: u64,
    /// The rows whose address, name or locale was ignored because the user has an account, up to [`ERRORS_MAX`].
    pub(crate) with_account: Vec<usize>,
}

/// Makes a user a recipient.
pub(crate) async fn add(tx: &mut Transaction<'_, Postgres>, recipient: &Recipient) -> Result<(), Error> {
    check_type(tx, &recipient.aggregate_type).await?;
    store::add(tx, std::slice::from_ref(recipient)).await?;
    Ok(())
}

/// Removes a recipient. Succeeds if there is none.
pub(crate) async fn remove(tx: &mut Transaction<'_, Postgres>, recipient: &Recipient) -> Result<(), Error> {
    store::remove(tx, recipient).await?;
    Ok(())
}

/// Recipients after a position, by user and aggregate.
pub(crate) async fn list(
    db: &Database,
    filter: &RecipientFilter,
    after: Option<&(Uuid, String, Option<i64>)>,
    limit: u32,
) -> Result<Vec<Recipient>, Error> {
    Ok(store::list(&mut *db.acquire().await?, filter, after, limit).await?)
}

/// Imports recipients and contacts, all rows or none. Fails with the errors of all rows, up to [`ERRORS_MAX`].
pub(crate) async fn import(tx: &mut Transaction<'_, Postgres>, rows: &[ImportedRow]) -> Result<ImportResult, Error> {
    let types: BTreeSet<&str> = rows.iter().map(|row| row.recipient.aggregate_type.as_str()).collect();
    lock_aggregate_types(tx, &Vec::from_iter(types)).await?;
    let known: BTreeSet<String> = aggregate_types(tx).await?.into_iter().collect();
    let tenant_of = |row: &'_ ImportedRow| row.contact.as_ref().and_then(|contact| contact.tenant.clone());
    let tenants: Vec<String> = rows.iter().filter_map(tenant_of).collect();
    let unknown = unknown_tenants(tx, &tenants.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let mut errors: Vec<FieldError> =
        rows.iter().enumerate().flat_map(|(at, row)| row_errors(at, row, &known)).collect();
    errors.extend(rows.iter().enumerate().filter_map(|(at, row)| {
        let tenant = tenant_of(row).filter(|tenant| unknown.contains(tenant))?;
        Some(FieldError::body(format!("/recipients/{at}/tenant"), unknown_tenant_text(&tenant)))
    }));
    if !errors.is_empty() {
        return Err(Error::Invalid(bounded(errors)));
    }
    // The last row of a user counts. In the order of the user ids: two imports could deadlock otherwise.
    let contacts: BTreeMap<Uuid, NewContact> =
        rows.iter().filter_map(|row| row.contact.clone()).map(|contact| (contact.user_id, contact)).collect();
    let contacts: Vec<NewContact> = contacts.into_values().collect();
    contacts::wake_waiting(tx, &contacts).await?;
    store::import_contacts(tx, &contacts).await?;
    let has_more = |contact: &NewContact| contact.email.is_some() || contact.name.is_some() || contact.locale.is_some();
    let more: Vec<(usize, Uuid)> = rows
        .iter()
        .enumerate()
        .filter(|(_, row)| row.contact.as_ref().is_some_and(has_more))
        .map(|(at, row)| (at, row.recipient.user_id))
        .collect();
    let users: Vec<Uuid> = more.iter().map(|(_, user)| *user).collect();
    let with_account = if users.is_empty() { BTreeSet::new() } else { store::with_account(tx, &users).await? };
    let ignored = more.into_iter().filter(|(_, user)| with_account.contains(user)).map(|(at, _)| at);
    let with_account = ignored.take(ERRORS_MAX).collect();
    let recipients: Vec<Recipient> = rows.iter().map(|row| row.recipient.clone()).collect();
    Ok(ImportResult { added: store::add(tx, &recipients).await?, with_account })
}

/// The first errors, and how many there are beyond them.
fn bounded(mut errors: Vec<FieldError>) -> Vec<FieldError> {
    let more = errors.len().saturating_sub(ERRORS_MAX);
    errors.truncate(ERRORS_MAX);
    if more > 0 {
        errors.push(FieldError::body("/recipients", format!("has {more} more errors that are not listed")));
    }
    errors
}

async fn check_type(tx: &mut Transaction<'_, Postgres>, name: &str) -> Result<(), Error> {
    lock_aggregate_types(tx, &[name]).await?;
    let known = aggregate_types(tx).await?;
    if known.iter().any(|known| known == name) { Ok(()) } else { Err(Error::UnknownType(unknown_type(&known))) }
}

fn unknown_type<'a>(known: impl IntoIterator<Item = &'a String>) -> String {
    let known: Vec<&str> = known.into_iter().map(String::as_str).collect();
    format!("is unknown. Known types: {}", known.join(", "))
}

fn row_errors(at: usize, row: &ImportedRow, known: &BTreeSet<String>) -> Vec<FieldError> {
    let at_row = |error: &FieldError| FieldError::body(format!("/recipients/{at}{}", error.pointer), &error.detail);
    let mut errors: Vec<FieldError> = row.errors.iter().map(at_row).collect();
    // An invalid row may have none.
    let has_type = row.errors.is_empty() || !row.recipient.aggregate_type.is_empty();
    if has_type && !known.contains(&row.recipient.aggregate_type) {
        errors.push(FieldError::body(format!("/recipients/{at}/aggregate_type"), unknown_type(known)));
    }
    let Some(contact) = &row.contact else { return errors };
    if contact.email.as_deref().is_some_and(|email| address::parse(email).is_err()) {
        errors.push(FieldError::body(format!("/recipients/{at}/email"), "must be an e-mail address"));
    }
    let is_name = |name: &str| name.chars().count() <= NAME_CHARS_MAX && !name.chars().any(char::is_control);
    if !contact.name.as_deref().is_none_or(is_name) {
        let detail = format!("must have at most {NAME_CHARS_MAX} characters, without control characters");
        errors.push(FieldError::body(format!("/recipients/{at}/name"), detail));
    }
    let is_locale = |locale: &str| {
        (1..=35).contains(&locale.len()) && locale.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    if !contact.locale.as_deref().is_none_or(is_locale) {
        errors.push(FieldError::body(format!("/recipients/{at}/locale"), "must be a language such as en or pt-BR"));
    }
    errors
}
