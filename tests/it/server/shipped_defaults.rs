//! The settings as they are shipped. Other tests change them, so nothing else proves them.

use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Receiver, TestApp, TestDatabase, eventually};

use crate::mail::fixture::{SmtpServer, request, statuses, verification};
use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, serve, up};
use crate::support::{DEADLINE, text};

async fn create(client: &Client, url: &str) -> testkit::Response {
    client.post("/hub/v1/subscribers", json!({"name": "test", "url": url, "event_types": ["*"]})).await
}

#[tokio::test]
async fn serve_refuses_webhooks_to_private_and_loopback_addresses() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let receiver = Receiver::start().await;
    let process = serve(&folder, &database, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let port = receiver.url().rsplit(':').next().unwrap().to_owned();
    for host in [
        "127.0.0.1",
        "127.9.9.9",
        "[::1]",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "[fd00:ec2::254]",
        "[fc00::1]",
        "[fe80::1]",
        "[::ffff:10.0.0.1]",
        "2130706433",
    ] {
        let refused = create(&admin, &format!("http://{host}:{port}")).await;
        refused.assert_problem(422, "validation-failed");
        let error = &refused.json()["errors"][0];
        assert_eq!(error["pointer"], "/url", "{host}");
        assert!(text(&error["detail"]).contains("not a public address"), "{host}: {error}");
    }
    // A name is resolved when a webhook is sent.
    let named = create(&admin, &format!("http://localhost:{port}")).await;
    assert_eq!(named.status, 201, "{named:?}");
    let test = format!("/hub/v1/subscribers/{}/test", text(&named.json()["id"]));
    let tested = admin.post(&test, json!({})).await.json();
    assert_eq!((&tested["delivered"], &tested["error"]), (&json!(false), &json!("address_refused")), "{tested}");
    assert_eq!(receiver.count(), 0);
}

#[tokio::test]
async fn the_embedded_postgresql_waits_for_the_disk_and_uses_the_memory_of_the_machine() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    process.base_url().await;
    let db = folder.database().await;
    for setting in ["fsync", "full_page_writes", "synchronous_commit"] {
        let (value, source): (String, String) =
            sqlx::query_as("select setting, source from pg_settings where name = $1")
                .bind(setting)
                .fetch_one(&db)
                .await
                .unwrap();
        assert_eq!(value, "on", "{setting} from {source}");
    }
    // The defaults of PostgreSQL have the source `default`, or the file that initdb writes.
    for setting in ["shared_buffers", "effective_cache_size", "work_mem", "maintenance_work_mem"] {
        let source: String = sqlx::query_scalar("select source from pg_settings where name = $1")
            .bind(setting)
            .fetch_one(&db)
            .await
            .unwrap();
        assert_eq!(source, "command line", "{setting}");
    }
    // No role or database overrides it.
    let overrides = "select count(*) from pg_db_role_setting where setconfig::text like '%synchronous_commit%'";
    assert_eq!(sqlx::query_scalar::<_, i64>(overrides).fetch_one(&db).await.unwrap(), 0);
    db.close().await;
    assert!(process.terminate().await.success());
}

/// Inserts a row that is a day, or an hour, older than its retention, and one that is as much younger.
async fn insert_both(db: &PgPool, insert: &'static str, (older, younger): (&str, &str)) {
    for (name, age) in [("older", older), ("younger", younger)] {
        sqlx::query(insert).bind(name).bind(age).execute(db).await.unwrap();
    }
}

