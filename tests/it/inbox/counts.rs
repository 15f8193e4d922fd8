//! Lists of the inbox, reading and archiving, and the count of unread notifications.

use futures_util::future::join_all;
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};
use uuid::Uuid;

use crate::delivery::fixture::insert_in_app;
use crate::support::{collect_pages, text};

async fn post(client: &Client, path: &str) -> Value {
    let answer = client.send(Method::POST, &format!("/notify/v1/inbox/{path}"), None).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

fn numbers(items: &[Value]) -> Vec<i64> {
    items.iter().map(|item| item["seq"].as_i64().unwrap()).collect()
}

#[tokio::test]
async fn a_user_reads_and_archives_notifications_of_one_inbox_only() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let id = Uuid::now_v7();
    let insert = "insert into pillarbox_notify.contact (user_id, name, locale) values ($1, 'Ada', 'de-AT')";
    sqlx::query(insert).bind(id).execute(db).await.unwrap();
    let mut connection = db.acquire().await.unwrap();
    for number in 1..=5 {
        insert_in_app(&mut connection, id, "join.promoted", json!({"title": format!("No <{number}>")})).await;
    }
    let stranger_id = Uuid::now_v7();
    insert_in_app(&mut connection, stranger_id, "order.paid", json!({"order": 1})).await;
    drop(connection);
    let (user, stranger) = (app.user(id, None), app.user(stranger_id, None));
    let listed = async |query: &str| collect_pages(&user, &format!("/notify/v1/inbox?limit=2{query}")).await;

    let all = listed("").await;
    assert_eq!(numbers(&all), [5, 4, 3, 2, 1]);
    assert_eq!(
        text(&all[0]["title"]),
        "Ein Platz ist frei geworden, und er gehört Ihnen: Veranstaltung „No <5>“",
        "in the user's locale"
    );
    assert!(text(&all[0]["text"]).starts_with("Bei „No <5>“") && text(&all[0]["event_id"]).starts_with("evt_"));
    assert_eq!(numbers(&collect_pages(&stranger, "/notify/v1/inbox").await), [1]);
    assert_eq!(post(&user, "2/read").await, json!({"unread_count": 4, "last_seq": 5}));
    assert_eq!(post(&user, "2/read").await["unread_count"], 4, "again");
    assert_eq!(numbers(&listed("&unread=true").await), [5, 4, 3, 1]);
    assert_eq!(numbers(&listed("&unread=false").await), [2]);
    assert_eq!(post(&user, "4/archive").await["unread_count"], 3);
    assert_eq!((numbers(&listed("").await), numbers(&listed("&archived=true").await)), (vec![5, 3, 2, 1], vec![4]));
    assert_eq!(post(&user, "4/unread").await["unread_count"], 4, "it returns to the inbox");
    let read = user.post("/notify/v1/inbox/read", json!({"up_to": 4})).await.json();
    assert_eq!(read, json!({"unread_count": 1, "last_seq": 5}), "the newest one was not seen yet");
    assert_eq!(numbers(&listed("&unread=true").await), [5]);
    assert!(user.get("/notify/v1/inbox/4").await.json()["read_at"].is_string());

    stranger.send(Method::POST, "/notify/v1/inbox/2/read", None).await.assert_problem(404, "notification-not-found");
    stranger.get("/notify/v1/inbox/2").await.assert_problem(404, "notification-not-found");
    let newcomer = app.user(Uuid::now_v7(), None);
    assert_eq!(newcomer.get("/notify/v1/inbox/unread-count").await.json(), json!({"unread_count": 0, "last_seq": 0}));
    assert_eq!(newcomer.post("/notify/v1/inbox/read", json!({"up_to": 9})).await.status, 200);
    app.admin().get("/notify/v1/inbox").await.assert_problem(403, "forbidden");
    app.anonymous().get("/notify/v1/inbox/events").await.assert_problem(401, "unauthorized");
    app.stop().await;
}

#[tokio::test]
async fn the_count_of_unread_notifications_is_exact_after_racing_changes() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let id = Uuid::now_v7();
    let user = app.user(id, None);
    let insert = async |count: usize| {
        for _ in 0..count {
            let mut tx = db.begin().await.unwrap();
            insert_in_app(&mut tx, id, "order.paid", json!({})).await;
            tx.commit().await.unwrap();
        }
    };
    insert(20).await;
    let changes = (0..20).flat_map(|round: i64| {
        let paths =
            [format!("{}/read", round % 7 + 1), format!("{}/unread", round % 5 + 1), format!("{}/archive", round + 1)];
        paths.into_iter().map(async |path| drop(post(&user, &path).await))
    });
    let read_all = async {
        for up_to in [3, 9, 15] {
            let read = user.post("/notify/v1/inbox/read", json!({"up_to": up_to})).await;
            assert_eq!(read.status, 200, "{read:?}");
        }
    };
    tokio::join!(join_all(changes), read_all, insert(30), insert(30));
    let shown = user.get("/notify/v1/inbox/unread-count").await.json();
    let query = "select count(*) from pillarbox_notify.notification where user_id = $1 and read_at is null";
    let counted: i64 = sqlx::query_scalar(query).bind(id).fetch_one(db).await.unwrap();
    assert_eq!(shown, json!({"unread_count": counted, "last_seq": 80}));
    app.stop().await;
}

#[tokio::test]
async fn many_notifications_are_read_in_steps_and_once_per_idempotency_key() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let id = Uuid::now_v7();
    let insert = "with event as (
                      insert into pillarbox_notify.business_event (id, event_type, payload, at)
                      select gen_random_uuid(), 'order.paid', '{}', now() from generate_series(1, 12000) returning id
                  ), inbox as (
                      insert into pillarbox_notify.inbox (user_id, last_seq, unread) values ($1, 12000, 12000)
                  )
                  insert into pillarbox_notify.notification (event_id, user_id, channel, status, seq, created_at)
                  select id, $1, 'in_app', 'delivered', row_number() over (), now() from event";
    sqlx::query(insert).bind(id).execute(db).await.unwrap();
    let user = app.user(id, None).with_header("idempotency-key", "read-all");
    let answer = user.post("/notify/v1/inbox/read", json!({"up_to": 11_999})).await;
    assert_eq!((answer.status, answer.json()), (200, json!({"unread_count": 1, "last_seq": 12_000})));
    let transactions = "select count(distinct xmin::text) from pillarbox_notify.notification where read_at is not null";
    let transactions: i64 = sqlx::query_scalar(transactions).fetch_one(db).await.unwrap();
    assert_eq!(transactions, 3, "each locks the inbox for a short time");

    assert_eq!(post(&app.user(id, None), "7/unread").await["unread_count"], 2);
    let repeated = user.post("/notify/v1/inbox/read", json!({"up_to": 11_999})).await;
    assert_eq!((repeated.header("idempotent-replayed"), repeated.json()), ("true", answer.json()));
    assert_eq!(app.user(id, None).get("/notify/v1/inbox/unread-count").await.json()["unread_count"], 2);
    app.stop().await;
}
