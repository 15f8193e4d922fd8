//! Questions that many ask at once, asked of the database once: while one is under way, those that come gather for the
//! next. So each is answered by a look that began after it came, and a hot event costs one small query at a time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kit::batch::{Failure, Handler};
use kit::page::ReadyPage;
use mailbox::own::OwnConnection;
use sqlx::PgPool;
use uuid::Uuid;

use crate::cache::{Cache, Copy, Wanted};
use crate::domain::Event;
use crate::store::{event as store, feed};
use crate::view::EventView;

const EVENT_TTL: Duration = Duration::from_secs(300);

/// An event for who asked.
#[derive(Debug, Clone)]
pub(crate) enum Seen {
    /// For its owner alone; never copied.
    Hidden(Box<Event>),
    /// For all: its version, its count, and the ready answer.
    Public { version: i64, active_participants: i32, body: Bytes },
}

/// Reads single events.
pub(crate) struct Details {
    pub(crate) db: PgPool,
    pub(crate) cache: Cache,
}

impl Handler for Details {
    type Item = Uuid;
    type Answer = Option<Seen>;
    type Error = sqlx::Error;

    const GATHERS: bool = true;

    async fn run(&self, items: &[Uuid]) -> Result<Vec<Option<Seen>>, Failure<sqlx::Error>> {
        let seen = self.look(items).await.map_err(Failure::Whole)?;
        Ok(items.iter().map(|id| seen.get(id).cloned()).collect())
    }
}

impl Details {
    async fn look(&self, items: &[Uuid]) -> sqlx::Result<HashMap<Uuid, Seen>> {
        let ids: Vec<Uuid> = items.iter().copied().collect::<HashSet<_>>().into_iter().collect();
        let outlines = store::outlines(&mut *self.db.acquire().await?, &ids).await?;
        let (drafts, public): (Vec<_>, Vec<_>) = outlines.into_iter().partition(|outline| !outline.is_public);
        let wanted: Vec<Wanted> =
            public.iter().map(|event| wanted(event.id, event.version, event.active_participants)).collect();
        let copies = self.cache.get_all(&wanted).await;
        let (mut seen, mut missing) = (HashMap::new(), drafts.iter().map(|draft| draft.id).collect::<Vec<_>>());
        for (outline, copy) in public.into_iter().zip(copies) {
            let (version, active_participants) = (outline.version, outline.active_participants);
            match copy {
                Some(copy) => {
                    seen.insert(outline.id, Seen::Public { version, active_participants, body: copy.body.clone() });
                }
                None => missing.push(outline.id),
            }
        }
        if missing.is_empty() {
            return Ok(seen);
        }
        // The connection goes back before anything else is done.
        let found = store::find_all(&mut *self.db.acquire().await?, &missing).await?;
        let mut copies = Vec::new();
        for event in found {
            let id = event.id;
            let (ready, copy) = self.made_ready(event);
            seen.insert(id, ready);
            copies.extend(copy);
        }
        self.cache.put_all(copies).await;
        Ok(seen)
    }

    /// With its copy, tagged by what this very row says, so a change meanwhile makes it useless, not wrong.
    fn made_ready(&self, event: Event) -> (Seen, Option<(Wanted, Arc<Copy>)>) {
        if !event.is_public() {
            return (Seen::Hidden(Box::new(event)), None);
        }
        let (version, active_participants) = (event.version, event.active_participants);
        let wanted = wanted(event.id, version, active_participants);
        let body = Bytes::from(EventView::from(event).to_json());
        let copy = self.cache.copy(wanted.tag.clone(), ReadyPage { body: body.clone(), next_cursor: None });
        (Seen::Public { version, active_participants, body }, Some((wanted, Arc::new(copy))))
    }
}

fn wanted(id: Uuid, version: i64, active_participants: i32) -> Wanted {
    Wanted { key: format!("event:{id}"), tag: format!("{version}.{active_participants}"), ttl: EVENT_TTL }
}

/// Reads what grows when a feed, or the cities, have changed.
pub(crate) struct Generations(OwnConnection);

impl Generations {
    pub(crate) fn new(db: PgPool) -> Generations {
        Generations(OwnConnection::new(db))
    }

    async fn look(&self) -> sqlx::Result<(i64, i64)> {
        let mut held = self.0.hold().await?;
        let found = feed::generations(held.connection()).await;
        held.put_back(&found).await;
        found
    }
}

impl Handler for Generations {
    type Item = ();
    type Answer = (i64, i64);
    type Error = sqlx::Error;

    const GATHERS: bool = true;

    async fn run(&self, items: &[()]) -> Result<Vec<(i64, i64)>, Failure<sqlx::Error>> {
        let found = match self.look().await {
            Ok(found) => found,
            // The connection may have ended meanwhile; the next is another.
            Err(_) => self.look().await.map_err(Failure::Whole)?,
        };
        Ok(vec![found; items.len()])
    }
}
