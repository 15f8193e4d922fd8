//! The settings as they are shipped. Other tests change them, so nothing else proves them.

use mailbox::database::migrations;
use serde_json::json;
use testkit::{Client, Receiver, TestDatabase};

use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, serve, up};
use crate::support::text;

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
