//! Events get another owner, and those of deleted accounts are closed.

use contracts::identity::{ACCOUNT_DELETED, SOURCE};
use http_kit::auth::Role;
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{
    Fixture, create_event, event_id, event_path, meetup, meetup_with, new_user, patch_event, post_action, publish_event,
};
use crate::joins::fixture::{moderate, post_join_action};
use crate::mail::fixture::post_raw_from;
use crate::notifications::fixture::wait_for_inbox;
use crate::support::{DEADLINE, text};

async fn offer(caller: &Client, event: &Value, body: Value) -> testkit::Response {
    caller.send(Method::POST, &format!("{}/handover", event_path(event)), Some(body)).await
}

#[tokio::test]
async fn an_event_belongs_to_the_user_who_accepts_it_also_in_the_joins_service() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let (owner, stranger, heir) = (new_user(&app), new_user(&app), Uuid::now_v7());
    let heir_client = app.user(heir, None);
    let event = publish_event(&owner, meetup()).await;
    post_action(&heir_client, &event, "handover/accept").await.assert_problem(404, "not-offered");
    offer(&stranger, &event, json!({"user_id": heir})).await.assert_problem(403, "forbidden");
    assert_eq!(offer(&owner, &event, json!({"user_id": heir})).await.status, 204);
    assert_eq!(offer(&owner, &event, json!({"user_id": event["owner_id"]})).await.status, 204);
    post_action(&heir_client, &event, "handover/accept").await.assert_problem(404, "not-offered");
    assert_eq!(offer(&owner, &event, json!({"user_id": heir})).await.status, 204);
    post_action(&stranger, &event, "handover/accept").await.assert_problem(404, "not-offered");
    let accepted = post_action(&heir_client, &event, "handover/accept").await;
    assert_eq!((accepted.status, &accepted.json()["owner_id"]), (200, &json!(heir)), "{accepted:?}");
    post_action(&heir_client, &event, "handover/accept").await.assert_problem(404, "not-offered");

    patch_event(&owner, &event, json!({"city": "Bern"})).await.assert_problem(403, "forbidden");
    assert_eq!(patch_event(&heir_client, &event, json!({"city": "Bern"})).await.status, 200);
    let history = heir_client.get(&format!("{}/history", event_path(&event))).await.json();
    let last = &history["items"][2];
    let reason = format!("Handed over by user:{}.", text(&event["owner_id"]));
    assert_eq!((text(&last["actor"]), text(&last["reason"])), (&*format!("user:{heir}"), &*reason), "{history}");
    eventually("the new owner is the organizer", DEADLINE, async || {
        let ban = json!({"user_id": Uuid::now_v7()});
        let (new, old) = (
            moderate(&heir_client, event_id(&event), "ban", ban.clone()).await.status,
            moderate(&owner, event_id(&event), "ban", ban).await.status,
        );
        if (new, old) == (200, 403) { Ok(()) } else { Err((new, old)) }
    })
    .await;
    let owners = "select payload->>'owner_id' from pillarbox.log where topic = 'event.updated'";
    let owners: Vec<String> = sqlx::query_scalar(owners).fetch_all(db).await.unwrap();
    assert_eq!(owners, [heir.to_string(), heir.to_string()]);
    app.stop().await;
}

#[tokio::test]
async fn an_admin_offers_an_event_with_a_reason_and_a_canceled_one_is_not_handed_over() {
    let fixture = Fixture::start().await;
    let (heir, admin) = (Uuid::now_v7(), fixture.app.user(Uuid::now_v7(), Some(Role::Admin)));
    let event = create_event(&fixture.owner, meetup()).await;
    offer(&admin, &event, json!({"user_id": heir})).await.assert_problem(422, "validation-failed");
    assert_eq!(offer(&admin, &event, json!({"user_id": heir, "reason": "The owner has left."})).await.status, 204);
    let canceled = create_event(&fixture.owner, meetup()).await;
    assert_eq!(post_action(&fixture.owner, &canceled, "cancel").await.status, 200);
    offer(&fixture.owner, &canceled, json!({"user_id": heir})).await.assert_problem(409, "transition-refused");
    let heir = fixture.app.user(heir, None);
    assert_eq!(post_action(&heir, &event, "handover/accept").await.status, 200);
    assert_eq!(heir.get(&event_path(&event)).await.status, 200, "a draft is visible to its owner");
    fixture.owner.get(&event_path(&event)).await.assert_problem(404, "event-not-found");
    fixture.app.stop().await;
}

