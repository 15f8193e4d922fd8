//! `key list` and `key revoke`: the API keys of the installation.

use chrono::{DateTime, Utc};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::Value;
use uuid::Uuid;

use crate::Failure;
use crate::api::Api;
use crate::pages;
use crate::table::{self, print_line};

const PATH: &str = "/admin/v1/keys";

/// Prints the keys, newest first.
pub async fn list(api: &Api, tenant: Option<&Tenant>, json: bool) -> Result<(), Failure> {
    let query = tenant.map(|tenant| format!("&tenant={}", tenant.as_str())).unwrap_or_default();
    let keys = pages::all(api, PATH, &query).await?;
    if json {
        return Ok(keys.iter().try_for_each(table::print_json)?);
    }
    let now = Utc::now();
    let rows: Vec<_> = keys.iter().map(|key| row(key, now)).collect();
    Ok(table::print(["ID", "HINT", "ROLE", "TENANT", "CREATED", "STATE", "NAME"], &rows)?)
}

fn row(key: &Value, now: DateTime<Utc>) -> [String; 7] {
    let expires_at: Option<DateTime<Utc>> = key["expires_at"].as_str().and_then(|text| text.parse().ok());
    let state = if !key["revoked_at"].is_null() {
        "revoked"
    } else if expires_at.is_some_and(|at| at <= now) {
        "expired"
    } else {
        "valid"
    };
    let text = |field| pages::text(key, field);
    let created = pages::time(key, "created_at");
    [text("id"), text("hint"), text("role"), text("tenant"), created, state.to_owned(), text("name")]
}

/// Revokes a key. Fails if it does not exist.
pub async fn revoke(api: &Api, id: Uuid) -> Result<(), Failure> {
    api.send(Method::DELETE, &format!("{PATH}/{id}"), None).await?;
    Ok(print_line(&format!("Key {id} is revoked; all servers refuse it within 2 s."))?)
}
