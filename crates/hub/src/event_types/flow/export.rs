//! The export of a catalogue: a file that is made while the client reads it, so that its size does not matter.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http_kit::admission::caller_share::{RequestCaller, request_caller};
use pillarbox::database::SHORT_STEP_TIME_MAX;
use pillarbox::log::Tenant;
use sqlx::PgConnection;

use crate::Hub;
use crate::error::Error;
use crate::event_types::flow::applied;
use crate::event_types::store;
use crate::event_types::view::{CatalogueFile, FileType, FileVersion};

/// The size at which a part of the file ends. One version may exceed it.
const PART_BYTES: usize = 64 * 1024;
/// Queries for one part: each reads one type or one version.
const PART_QUERIES_MAX: usize = 100;
/// What the file and each type end with. The types and the versions are inserted before it.
const END: &str = "]}";

/// An export in progress.
struct Export {
    hub: Arc<Hub>,
    /// Whose share of the connections it uses.
    caller: RequestCaller,
    tenant: Tenant,
    /// The name of the last type in the file.
    after: Option<String>,
    /// Its last version in the file; None: the type is complete.
    version: Option<i32>,
}

/// Returns the file of the catalogue that applies to a tenant, in parts. The stream fails if the database does: the client then
/// gets no complete file.
pub(crate) async fn export(
    hub: Arc<Hub>,
    tenant: &Tenant,
) -> Result<impl Stream<Item = Result<Bytes, Error>> + Send + use<>, Error> {
    let (tenant, settings) = applied(&mut *hub.db.acquire().await?, tenant).await?;
    let file = CatalogueFile { unknown_types: Some(settings.unknown_types), event_types: Vec::new() };
    let text = without_end(&file)?;
    let export = Export { hub, caller: request_caller(), tenant, after: None, version: None };
    Ok(stream::try_unfold(Some((export, text)), next_part))
}

async fn next_part(state: Option<(Export, String)>) -> Result<Option<(Bytes, Option<(Export, String)>)>, Error> {
    let Some((mut export, mut text)) = state else { return Ok(None) };
    let (hub, caller) = (Arc::clone(&export.hub), export.caller);
    let adding = async {
        let mut db = hub.db.acquire().await?;
        hub.db.step("catalogue export", SHORT_STEP_TIME_MAX, export.add(&mut db, &mut text)).await
    };
    let has_more = caller.run(adding).await?;
    let part = Bytes::from(text);
    Ok(Some((part, has_more.then(|| (export, String::new())))))
}

impl Export {
    /// Adds types and versions until the part is large enough. Returns false at the end of the file.
    async fn add(&mut self, db: &mut PgConnection, text: &mut String) -> Result<bool, Error> {
        for _ in 0..PART_QUERIES_MAX {
            if text.len() >= PART_BYTES {
                break;
            }
            if let (Some(name), Some(version)) = (&self.after, self.version) {
                match store::find_version(db, &self.tenant, name, version + 1).await? {
                    Some(next) => {
                        text.push_str(if version > 0 { "," } else { "" });
                        text.push_str(&to_json(&FileVersion::from(next))?);
                        self.version = Some(version + 1);
                    }
                    None => {
                        text.push_str(END);
                        self.version = None;
                    }
                }
                continue;
            }
            let Some(next) = store::list(db, &self.tenant, self.after.as_deref(), 1).await?.pop() else {
                text.push_str(END);
                return Ok(false);
            };
            text.push_str(if self.after.is_some() { "," } else { "" });
            (self.after, self.version) = (Some(next.name.clone()), Some(0));
            text.push_str(&without_end(&FileType::new(next, Vec::new()))?);
        }
        Ok(true)
    }
}

/// The JSON of something whose last field is an empty list, up to that list.
fn without_end(value: &impl serde::Serialize) -> Result<String, Error> {
    let mut json = to_json(value)?;
    json.truncate(json.len() - END.len());
    Ok(json)
}

fn to_json(value: &impl serde::Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|error| sqlx::Error::Encode(error.into()).into())
}
