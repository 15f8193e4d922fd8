//! What came of messages cannot be kept at once.

use serde_json::json;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::Receiver;

use crate::hub_delivery::{post, subscribe};
use crate::hub_world::{World, until_outcome};

const REFUSALS: i64 = 2;

/// The next times that attempts are to be kept, PostgreSQL says this.
async fn refuse_attempts(db: &PgPool, code: &str) {
    // A sequence counts what is rolled back, too.
    let query = format!(
        "create sequence if not exists asked; select setval('asked', 1, false);
         create or replace function refuse() returns trigger language plpgsql as $$
         begin
             if nextval('public.asked') <= {REFUSALS} then
                 raise exception 'refused' using errcode = '{code}';
             end if;
             return null;
         end $$;
         create or replace trigger refuse before insert on pillarbox_hub.attempt
         for each statement execute function refuse()"
    );
    sqlx::raw_sql(AssertSqlSafe(query)).execute(db).await.unwrap();
}

#[tokio::test]
async fn what_may_pass_is_kept_later_and_what_never_will_is_sent_again() {
    let world = World::start().await;
    let (db, manager) = (world.database.pool(), &world.manager);
    let receiver = Receiver::start().await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let for_good = ["22003", "23514", "42501"];
    for code in
        ["08006", "25006", "40001", "40P01", "53100", "53200", "55P03", "57014", "57P01"].iter().chain(&for_good)
    {
        refuse_attempts(db, code).await;
        let event = post(manager, "test.posted", json!({ "code": code }), Some("lane")).await;
        until_outcome(manager, &event, &subscriber, "delivered").await;
        let asked: i64 = sqlx::query_scalar("select last_value from asked").fetch_one(db).await.unwrap();
        assert!(asked > REFUSALS, "{code} was said");
        let sent = receiver.received().iter().filter(|received| received.json()["code"] == *code).count();
        assert_eq!(sent, if for_good.contains(code) { 3 } else { 1 }, "{code}");
    }
    world.app.stop().await;
}
