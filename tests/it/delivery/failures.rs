//! A notification that cannot be rendered is retried, then dead, and delays no other.

use hyper::Method;
use server::migrations;
use testkit::{CapturedLog, TestApp, TestDatabase, eventually};

use super::fixture::{emails_of, insert_due, insert_many, insert_person, state_of, statuses, wait_for_state};
use crate::server::process::DataFolder;
use crate::support::{DEADLINE, text};

#[tokio::test]
async fn a_template_that_fails_makes_its_notification_dead_without_blocking_others() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, folder, log) = (database.pool(), DataFolder::new(), CapturedLog::start());
    std::fs::create_dir(folder.path()).unwrap();
    let write = |name: &str, source: &str| std::fs::write(folder.path().join(name), source).unwrap();
    write("notification.order_broken.en.subject", "Broken");
    write("notification.order_broken.en.txt", "Fine\n{{ payload.customer.name }}");
    write("notification.order_broken.en.html", "<p>Fine</p>");
    write("notification.order_fine.en.subject", "Order {{ payload.order }}");
    write("notification.order_fine.en.txt", "{{ payload.title }}");
    write("notification.order_fine.en.html", "<p>{{ payload.title }}</p>");
    let user = insert_person(db, "ada@example.org").await;
    let mut broken = Vec::new();
    for _ in 0..3 {
        broken.push(insert_due(db, user, "email", "order.broken", 0).await);
    }
    insert_many(db, &[user; 250], "order.paid").await;
    let fine = insert_due(db, user, "email", "order.fine", 0).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.mail.templates_dir = Some(folder.path().to_owned());
        settings.mail.retry_first_ms = 100;
        settings.mail.retry_max_ms = 200;
    })
    .await;
    wait_for_state(db, fine, "delivered").await;
    for id in &broken {
        let error = wait_for_state(db, *id, "dead").await.unwrap();
        let reason = "notification.order_broken.en.txt, line 2: undefined value: payload.customer.name";
        assert!(error.contains(reason), "{error}");
        assert_eq!(state_of(db, *id).await.2, 5);
    }
    // It is logged after the commit.
    eventually("it is logged", DEADLINE, async || log.has("WARN", "a notification is dead")).await;
    assert_eq!(statuses(db).await.get("delivered"), Some(&251));
    let emails = emails_of(db, user).await;
    assert!(emails.contains(&("Order 5".to_owned(), "Rust meetup".to_owned())), "the template of the folder is used");

    let dead = app.admin().get("/admin/v1/notifications?status=dead").await.json();
    let first = &dead["items"][2];
    assert_eq!((&first["id"], text(&first["event_type"])), (&broken[0].into(), "order.broken"), "{dead}");
    assert!(first["attempts"] == 5 && text(&first["last_error"]).contains("line 2"), "{first}");
    // The event is corrected, and the operator retries it.
    let correct = "update pillarbox_notify.business_event set payload = '{\"customer\": {\"name\": \"Ada\"}}'
                   where id = (select event_id from pillarbox_notify.notification where id = $1)";
    sqlx::query(correct).bind(broken[0]).execute(db).await.unwrap();
    let retried = app.admin().send(Method::POST, &format!("/admin/v1/notifications/{}/retry", broken[0]), None).await;
    assert_eq!(retried.status, 202, "{retried:?}");
    wait_for_state(db, broken[0], "delivered").await;
    assert!(emails_of(db, user).await.contains(&("Broken".to_owned(), "Fine\nAda".to_owned())));
    app.stop().await;
}

#[tokio::test]
async fn a_digest_that_fails_its_transaction_harms_only_its_recipient() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let types = "insert into pillarbox_notify.event_type (name, digest_minutes) values ('order.paid', 60)";
    sqlx::query(types).execute(db).await.unwrap();
    // Whatever the reason: PostgreSQL refuses the e-mails of this recipient.
    let refuse = "create function public.refuse() returns trigger language plpgsql as $$
                  begin raise exception 'refused' using errcode = 'data_exception'; end $$;
                  create trigger refuse before insert on pillarbox_notify.mail for each row
                  when (new.recipient = 'bob@example.org') execute function public.refuse()";
    sqlx::raw_sql(refuse).execute(db).await.unwrap();
    let (harmful, harmless) = (insert_person(db, "bob@example.org").await, insert_person(db, "ada@example.org").await);
    let failing = insert_due(db, harmful, "email", "order.paid", 0).await;
    insert_many(db, &[harmful; 2], "order.paid").await;
    insert_many(db, &[harmless; 3], "order.paid").await;
    let alone = insert_due(db, harmless, "email", "order.fine", 0).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.mail.retry_first_ms = 100;
        settings.mail.retry_max_ms = 200;
    })
    .await;
    wait_for_state(db, alone, "delivered").await;
    let error = wait_for_state(db, failing, "dead").await.unwrap();
    assert!(error.contains("refused"), "{error}");
    testkit::eventually("all have ended", crate::support::DEADLINE, async || match statuses(db).await {
        found if found.get("dead") == Some(&3) && found.get("delivered") == Some(&4) => Ok(()),
        other => Err(other),
    })
    .await;
    let subjects: Vec<String> = emails_of(db, harmless).await.into_iter().map(|(subject, _)| subject).collect();
    assert_eq!((subjects.len(), subjects.contains(&"Order paid (3)".to_owned())), (2, true), "{subjects:?}");
    app.stop().await;
}

#[tokio::test]
async fn a_template_with_endless_loops_fails_with_the_limit_and_neither_delays_others_nor_the_stop() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, folder) = (database.pool(), DataFolder::new());
    std::fs::create_dir(folder.path()).unwrap();
    let write = |name: &str, source: &str| std::fs::write(folder.path().join(name), source).unwrap();
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% set x = c %}\
                   {% endfor %}{% endfor %}{% endfor %}";
    write("notification.order_endless.en.subject", "Endless");
    write("notification.order_endless.en.txt", endless);
    write("notification.order_endless.en.html", "<p>Endless</p>");
    let user = insert_person(db, "ada@example.org").await;
    let heavy = insert_due(db, user, "email", "order.endless", 0).await;
    insert_many(db, &[user; 150], "order.endless").await;
    let fine = insert_due(db, user, "email", "order.paid", 0).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.mail.templates_dir = Some(folder.path().to_owned());
        settings.mail.retry_first_ms = 100;
        settings.mail.retry_max_ms = 200;
    })
    .await;
    wait_for_state(db, fine, "delivered").await;
    let error = wait_for_state(db, heavy, "dead").await.unwrap();
    assert!(error.contains("notification.order_endless.en.txt: more than 50000 steps"), "{error}");
    let began = std::time::Instant::now();
    app.stop().await;
    assert!(began.elapsed() < DEADLINE / 2, "the stop took {:?}", began.elapsed());
}
