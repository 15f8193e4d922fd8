//! The directory of recipients, and aggregate types that operators add and delete.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{TestApp, TestDatabase};
use uuid::Uuid;

use super::fixture::{count, put_recipient, users, wait_for_inbox};
use crate::hub::fixture::error_pointers;
use crate::support::{caller, collect_pages, text};

#[tokio::test]
async fn recipients_are_put_listed_and_removed_and_a_repeat_changes_nothing() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let (manager, user) = (caller(&app, "manage", "main").await, users(3));
    for (aggregate, user) in
        [("RESTAURANT/5", user[0]), ("RESTAURANT/all", user[0]), ("RESTAURANT/-3", user[0]), ("RESTAURANT/-7", user[1])]
    {
        for _ in 0..2 {
            assert_eq!(put_recipient(&manager, aggregate, user).await.status, 204);
        }
    }
    put_recipient(&manager, "COURIER/5", user[0]).await.assert_problem(422, "validation-failed");
    let malformed = put_recipient(&manager, "RESTAURANT/x", user[0]).await;
    malformed.assert_problem(400, "malformed-path");
    assert_eq!(malformed.json()["errors"][0]["pointer"], "/aggregate", "{malformed:?}");
    let listed = async |query: &str| collect_pages(&manager, &format!("/notify/v1/recipients?limit=1{query}")).await;
    let all = listed("").await;
    let row = |aggregate_id: Option<i64>, user: Uuid| {
        let mut row = json!({"aggregate_type": "RESTAURANT", "user_id": user});
        if let Some(id) = aggregate_id {
            row["aggregate_id"] = json!(id);
        }
        row
    };
    assert_eq!(all, [row(None, user[0]), row(Some(-3), user[0]), row(Some(5), user[0]), row(Some(-7), user[1])]);
    assert_eq!(listed(&format!("&user_id={}", user[1])).await, [row(Some(-7), user[1])]);
    assert_eq!(listed("&aggregate_type=RESTAURANT&aggregate_id=5").await, [row(Some(5), user[0])]);
    assert_eq!(listed("&aggregate_type=ADMIN").await, [Value::Null; 0]);
    let path = format!("/notify/v1/recipients/RESTAURANT/all/{}", user[0]);
    for _ in 0..2 {
        assert_eq!(manager.send(Method::DELETE, &path, None).await.status, 204);
    }
    assert_eq!(listed("").await.len(), 3);
    app.stop().await;
}

#[tokio::test]
async fn ten_thousand_recipients_are_imported_at_once_and_errors_name_their_rows() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let manager = caller(&app, "manage", "main").await;
    let row = |number: i64| json!({"aggregate_type": "CUSTOMER", "aggregate_id": number, "user_id": Uuid::now_v7()});
    let rows: Vec<Value> = (0..10_000).map(row).collect();
    let import = async |rows: &[Value]| manager.post("/notify/v1/recipients/import", json!({"recipients": rows})).await;
    assert_eq!(import(&rows).await.json(), json!({"rows": 10_000, "added": 10_000}));
    assert_eq!(import(&rows).await.json(), json!({"rows": 10_000, "added": 0}), "a repeat changes nothing");
    let mut more = rows[..3].to_vec();
    more[1]["aggregate_type"] = json!("COURIER");
    more[2]["email"] = json!("no address");
    more.push(row(99_999));
    let refused = import(&more).await;
    assert_eq!(
        (refused.status, error_pointers(&refused)),
        (422, vec!["/recipients/1/aggregate_type".into(), "/recipients/2/email".into()])
    );
    let recipients = "select count(*) from pillarbox_notify.recipient";
    assert_eq!(count(db, recipients).await, 10_000, "all rows or none");
    let too_many: Vec<Value> =
        (0..10_001).map(|n| json!({"aggregate_type": "A", "aggregate_id": n, "user_id": Uuid::nil()})).collect();
    import(&too_many).await.assert_problem(422, "validation-failed");

    // With contacts of users of another issuer. A repeated import replaces them.
    let mut with_contact = rows[0].clone();
    for (name, locale) in [("Ada", "pt-BR"), ("Ada L.", "en")] {
        for (field, value) in [("email", "ada@example.org"), ("name", name), ("locale", locale), ("tenant", "acme")] {
            with_contact[field] = json!(value);
        }
        assert_eq!(import(&[with_contact.clone()]).await.status, 200);
    }
    // Without some of the fields, those of the former import remain.
    for field in ["email", "locale"] {
        with_contact.as_object_mut().unwrap().remove(field);
    }
    assert_eq!(import(&[with_contact.clone()]).await.status, 200);
    let contact: (Uuid, String, String, String, String) =
        sqlx::query_as("select user_id, email, name, locale, tenant from pillarbox_notify.contact")
            .fetch_one(db)
            .await
            .unwrap();
    let expected = ("ada@example.org".to_owned(), "Ada L.".to_owned(), "en".to_owned(), "acme".to_owned());
    assert_eq!(
        contact,
        (text(&with_contact["user_id"]).parse().unwrap(), expected.0, expected.1, expected.2, expected.3)
    );
    app.stop().await;
}