#[tokio::test]
async fn events_of_a_deleted_account_are_canceled_and_drafts_deleted_in_steps_and_past_ones_stay() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let (owner, heir, guest) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    let client = app.user(owner, None);
    let joined = publish_event(&client, meetup()).await;
    eventually("the guest has joined", DEADLINE, async || {
        post_join_action(&app.user(guest, None), event_id(&joined), "join").await.status == 201
    })
    .await;
    let past = publish_event(&client, meetup_with(json!({"title": "Past"}))).await;
    let given = publish_event(&client, meetup_with(json!({"title": "Given"}))).await;
    let draft = create_event(&client, meetup_with(json!({"title": "Draft"}))).await;
    let ended = "update pillarbox_events.event set start_time = now() - interval '2 hours', end_time = now() - interval '1 hour'
                 where title = 'Past'";
    sqlx::query(ended).execute(db).await.unwrap();
    assert_eq!(offer(&client, &given, json!({"user_id": heir})).await.status, 204);
    assert_eq!(post_action(&app.user(heir, None), &given, "handover/accept").await.status, 200);
    // More than one step.
    let more = "insert into pillarbox_events.event (id, owner_id, title, description, city, city_norm, category,
                    category_norm, start_time, end_time, time_zone, capacity, status, cover_image_ids, published_at,
                    created_at, updated_at)
                select gen_random_uuid(), $1, 'More', '', 'Bern', 'bern', 'tech', 'tech', now() + interval '1 day',
                    now() + interval '2 days', 'UTC', 0, 'published', '{}', now(), now(), now()
                from generate_series(1, 70)";
    sqlx::query(more).bind(owner).execute(db).await.unwrap();

    post_raw_from(db, SOURCE, ACCOUNT_DELETED, &json!({"user_id": owner}).to_string()).await;
    wait_for_inbox(db, guest, &["join.confirmed", "event.canceled"]).await;
    let open = "select count(*) from pillarbox_events.event where owner_id = $1 and status <> 'canceled'";
    eventually("only the past event is left", DEADLINE, async || {
        match sqlx::query_scalar::<_, i64>(open).bind(owner).fetch_one(db).await.unwrap() {
            1 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let status = async |event: &Value| app.anonymous().get(&event_path(event)).await.json()["status"].clone();
    assert_eq!(status(&joined).await, "canceled");
    assert_eq!((status(&past).await, status(&given).await), (json!("published"), json!("published")));
    app.admin().get(&event_path(&draft)).await.assert_problem(404, "event-not-found");
    let history = app.admin().get(&format!("{}/history", event_path(&joined))).await.json();
    assert_eq!(text(&history["items"][2]["reason"]), "The account of the organizer was deleted.", "{history}");
    // An event that is created with a token that has not expired yet is found later.
    let late = publish_event(&client, meetup_with(json!({"title": "Late"}))).await;
    let again = "update pillarbox_events.deleted_owner
                 set due_at = now(), deleted_at = now() - interval '10 minutes' where user_id = $1";
    sqlx::query(again).bind(owner).execute(db).await.unwrap();
    eventually("the late event is canceled", DEADLINE, async || status(&late).await == "canceled").await;
    eventually("nothing is left to do", DEADLINE, async || {
        let left = "select count(*) from pillarbox_events.deleted_owner";
        sqlx::query_scalar::<_, i64>(left).fetch_one(db).await.unwrap() == 0
    })
    .await;
    app.stop().await;
}
