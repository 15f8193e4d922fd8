//! What the hub forgets, and what it must not.

use std::collections::BTreeSet;

use pillarbox::settings::Role;
use sqlx::PgPool;
use testkit::{TestApp, drain};

use crate::hub_delivery::{PATIENCE, caller};
use crate::hub_people::{attempt, bury, make_message, post_event, start, subscriber};

async fn found(db: &PgPool, query: &'static str) -> BTreeSet<i64> {
    sqlx::query_scalar(query).fetch_all(db).await.unwrap().into_iter().collect()
}

#[tokio::test]
async fn what_is_old_goes_but_not_what_waits() {
    let (database, app) = start().await;
    let db = database.pool();
    let manager = caller(&app, "manage", "acme").await;
    let (served, waiting) = (subscriber(&manager, "served").await, subscriber(&manager, "waiting").await);
    app.stop().await;
    // Of each: 1 is old and settled, 2 is old and a lane waits for it, 3 is of now.
    let event = post_event(db, "acme", "order.paid", "{}").await;
    for (n, subscriber) in [(1, served), (2, waiting), (3, served)] {
        make_message(db, n, subscriber, event).await;
        attempt(db, subscriber, n, 1, if n == 3 { "delivered" } else { "dead" }, 200).await;
        bury(db, "acme", subscriber, n, (event, "order.paid"), "exhausted").await;
    }
    sqlx::raw_sql(
        "update pillarbox_hub.message set at = at - interval '100 days' where n in (1, 2);
         update pillarbox_hub.attempt set at = at - interval '100 days' where n in (1, 2);
         update pillarbox_hub.dead_letter set moved_to_dlq_at = moved_to_dlq_at - interval '100 days' where n in (1, 2)",
    )
    .execute(db)
    .await
    .unwrap();
    let passed = "insert into pillarbox_hub.position (subscriber, n, at) values ($1, 3, now()), ($2, 3, now())";
    sqlx::query(passed).bind(served).bind(waiting).execute(db).await.unwrap();
    let blocked = "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, again) values ($1, 2, 'k', 4, null, false)";
    sqlx::query(blocked).bind(waiting).execute(db).await.unwrap();

    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    let dead_letters = "select n from pillarbox_hub.dead_letter";
    drain("the old dead letter is gone", PATIENCE, async || found(db, dead_letters).await == BTreeSet::from([2, 3]))
        .await;
    let (messages, attempts) = ("select n from pillarbox_hub.message", "select n from pillarbox_hub.attempt");
    assert_eq!(found(db, messages).await, BTreeSet::from([1, 2, 3]), "as long as an older one is not settled");
    assert_eq!(found(db, attempts).await, BTreeSet::from([1, 2, 3]));
    maintaining.stop().await;

    sqlx::raw_sql("delete from pillarbox_hub.lane").execute(db).await.unwrap();
    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    drain("all that is old is gone", PATIENCE, async || {
        let mut left = Vec::new();
        for query in [dead_letters, messages, attempts] {
            left.push(found(db, query).await);
        }
        if left.iter().all(|left| *left == BTreeSet::from([3])) { Ok(()) } else { Err(left) }
    })
    .await;
    maintaining.stop().await;
}
