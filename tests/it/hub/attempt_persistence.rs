//! PostgreSQL rejects the attempt results that the dispatcher saves.

use serde_json::json;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::Receiver;

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_outcome};

const REFUSALS: i64 = 2;

/// Makes the next inserts of attempts fail with this SQLSTATE.
async fn refuse_attempts(db: &PgPool, code: &str) {
    // A sequence also counts inserts that are rolled back.
    let query = format!(
        "create sequence if not exists insert_count; select setval('insert_count', 1, false);
         create or replace function refuse() returns trigger language plpgsql as $$
         begin
             if nextval('public.insert_count') <= {REFUSALS} then
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
async fn transient_errors_retry_the_save_and_permanent_ones_resend_the_message() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    let receiver = Receiver::start().await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let permanent = ["22003", "23514", "42501"];
    for code in
        ["08006", "25006", "40001", "40P01", "53100", "53200", "55P03", "57014", "57P01"].iter().chain(&permanent)
    {
        refuse_attempts(db, code).await;
        let event = post(manager, "test.posted", json!({ "code": code }), Some("lane")).await;
        wait_for_outcome(manager, &event, &subscriber, "delivered").await;
        let inserts: i64 = sqlx::query_scalar("select last_value from insert_count").fetch_one(db).await.unwrap();
        assert!(inserts > REFUSALS, "{code} was raised");
        let sent = receiver.received().iter().filter(|received| received.json()["code"] == *code).count();
        assert_eq!(sent, if permanent.contains(code) { 3 } else { 1 }, "{code}");
    }
    fixture.app.stop().await;
}
