//! What the proofs of joins stand on: replicas of the service, events as the events service would tell of them, and a look at
//! the tables that shares no code with the service.

use std::time::Duration;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use contracts::events::{self, EventChanged, EventStatus};
use mailbox::database::migrations;
use mailbox::post::{Post, Source, post};
use pillarbox::settings::Settings;
use serde_json::value::to_raw_value;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::{Answer, Client, TestApp, TestDatabase, drain};
use uuid::Uuid;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct World {
    pub(crate) database: TestDatabase,
    pub(crate) apps: Vec<TestApp>,
    pub(crate) owner: Uuid,
}

impl World {
    /// So many replicas of the service on one database.
    pub(crate) async fn start(replicas: usize) -> World {
        World::start_with(replicas, |_| {}).await
    }

    pub(crate) async fn start_with(replicas: usize, change: impl Fn(&mut Settings)) -> World {
        let database = TestDatabase::new(&migrations()).await;
        let mut apps = Vec::new();
        for _ in 0..replicas {
            apps.push(TestApp::start_with(&database, &change).await);
        }
        World { database, apps, owner: Uuid::now_v7() }
    }

    pub(crate) fn db(&self) -> &PgPool {
        self.database.pool()
    }

    /// A published event of the owner's that the service knows of.
    pub(crate) async fn event(&self, capacity: i32) -> EventChanged {
        let event = published(self.owner, capacity);
        self.tell(&event).await;
        self.until_known(&event).await;
        event
    }

    /// Says what became of an event, as the events service does.
    pub(crate) async fn tell(&self, event: &EventChanged) {
        tell(self.db(), event).await;
    }

    pub(crate) async fn until_known(&self, event: &EventChanged) {
        until_known(self.db(), event).await;
    }

    pub(crate) fn user(&self, id: Uuid) -> Client {
        // Any replica: always the same for one user.
        self.apps[(id.as_u128() % self.apps.len() as u128) as usize].user(id, None)
    }

    pub(crate) fn organizer(&self) -> Client {
        self.user(self.owner)
    }

    pub(crate) async fn join(&self, event: &EventChanged, user: Uuid) -> Answer {
        act(&self.user(user), event.event_id, "join").await
    }

    /// Lets so many new people join, one after the other.
    pub(crate) async fn fill(&self, event: &EventChanged, count: usize) -> Vec<Uuid> {
        let mut users = Vec::new();
        for _ in 0..count {
            let user = Uuid::now_v7();
            let joined = self.join(event, user).await;
            assert_eq!(joined.status, 201, "{joined:?}");
            users.push(user);
        }
        users
    }

    pub(crate) async fn cancel(&self, event: &EventChanged, user: Uuid) -> Answer {
        act(&self.user(user), event.event_id, "cancel").await
    }

    pub(crate) async fn status(&self, event: &EventChanged, user: Uuid) -> String {
        let query = "select status::text from pillarbox_joins.joins where event_id = $1 and user_id = $2";
        sqlx::query_scalar(query).bind(event.event_id).bind(user).fetch_one(self.db()).await.unwrap()
    }

    /// Active, waitlisted.
    pub(crate) async fn counts(&self, event: &EventChanged) -> (i32, i32) {
        let query = "select active_count, waitlist_count from pillarbox_joins.event_capacity where event_id = $1";
        sqlx::query_as(query).bind(event.event_id).fetch_one(self.db()).await.unwrap()
    }

    /// The seqs of who moved up, in that order.
    pub(crate) async fn promoted(&self, event: &EventChanged) -> Vec<i64> {
        let query =
            "select seq from pillarbox_joins.history where event_id = $1 and action = 'promoted' order by version";
        sqlx::query_scalar(query).bind(event.event_id).fetch_all(self.db()).await.unwrap()
    }

    pub(crate) async fn until_counts(&self, event: &EventChanged, wanted: (i32, i32)) {
        drain(&format!("counts are {wanted:?}"), PATIENCE, async || match self.counts(event).await {
            counts if counts == wanted => Ok(()),
            other => Err(other),
        })
        .await;
    }

    /// Topics and users of what was said of an event, in their order.
    pub(crate) async fn said(&self, event: &EventChanged) -> Vec<(String, Uuid)> {
        let query = "select topic, (payload->>'user_id')::uuid from pillarbox.log
                     where source = 'joins' and key = $1 order by id";
        sqlx::query_as(query).bind(event.event_id.to_string()).fetch_all(self.db()).await.unwrap()
    }

