//! Streams for the operator's command line, which has a connection to the database and no server: the same requests, checks and
//! representations as over HTTP.

use kit::auth::Tenant;
use kit::etag::IfMatch;
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::error::Error;
use crate::flow::stream as flow;
use crate::operator_replays::reason;
use crate::store::stream as store;
use crate::stream_fields::{SeekFields, StreamName};

/// The streams of a tenant by name, with their lag and readers, as the API shows each of them. Fails with the reason.
pub async fn list_streams(db: &PgPool, tenant: &Tenant) -> Result<Vec<Value>, String> {
    let listed = async {
        let mut db = db.acquire().await?;
        let mut shown = Vec::new();
        for stream in store::list(&mut db, tenant, (None, flow::STREAMS_MAX as u32)).await? {
            shown.push(json!(flow::show_in(&mut db, tenant, &StreamName(stream.name)).await?));
        }
        Ok::<_, Error>(shown)
    };
    listed.await.map_err(reason)
}

/// A stream with its positions, its lag and its readers. Fails with the reason.
pub async fn show_stream(db: &PgPool, tenant: &Tenant, name: &str) -> Result<Value, String> {
    let name = StreamName::try_from(name.to_owned())?;
    let shown = async { flow::show_in(&mut *db.acquire().await?, tenant, &name).await };
    Ok(json!(shown.await.map_err(reason)?))
}

/// Moves the position of a stream, by the body of a `POST /hub/v1/streams/{name}/seek`. Returns the body of the response. Pulls
/// that wait notice it when they renew their lease. Fails with the reason.
pub async fn seek_stream(db: &PgPool, tenant: &Tenant, name: &str, body: Value) -> Result<Value, String> {
    let name = StreamName::try_from(name.to_owned())?;
    let fields: SeekFields = serde_json::from_value(body).map_err(|error| error.to_string())?;
    let moved = async {
        let target = fields.target().map_err(Error::Invalid)?;
        let mut tx = db.begin().await?;
        let (_, state) = flow::seek_in(&mut tx, (tenant, &name), (target, fields.force)).await?;
        tx.commit().await?;
        Ok::<_, Error>(json!(state))
    };
    moved.await.map_err(reason)
}

/// Deletes a stream with its positions and readers. Fails with the reason.
pub async fn delete_stream(db: &PgPool, tenant: &Tenant, name: &str) -> Result<(), String> {
    let name = StreamName::try_from(name.to_owned())?;
    let deleted = async {
        let mut tx = db.begin().await?;
        flow::delete_in(&mut tx, tenant, &name, &IfMatch::default()).await?;
        Ok::<_, Error>(tx.commit().await?)
    };
    deleted.await.map_err(reason)
}