#[tokio::test]
async fn an_added_type_works_without_a_restart_and_one_with_recipients_is_not_deleted() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app, user) = (database.pool(), TestApp::start(&database).await, Uuid::now_v7());
    let admin = app.admin();
    let add = async |name: &str| admin.post("/notify/v1/aggregate-types", json!({"name": name})).await;
    for name in ["", "courier", "2ND", "A B", "MAIL", "PEOPLE"] {
        add(name).await.assert_problem(422, "validation-failed");
    }
    assert_eq!((add("COURIER").await.status, add("COURIER").await.status), (201, 200));
    let listed = admin.get("/notify/v1/aggregate-types").await.json();
    assert_eq!(listed["items"][2], json!({"name": "COURIER", "listener": "notify.courier"}));
    assert_eq!(put_recipient(&admin, "COURIER/7", user).await.status, 204);
    let post = "select pillarbox.notify('SHIFT_STARTED', 'COURIER', 7, '{}')";
    sqlx::query(post).execute(db).await.unwrap();
    wait_for_inbox(db, user, &["SHIFT_STARTED"]).await;

    admin.delete("/notify/v1/aggregate-types/COURIER").await.assert_problem(409, "aggregate-type-in-use");
    sqlx::query(post).execute(db).await.unwrap();
    let path = format!("/notify/v1/recipients/COURIER/7/{user}");
    assert_eq!(admin.send(Method::DELETE, &path, None).await.status, 204);
    assert_eq!(admin.delete("/notify/v1/aggregate-types/COURIER").await.status, 204);
    admin.delete("/notify/v1/aggregate-types/COURIER").await.assert_problem(404, "aggregate-type-not-found");
    let refused = sqlx::query(post).execute(db).await.unwrap_err().to_string();
    assert!(refused.contains("COURIER"), "{refused}");
    app.stop().await;
}

#[tokio::test]
async fn an_import_reports_all_errors_of_its_rows_and_what_it_ignores() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let manager = caller(&app, "manage", "main").await;
    let import = async |rows: Value| manager.post("/notify/v1/recipients/import", json!({"recipients": rows})).await;
    let row = || json!({"aggregate_type": "CUSTOMER", "user_id": Uuid::now_v7()});
    let with = |fields: Value| {
        let mut row = row();
        fields.as_object().unwrap().iter().for_each(|(name, value)| row[name] = value.clone());
        row
    };
    let refused = import(json!([
        with(json!({"user_id": "x", "aggregate_type": "COURIER", "tenant": "NOT A TENANT", "email": "no address"})),
        with(json!({"color": 1})),
        7,
        {"aggregate_id": "5"},
        row(),
        with(json!({"locale": "?"})),
    ]))
    .await;
    let mut pointers = error_pointers(&refused);
    pointers.sort();
    let expected = [
        "0/aggregate_type",
        "0/email",
        "0/tenant",
        "0/user_id",
        "1/color",
        "2",
        "3/aggregate_id",
        "3/aggregate_type",
        "3/user_id",
        "5/locale",
    ];
    assert_eq!(
        (refused.status, pointers),
        (422, expected.map(|at| format!("/recipients/{at}")).to_vec()),
        "{refused:?}"
    );
    let many = import((0..150).map(|_| with(json!({"email": "no address"}))).collect()).await;
    let errors = many.json()["errors"].as_array().unwrap().clone();
    assert_eq!((errors.len(), text(&errors[99]["pointer"])), (101, "/recipients/99/email"));
    assert_eq!(text(&errors[100]["detail"]), "has 50 more errors that are not listed");

    let user = Uuid::now_v7();
    let account =
        "insert into pillarbox_notify.contact (user_id, email, name, version) values ($1, 'ada@example.org', 'Ada', 1)";
    sqlx::query(account).bind(user).execute(db).await.unwrap();
    let imported = import(json!([
        with(json!({"email": "eve@example.org"})),
        with(json!({"user_id": user, "email": "eve@example.org"})),
        with(json!({"user_id": user, "aggregate_id": 7, "tenant": "acme"})),
    ]))
    .await;
    let ignored =
        json!([{"pointer": "/recipients/1", "detail": "email, name and locale come from the user's account"}]);
    assert_eq!(imported.json(), json!({"rows": 3, "added": 3, "ignored": ignored}));
    let stored = "select email || ' ' || tenant from pillarbox_notify.contact where user_id = $1";
    let stored: String = sqlx::query_scalar(stored).bind(user).fetch_one(db).await.unwrap();
    assert_eq!(stored, "ada@example.org acme");
    let large = import(json!([with(json!({"name": "x".repeat(1_100_000)}))])).await;
    large.assert_problem(413, "body-too-large");
    assert!(text(&large.json()["detail"]).contains("split a list or an import into several requests"), "{large:?}");
    app.stop().await;
}