    pub(crate) async fn check(&self) {
        check(self.db(), &[]).await;
    }

    pub(crate) async fn stop(self) {
        for app in self.apps {
            app.stop().await;
        }
    }
}

pub(crate) fn published(owner: Uuid, capacity: i32) -> EventChanged {
    let now = Utc::now().trunc_subsecs(6);
    EventChanged {
        event_id: Uuid::now_v7(),
        version: 2,
        status: EventStatus::Published,
        owner_id: owner,
        title: "An evening".to_owned(),
        city: "Oslo".to_owned(),
        category: "music".to_owned(),
        start_time: now + TimeDelta::hours(1),
        end_time: now + TimeDelta::hours(3),
        time_zone: "Europe/Oslo".to_owned(),
        capacity,
        occurred_at: now,
    }
}

/// The same event, changed.
pub(crate) fn next(event: &EventChanged, change: impl FnOnce(&mut EventChanged)) -> EventChanged {
    let mut next = EventChanged { version: event.version + 1, ..event.clone() };
    change(&mut next);
    next
}

pub(crate) async fn tell(db: &PgPool, event: &EventChanged) {
    let topic = match event.status {
        EventStatus::Draft => events::UNPUBLISHED,
        EventStatus::Published if event.version <= 2 => events::PUBLISHED,
        EventStatus::Published => events::UPDATED,
        EventStatus::Canceled => events::CANCELED,
    };
    let message = Post::new(topic, to_raw_value(event).unwrap()).with_key(event.event_id.to_string());
    let mut tx = db.begin().await.unwrap();
    post(&mut tx, &Source::new(events::SOURCE), &message).await.unwrap();
    tx.commit().await.unwrap();
}

pub(crate) async fn until_known(db: &PgPool, event: &EventChanged) {
    drain("the news are known", PATIENCE, async || {
        let query = "select event_version from pillarbox_joins.event_capacity where event_id = $1";
        let version: Option<i64> = sqlx::query_scalar(query).bind(event.event_id).fetch_optional(db).await.unwrap();
        if version >= Some(event.version) { Ok(()) } else { Err(version) }
    })
    .await;
}

/// Under a new key.
pub(crate) async fn act(client: &Client, event: Uuid, action: &str) -> Answer {
    act_keyed(client, event, action, &Uuid::new_v4().to_string()).await
}

pub(crate) async fn act_keyed(client: &Client, event: Uuid, action: &str, key: &str) -> Answer {
    let client = client.with_header("idempotency-key", key);
    client.send(hyper::Method::POST, &format!("/join/v1/events/{event}/{action}"), None).await
}

pub(crate) async fn moderate(client: &Client, event: Uuid, action: &str, body: serde_json::Value) -> Answer {
    let client = client.with_header("idempotency-key", &Uuid::new_v4().to_string());
    client.post(&format!("/join/v1/events/{event}/{action}"), body).await
}

pub(crate) fn at(value: &serde_json::Value) -> DateTime<Utc> {
    value.as_str().unwrap_or_else(|| panic!("no time: {value}")).parse().unwrap()
}

