//! Lanes: who works on what, and what happens when a worker stumbles or stands still.

use std::sync::Arc;
use std::time::Duration;

use mailbox::cursor::{Cursor, Kind, Start};
use mailbox::filter::{Filter, Matching};
use mailbox::work::{Item, LaneError, LaneId, Outcome, Work, Worked};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use testkit::{FaultProxy, drain};

use crate::consuming::{
    PATIENCE, Process, count, database, effects, post_numbers, quick, recorder, until_count, until_effects,
};

/// Remembers what it was given; can be held up between the doing and the keeping, as a process is that stands still.
pub(crate) struct Sink {
    pub(crate) seen: Arc<std::sync::Mutex<Vec<i64>>>,
    pub(crate) gate: Arc<tokio::sync::RwLock<()>>,
}

impl Work for Sink {
    async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        let numbers = items.iter().map(|item| item.message.payload.get().parse::<i64>().unwrap());
        self.seen.lock().unwrap().extend(numbers);
        drop(self.gate.read().await);
        Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: None })
    }
}

#[tokio::test]
async fn work_that_panics_loses_nothing() {
    struct Clumsy(Arc<std::sync::Mutex<Vec<i64>>>, bool);
    impl Work for Clumsy {
        async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
            assert!(std::mem::replace(&mut self.1, true), "the first time");
            self.0.lock().unwrap().extend(items.iter().map(|item| item.message.payload.get().parse::<i64>().unwrap()));
            Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: None })
        }
    }
    let database = database().await;
    let db = database.pool();
    let (process, seen) = (Process::idle(db), Arc::<std::sync::Mutex<Vec<i64>>>::default());
    let cursor = Cursor {
        consumer: "clumsy".to_owned(),
        kind: Kind::Relay,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    process.runtime.consume(&cursor, quick(), || Clumsy(seen.clone(), false));
    post_numbers(db, Some("k"), 1..=3).await;
    drain("all of them", PATIENCE, async || *seen.lock().unwrap() == [1, 2, 3]).await;
    process.stop().await;
}

#[tokio::test]
async fn a_paused_owner_that_wakes_late_keeps_nothing() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    let cursor = Cursor {
        consumer: "sink".to_owned(),
        kind: Kind::Relay,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    let begin = |db: &PgPool, gate: &Arc<tokio::sync::RwLock<()>>| {
        let (process, seen) = (Process::idle(db), Arc::default());
        process.runtime.consume(&cursor, quick(), || Sink { seen: Arc::clone(&seen), gate: gate.clone() });
        (process, seen)
    };
    let gate = Arc::<tokio::sync::RwLock<()>>::default();
    let held = gate.write().await;
    let (paused, paused_saw) = begin(&slow, &gate);
    post_numbers(db, Some("k"), 1..=3).await;
    drain("the first has begun", PATIENCE, async || !paused_saw.lock().unwrap().is_empty()).await;
    proxy.stall(); // neither its heartbeat nor anything else comes through
    let begun = paused_saw.lock().unwrap().clone();
    let open = Arc::default();
    let (second, second_saw) = begin(db, &open);
    drain("the second has taken over", PATIENCE, async || second_saw.lock().unwrap().len() == 3).await;
    post_numbers(db, Some("k"), [4]).await;
    drain("the second goes on", PATIENCE, async || second_saw.lock().unwrap().len() == 4).await;
    second.stop().await;
    // It wakes with everything done, and a place to keep that is long passed.
    drop(held);
    proxy.pass();
    drain("the late one is in again", PATIENCE, async || {
        let lanes = "select count(*) from pillarbox.lease where owner in (select owner from pillarbox.lane)";
        sqlx::query_scalar::<_, i64>(lanes).fetch_one(db).await.unwrap() == 16
    })
    .await;
    paused.stop().await;
    assert_eq!(*paused_saw.lock().unwrap(), begun, "nothing again, because its old place was not kept");
    let (third, third_saw) = begin(db, &open);
    post_numbers(db, Some("k"), [5]).await;
    drain("a third goes on", PATIENCE, async || !third_saw.lock().unwrap().is_empty()).await;
    third.stop().await;
    assert_eq!(*third_saw.lock().unwrap(), [5]);
}

