//! A database with many events, and a server on it.

use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::PgPool;

use crate::Outcome;
use crate::installation::{Installation, Site};

/// Bounds the wait for the trending scores of all events.
const SCORED_WITHIN: Duration = Duration::from_secs(180);

pub(super) struct Fixture(Installation);

impl Fixture {
    pub(super) async fn new(pillarbox: &Path, events: u64) -> Outcome<Fixture> {
        let site = Site::new(pillarbox).await?;
        fill(&site.db, events).await?;
        let fixture = Fixture(site.serve(pillarbox, "", &["--roles", "api,maintain"]).await?);
        wait_for_scores(&fixture.0.site.db).await?;
        Ok(fixture)
    }

    pub(super) fn address(&self) -> &str {
        &self.0.server.address
    }

    /// Stops the server and drops the database. Returns the peak memory of the server in MiB.
    pub(super) async fn end(self) -> Outcome<f64> {
        self.0.end().await
    }
}

/// Waits until the server on this database has computed the trending scores of all events.
pub(crate) async fn wait_for_scores(db: &PgPool) -> Outcome<()> {
    let began = Instant::now();
    while began.elapsed() < SCORED_WITHIN {
        let query = "select exists (select from pillarbox_events.trending_epoch)";
        if sqlx::query_scalar(query).fetch_one(db).await? {
            eprintln!("scored after {:.1} s", began.elapsed().as_secs_f64());
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Err("the events were not scored in time".into())
}

/// Inserts published events in 100 cities and 10 categories, one per minute, each with some of 1,000 words.
pub(crate) async fn fill(db: &PgPool, events: u64) -> Outcome<()> {
    const PART: u64 = 100_000;
    for first in (1..=events).step_by(PART as usize) {
        eprintln!("filling: {first} of {events}");
        sqlx::query(
            "insert into pillarbox_events.event (id, owner_id, title, description, city, city_norm, category, category_norm,
                 start_time, end_time, time_zone, capacity, status, active_participants, count_version, cover_image_ids,
                 published_at, created_at, updated_at)
             select gen_random_uuid(), gen_random_uuid(), 'Event ' || n || ' about word' || n % 1000,
                 'With word' || n % 777 || ', and some more to read: ' || repeat('lorem ipsum ', 20),
                 'City ' || n % 100, 'city ' || n % 100, 'Kind ' || n / 100 % 10, 'kind ' || n / 100 % 10,
                 now() + interval '1 day' + n * interval '1 minute', now() + interval '1 day' + n * interval '1 minute' + interval '2 hours',
                 'UTC', 100, 'published', n % 100, 1, '{}', now() - n % 1000 * interval '1 minute', now(), now()
             from generate_series($1::bigint, $2::bigint) as n",
        )
        .bind(first as i64)
        .bind((first + PART - 1).min(events) as i64)
        .execute(db)
        .await?;
    }
    sqlx::query("vacuum analyze pillarbox_events.event").execute(db).await?;
    Ok(())
}
