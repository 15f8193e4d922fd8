//! The documents about a whole catalogue, which are made while the client reads them, so that their size does not matter.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http_kit::admission::caller_share::{RequestCaller, request_caller};
use pillarbox::database::SHORT_STEP_TIME_MAX;
use pillarbox::log::Tenant;
use sqlx::PgConnection;

use crate::Hub;
use crate::error::Error;
use crate::event_types::flow::{applied, newest};
use crate::event_types::page::{Document, NewestVersion};
use crate::event_types::store;

/// The bytes of schemas and examples after which a part has no more types. One type may exceed it.
const PART_BYTES: usize = 64 * 1024;
const PART_TYPES_MAX: usize = 50;

/// A document in progress.
struct Making {
    hub: Arc<Hub>,
    /// Whose share of the connections it uses.
    caller: RequestCaller,
    document: Document,
    /// Who reads it, and so whose turn it takes on the threads for schemas.
    reader: Tenant,
    /// Whose catalogue it is.
    owner: Tenant,
    /// The last type in the document.
    after: Option<String>,
}

/// What is left of a document: its first part, if that was not sent yet, and what makes the others.
type Left = Option<(Option<String>, Making)>;

/// Returns a document about the catalogue that applies to a tenant, in parts. The stream fails if the database does: the client then
/// gets no complete document.
pub(crate) async fn document(
    hub: Arc<Hub>,
    reader: Tenant,
    document: Document,
) -> Result<impl Stream<Item = Result<Bytes, Error>> + Send, Error> {
    let mut db = hub.db.acquire().await?;
    let (owner, _) = applied(&mut db, &reader).await?;
    let names = store::names(&mut db, &owner).await?;
    drop(db);
    let title = reader.clone();
    let start = hub.catalogue.work().verdict(&reader, move || document.start(title.as_str(), &names)).await?;
    let making = Making { hub, caller: request_caller(), document, reader, owner, after: None };
    Ok(stream::try_unfold(Some((Some(start), making)), next_part))
}

async fn next_part(left: Left) -> Result<Option<(Bytes, Left)>, Error> {
    let Some((start, mut making)) = left else { return Ok(None) };
    if let Some(start) = start {
        return Ok(Some((Bytes::from(start), Some((None, making)))));
    }
    let (document, is_first) = (making.document, making.after.is_none());
    let types = making.read().await?;
    if types.is_empty() {
        return Ok(Some((Bytes::from_static(document.end().as_bytes()), None)));
    }
    let work = making.hub.catalogue.work();
    let part = work.run(&making.reader, move || document.part(&types, is_first)).await?;
    Ok(Some((Bytes::from(part), Some((None, making)))))
}

impl Making {
    /// Reads the types of the next part. Empty at the end.
    async fn read(&mut self) -> Result<Vec<NewestVersion>, Error> {
        let (hub, caller) = (Arc::clone(&self.hub), self.caller);
        let reading = async {
            let mut db = hub.db.acquire().await?;
            hub.db.step("catalogue document", SHORT_STEP_TIME_MAX, self.read_with(&mut db)).await
        };
        caller.run(reading).await
    }

    async fn read_with(&mut self, db: &mut PgConnection) -> Result<Vec<NewestVersion>, Error> {
        let (mut types, mut bytes) = (Vec::new(), 0);
        while bytes < PART_BYTES && types.len() < PART_TYPES_MAX {
            let next = store::list(db, &self.owner, self.after.as_deref(), 1).await?.pop();
            let Some(event_type) = next else { break };
            let version = newest(db, &self.owner, &event_type).await?;
            self.after = Some(event_type.name.clone());
            bytes += event_type.description.len()
                + version.as_ref().map_or(0, |version| {
                    version.schema.get().len()
                        + version.examples.iter().map(|example| example.get().len()).sum::<usize>()
                });
            types.push((event_type, version));
        }
        Ok(types)
    }
}