#[tokio::test]
async fn shards_are_shared_out_evenly_and_what_a_silent_process_held_goes_on() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    let processes = [Process::start(&slow, recorder()), Process::start(db, recorder()), Process::start(db, recorder())];
    let shares = async |db: &PgPool| -> Vec<i64> {
        let query = "select count(lease.shard) from pillarbox.lane left join pillarbox.lease using (owner) group by owner order by 1";
        sqlx::query_scalar(query).fetch_all(db).await.unwrap()
    };
    drain("an even share", PATIENCE, async || match shares(db).await {
        found if found == [4, 6, 6] => Ok(()),
        other => Err(other),
    })
    .await;
    // Nobody takes from who is alive.
    let changes = async |db: &PgPool| -> i64 {
        sqlx::query_scalar("select sum(epoch)::bigint from pillarbox.lease").fetch_one(db).await.unwrap()
    };
    let settled = changes(db).await;
    for number in 0..60 {
        post_numbers(db, None, [number]).await;
        tokio::time::sleep(Duration::from_millis(50)).await; // three rounds of sharing out
    }
    assert_eq!(changes(db).await, settled);
    proxy.stall();
    drain("the others have it all", PATIENCE, async || match shares(db).await {
        found if found == [8, 8] => Ok(()),
        other => Err(other),
    })
    .await;
    post_numbers(db, None, 60..110).await;
    until_effects(db, 110).await;
    proxy.pass();
    for process in processes {
        process.stop().await;
    }
    assert_eq!(effects(db).await.len(), 110);
}

#[tokio::test]
async fn a_lane_that_joined_without_an_answer_and_joins_again_leaves_no_share_that_nobody_reads() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    // Who joins waits at a door, with its row written and not yet committed.
    sqlx::raw_sql(
        "create function wait_at_door() returns trigger language plpgsql
             as $$ begin perform pg_advisory_xact_lock_shared(7); return null; end $$;
         create trigger wait_at_door after insert on pillarbox.lane for each row execute function wait_at_door()",
    )
    .execute(db)
    .await
    .unwrap();
    let mut door = db.begin().await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(7)").execute(&mut *door).await.unwrap();
    let process = Process::start(&slow, recorder());
    drain("it is at the door", PATIENCE, async || {
        let waiting = "select exists (select from pg_locks join pg_database on pg_database.oid = database
                       where datname = current_database() and locktype = 'advisory' and not granted)";
        sqlx::query_scalar::<_, bool>(waiting).fetch_one(db).await.unwrap()
    })
    .await;
    proxy.refuse(); // it will not hear that it is in
    door.rollback().await.unwrap();
    until_count(db, "lane", 1).await;
    proxy.pass();
    post_numbers(db, None, 0..64).await;
    drain("all shards are read", Duration::from_secs(10), async || match effects(db).await.len() {
        64 => Ok(()),
        other => Err(other),
    })
    .await;
    assert_eq!(count(db, "lane").await, 1, "under its new name alone");
    process.stop().await;
}

#[tokio::test]
async fn who_is_behind_is_given_large_messages_a_few_at_a_time() {
    /// How large each batch was.
    struct Scales(Arc<std::sync::Mutex<Vec<usize>>>);
    impl Work for Scales {
        async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
            self.0.lock().unwrap().push(items.iter().map(|item| item.message.payload.get().len()).sum());
            Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: None })
        }
    }
    const BYTES: usize = 250_000;
    // 16 MiB, and perhaps a message more from each shard.
    const BATCH_BYTES_MAX: usize = 16 * 1024 * 1024 + 16 * BYTES;
    let database = database().await;
    let db = database.pool();
    let post = "select pillarbox.post('test.large', to_json(repeat('x', $1 - 2)), key => 'k' || n)
                from generate_series(1, 200) as n";
    sqlx::query(post).bind(BYTES as i32).execute(db).await.unwrap();
    let (process, weighed) = (Process::idle(db), Arc::<std::sync::Mutex<Vec<usize>>>::default());
    let cursor = Cursor {
        consumer: "scales".to_owned(),
        kind: Kind::Relay,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    process.runtime.consume(&cursor, quick(), || Scales(weighed.clone()));
    drain("all of them", PATIENCE, async || match weighed.lock().unwrap().iter().sum::<usize>() / BYTES {
        200 => Ok(()),
        other => Err(other),
    })
    .await;
    process.stop().await;
    let weighed = weighed.lock().unwrap();
    assert!(weighed.iter().all(|bytes| *bytes <= BATCH_BYTES_MAX), "{weighed:?}");
}
