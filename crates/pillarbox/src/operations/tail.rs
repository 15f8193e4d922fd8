//! Following the log: pages of messages in the order of the log, without losing late commits. The position between two pages is
//! small, so that a client can keep it.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::log::{Filter, Message, Reader, Snapshot};

/// Rows that a page scans at a time, and how often at most. A page ends when it has about as many messages.
const SCAN_ROWS: u32 = 1_000;
const SCANS_MAX: u32 = 20;

/// Where the next page begins: the open window, and the last id that was read in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TailPosition {
    old: StoredSnapshot,
    /// Absent if the window was read to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    new: Option<StoredSnapshot>,
    last_id: i64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredSnapshot {
    id_before: i64,
    visible: String,
    at: DateTime<Utc>,
    incarnation: Uuid,
}

/// A page of the log.
#[derive(Debug)]
pub struct TailPage {
    /// The messages in the order of the log. There can be later ones although it is empty.
    pub messages: Vec<Message>,
    /// Whether the page ends with the newest message.
    pub is_at_end: bool,
    /// Where the next page begins.
    pub next: TailPosition,
}

/// Reads the next messages that match, of at most about twice `bytes_max`. Without a position, it starts with the first message
/// that was posted at `from` or later, or without `from` with the next one that is posted. The connection must not be in a
/// transaction.
pub async fn tail(
    db: &mut PgConnection,
    filter: Filter,
    from: Option<DateTime<Utc>>,
    position: Option<TailPosition>,
    bytes_max: usize,
) -> sqlx::Result<TailPage> {
    let now = Snapshot::now(db).await?;
    let is_first = position.is_none();
    let mut reader = match (position, from) {
        (Some(position), _) => position.reader(filter),
        (None, None) => Reader::of_all_shards(filter, &now),
        (None, Some(_)) => Reader::of_all_shards(filter, &Snapshot::beginning(db).await?),
    }
    .in_log_order()
    .with_bytes_max(bytes_max);
    reader.open_windows(&now);
    if let Some(from) = from.filter(|_| is_first) {
        reader.skip_to(db, from).await?;
    }
    let (mut messages, mut bytes) = (Vec::new(), 0);
    for _ in 0..SCANS_MAX {
        if reader.is_done() || messages.len() >= SCAN_ROWS as usize || bytes >= bytes_max {
            break;
        }
        let found = reader.read(db, SCAN_ROWS).await?;
        let found = found.into_iter().filter(|message| from.is_none_or(|from| message.at >= from));
        messages.extend(found.inspect(|message| bytes += message.bytes()));
    }
    let next = TailPosition::of(&reader).unwrap_or_else(|| TailPosition::after(&now));
    Ok(TailPage { messages, is_at_end: reader.is_done(), next })
}

impl TailPosition {
    fn after(snapshot: &Snapshot) -> TailPosition {
        TailPosition { old: snapshot.into(), new: None, last_id: 0 }
    }

    /// None if the reader has no shard. All shards have the same window, because the reader reads them in the order of the log.
    fn of(reader: &Reader) -> Option<TailPosition> {
        let positions = reader.positions().values();
        let first = positions.clone().min_by_key(|position| position.last_id)?;
        let new = (!first.is_done()).then(|| (&first.new).into());
        Some(TailPosition { old: (&first.old).into(), new, last_id: first.last_id })
    }

    fn reader(self, filter: Filter) -> Reader {
        let old = Snapshot::from(self.old);
        let mut reader = Reader::of_all_shards(filter, &old);
        if let Some(new) = self.new {
            reader.continue_window(&new.into(), self.last_id);
        }
        reader
    }
}

impl From<&Snapshot> for StoredSnapshot {
    fn from(snapshot: &Snapshot) -> StoredSnapshot {
        StoredSnapshot {
            id_before: snapshot.id_before,
            visible: snapshot.visible.clone(),
            at: snapshot.at,
            incarnation: snapshot.incarnation.into(),
        }
    }
}

impl From<StoredSnapshot> for Snapshot {
    fn from(stored: StoredSnapshot) -> Snapshot {
        let StoredSnapshot { id_before, visible, at, incarnation } = stored;
        Snapshot { id_before, visible, at, incarnation: incarnation.into() }
    }
}