#[tokio::test]
async fn the_retention_of_notifications_emails_and_projects_is_exact_to_the_day() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let notification =
        "insert into pillarbox_notify.notification (event_id, user_id, channel, status, last_error, created_at)
                        values (gen_random_uuid(), gen_random_uuid(), 'email', 'skipped', $1, now() - $2::interval)";
    insert_both(db, notification, ("91 days", "89 days")).await;
    let event = "insert into pillarbox_notify.business_event (id, event_type, payload, at)
                 values (gen_random_uuid(), $1, '{}', now() - $2::interval)";
    insert_both(db, event, ("91 days", "89 days")).await;
    let sent = "insert into pillarbox_notify.mail (message_id, source, idempotency_key, recipient, template, locale, subject, status,
                    next_attempt_at, give_up_at, created_at, sent_at)
                values (gen_random_uuid(), 'identity', $1, 'a@example.org', 't', 'en', 'sent ' || $1, 'sent', now(), now(),
                    now() - $2::interval, now() - $2::interval)";
    insert_both(db, sent, ("31 days", "29 days")).await;
    let captured = "insert into pillarbox_notify.mail (message_id, source, idempotency_key, recipient, template, locale, subject,
                        status, text, html, next_attempt_at, give_up_at, created_at)
                    values (gen_random_uuid(), 'notify', $1, 'a@example.org', 't', 'en', 'captured ' || $1, 'captured', 't', 'h',
                        now(), now(), now() - $2::interval)";
    insert_both(db, captured, ("25 hours", "23 hours")).await;
    let project = "insert into pillarbox_progress.project
                       (id, tenant, owner, token, run, created_at, expires_at, finished_at, status, total, done, errors)
                   values ($1, 'main', 'tenant:main', gen_random_uuid(), 'postgres', now() - $2::interval,
                       now() - $2::interval, now() - $2::interval, 'DONE', 1, 1, 0)";
    insert_both(db, project, ("31 days", "29 days")).await;
    let app = TestApp::start(&database).await;
    eventually("only the younger ones are left", DEADLINE, async || {
        let left = "select last_error from pillarbox_notify.notification
                    union all select event_type from pillarbox_notify.business_event
                    union all select subject from pillarbox_notify.mail
                    union all select id from pillarbox_progress.project order by 1";
        let left: Vec<String> = sqlx::query_scalar(left).fetch_all(db).await.unwrap();
        if left == ["captured younger", "sent younger", "younger", "younger", "younger"] { Ok(()) } else { Err(left) }
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn ten_wrong_passwords_and_five_emails_are_the_limit_of_an_address() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let statuses = async |path: &str, body: serde_json::Value, count: usize| {
        let mut statuses = Vec::new();
        for _ in 0..count {
            statuses.push(app.anonymous().post(path, body.clone()).await.status);
        }
        statuses
    };
    let wrong = json!({"email": "ada@example.org", "password": "a wrong password"});
    assert_eq!(statuses("/identity/v1/login", wrong, 11).await, [vec![401; 10], vec![429]].concat());
    let forgot = json!({"email": "bob@example.org"});
    assert_eq!(statuses("/identity/v1/password/forgot", forgot, 6).await, [vec![202; 5], vec![429]].concat());
    app.stop().await;
}

#[tokio::test]
async fn a_hundred_wrong_passwords_and_sixty_requests_for_emails_are_the_limit_of_a_network() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    for (path, kind, limit, accepted, window) in [
        ("login", "login.network", 100, 401, "15 minutes"),
        ("password/forgot", "email.network", 60, 202, "60 minutes"),
    ] {
        let mut addresses = (0..).map(|number| format!("user{number}@{}.example.org", path.replace('/', "-")));
        let mut status = async || {
            let mut body = json!({"email": addresses.next()});
            if path == "login" {
                body["password"] = json!("a wrong password");
            }
            app.anonymous().post(&format!("/identity/v1/{path}"), body).await.status
        };
        assert_eq!(status().await, accepted, "{path}");
        // All but the last one that is accepted.
        let counted = "update pillarbox_identity.throttle set attempts = $1 where kind = $2
                       returning expires_at - now() between 1.9 * $3::interval and 2 * $3::interval";
        let expires: bool = sqlx::query_scalar(counted)
            .bind(limit - 1)
            .bind(kind)
            .bind(window)
            .fetch_one(database.pool())
            .await
            .unwrap();
        assert!(expires, "{kind}: a count is stored for two windows of {window}");
        assert_eq!((status().await, status().await), (accepted, 429), "{path}");
        let passed = "update pillarbox_identity.throttle set window_no = window_no - 2";
        sqlx::query(passed).execute(database.pool()).await.unwrap();
        assert_eq!(status().await, accepted, "{path}");
    }
    app.stop().await;
}

#[tokio::test]
async fn an_email_is_retried_for_three_days() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let (db, url) = (database.pool(), server.url());
    server.set_rules(&json!({"data": "451 4.3.0 try later"}));
    let start =
        async || TestApp::start_with(&database, |settings| settings.smtp_url = Some(Secret::new(url.clone()))).await;
    let app = start().await;
    let endless = |address: &str| {
        let mut request = verification(address);
        request.expires_at = None;
        request
    };
    request(db, &["older@example.org", "younger@example.org"].map(endless)).await;
    let attempts = async |wanted: i64| {
        eventually("both are tried", DEADLINE, async || {
            let query = "select sum(attempts)::bigint from pillarbox_notify.mail";
            let found: Option<i64> = sqlx::query_scalar(query).fetch_one(db).await.unwrap();
            if found == Some(wanted) { Ok(()) } else { Err(found) }
        })
        .await;
    };
    attempts(2).await;
    app.stop().await;
    let pass = "update pillarbox_notify.mail set next_attempt_at = now(), (created_at, give_up_at) =
                    (select created_at - passed, give_up_at - passed
                     from (select case when recipient like 'older%' then interval '72 h' else interval '71 h' end) as one (passed))";
    sqlx::query(pass).execute(db).await.unwrap();
    let app = start().await;
    attempts(4).await;
    let states: Vec<(String, String)> =
        sqlx::query_as("select recipient, status from pillarbox_notify.mail order by recipient")
            .fetch_all(db)
            .await
            .unwrap();
    let state = |address: &str, status: &str| (address.to_owned(), status.to_owned());
    assert_eq!(states, [state("older@example.org", "dead"), state("younger@example.org", "queued")]);
    assert_eq!(statuses(db).await.len(), 2);
    app.stop().await;
}

#[tokio::test]
async fn the_retention_of_the_audit_trail_and_of_the_health_of_subscribers_is_exact_to_the_day() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let audit = "insert into pillarbox_admin.audit (id, at, key_id, tenant, method, route, trace_id)
                 values (gen_random_uuid(), now() - $2::interval, gen_random_uuid(), 'acme', 'GET', 'audit ' || $1, '')";
    insert_both(db, audit, ("91 days", "89 days")).await;
    // Whole days are deleted, so the oldest row may be there for a day longer. The number of dead messages names it.
    let health = "insert into pillarbox_hub.health (at, subscriber, delivered, failed, dead, latency)
                  values (now() - $2::interval, gen_random_uuid(), 1, 0, length($1), '{}')";
    insert_both(db, health, ("32 days", "30 days")).await;
    let app = TestApp::start(&database).await;
    eventually("only the younger ones are left", DEADLINE, async || {
        let left = "select route from pillarbox_admin.audit
                    union all select 'health ' || dead from pillarbox_hub.health order by 1";
        let left: Vec<String> = sqlx::query_scalar(left).fetch_all(db).await.unwrap();
        if left == ["audit younger".to_owned(), format!("health {}", "younger".len())] { Ok(()) } else { Err(left) }
    })
    .await;
    app.stop().await;
}