/// What must never be, each as a query that finds it.
const VIOLATIONS: [(&str, &str); 11] = [
    (
        "counts are not what there is",
        "select e.event_id::text from pillarbox_joins.event_capacity e
         left join (select event_id, count(*) filter (where status = 'active') as active,
                           count(*) filter (where status = 'waitlisted') as waiting
                    from pillarbox_joins.joins group by event_id) j using (event_id)
         where e.active_count <> coalesce(j.active, 0) or e.waitlist_count <> coalesce(j.waiting, 0)",
    ),
    (
        "a seq is missing, or there twice",
        "select e.event_id::text from pillarbox_joins.event_capacity e
         left join (select event_id, count(*) as n, count(distinct seq) as d, min(seq) as lo, max(seq) as hi
                    from pillarbox_joins.history where action = 'joined' group by event_id) h using (event_id)
         where coalesce(h.n, 0) <> e.next_seq - 1 or coalesce(h.d, 0) <> e.next_seq - 1
            or coalesce(h.lo, 1) <> 1 or coalesce(h.hi, 0) <> e.next_seq - 1",
    ),
    (
        "somebody waits who came before somebody active",
        "select w.event_id::text from pillarbox_joins.joins w
         where w.status = 'waitlisted' and w.seq <
             (select max(a.seq) from pillarbox_joins.joins a where a.event_id = w.event_id and a.status = 'active')",
    ),
    (
        "somebody moved up before somebody who had waited longer",
        "select p.event_id::text from pillarbox_joins.history p
         join pillarbox_joins.history w on w.event_id = p.event_id and w.action = 'joined'
              and w.to_status = 'waitlisted' and w.seq < p.seq and w.version < p.version
         where p.action = 'promoted' and not exists
             (select from pillarbox_joins.history x where x.event_id = p.event_id and x.seq = w.seq
              and x.version > w.version and x.version < p.version and x.from_status = 'waitlisted')",
    ),
    (
        "the history does not lead to what there is",
        "select j.event_id::text from pillarbox_joins.joins j
         left join lateral (select to_status, seq from pillarbox_joins.history h
                            where h.event_id = j.event_id and h.user_id = j.user_id order by version desc limit 1) h on true
         where h.to_status is distinct from j.status or h.seq is distinct from j.seq",
    ),
    (
        "a step of the history does not begin where the one before ended",
        "select event_id::text from
             (select event_id, from_status, lag(to_status) over (partition by event_id, user_id order by version) as before
              from pillarbox_joins.history) h
         where from_status is distinct from before",
    ),
    (
        // Counts that are said anew may be given a version far above the last one.
        "a version has no history",
        "select e.event_id::text from pillarbox_joins.event_capacity e
         left join (select event_id, max(version) as hi,
                           bool_or(action <> 'recounted' and version <> 1 + coalesce(before, 0)) as has_gap
                    from (select *, lag(version) over (partition by event_id order by version) as before
                          from pillarbox_joins.history) h
                    group by event_id) h using (event_id)
         where e.version <> coalesce(h.hi, 0) or h.has_gap",
    ),
    (
        "a later version has an earlier time",
        "select event_id::text from
             (select event_id, at, lag(at) over (partition by event_id order by version) as before
              from pillarbox_joins.history) h
         where at < before",
    ),
    (
        "a change was not told of, or told of twice",
        "select coalesce(h.event_id::text, m.key) from pillarbox_joins.history h
         full join (select key, (payload->'counts'->>'version')::bigint as version, count(*) as n
                    from pillarbox.log where source = 'joins' and topic <> 'join.counted' group by 1, 2) m
             on m.key = h.event_id::text and m.version = h.version
         where h.event_id is null or m.key is null or m.n <> 1",
    ),
    (
        "a message has other counts than the history leads to",
        "select h.event_id::text from
             (select event_id, version,
                     sum((to_status = 'active')::int - coalesce((from_status = 'active')::int, 0)) over steps as active,
                     sum((to_status = 'waitlisted')::int - coalesce((from_status = 'waitlisted')::int, 0)) over steps as waiting
              from (select event_id, version, coalesce(to_status, 'canceled') as to_status, from_status
                    from pillarbox_joins.history) h
              window steps as (partition by event_id order by version)) h
         join pillarbox.log m on m.source = 'joins' and m.key = h.event_id::text
              and (m.payload->'counts'->>'version')::bigint = h.version
         where (m.payload->'counts'->>'active')::int <> h.active
            or (m.payload->'counts'->>'waitlisted')::int <> h.waiting",
    ),
    (
        "a message has no trace",
        "select key from pillarbox.log where source = 'joins' and topic <> 'join.counted'
         and coalesce(length(payload->>'trace_id'), 0) <> 32",
    ),
];

/// Fails if anything is that must never be. Events whose capacity was lowered may have more than that.
pub(crate) async fn check(db: &PgPool, lowered: &[Uuid]) {
    for (what, query) in VIOLATIONS {
        let found: Vec<String> = sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_all(db).await.unwrap();
        assert!(found.is_empty(), "{what}: {found:?}");
    }
    let too_full = "select event_id::text from pillarbox_joins.event_capacity
                    where capacity > 0 and active_count > capacity and event_id <> all($1)";
    let found: Vec<String> = sqlx::query_scalar(too_full).bind(lowered).fetch_all(db).await.unwrap();
    assert!(found.is_empty(), "more active than the capacity: {found:?}");
}
