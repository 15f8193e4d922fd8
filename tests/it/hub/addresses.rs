//! Which addresses and ports the webhooks of a tenant may reach.

use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, Receiver, TestApp, TestDatabase};

use crate::hub::fixture::{Fixture, error_pointers, subscribe, subscriber_path, wait_for_dead_letters};
use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, up};
use crate::support::{caller, text};

async fn test_delivery(client: &Client, subscriber: &Value) -> Value {
    let tested = client.post(&format!("{}/test", subscriber_path(subscriber)), json!({})).await;
    assert_eq!(tested.status, 200, "{tested:?}");
    tested.json()
}

#[tokio::test]
async fn only_the_operators_tenant_reaches_loopback_by_default() {
    let folder = DataFolder::new();
    let receiver = Receiver::start().await;
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let main = admin_of(&process).await;
    assert_eq!(main.post("/admin/v1/tenants", json!({"name": "acme"})).await.status, 201);
    let key = main.post("/admin/v1/keys", json!({"name": "t", "role": "manage", "tenant": "acme"})).await.json();
    let acme = Client::new(main.base()).bearer(text(&key["key"]));
    let fields = |url: &str| json!({"name": "test", "url": url, "event_types": ["*"], "retry_backoff_seconds": []});

    let by_address = subscribe(&main, &receiver.url(), json!({})).await;
    assert_eq!(test_delivery(&main, &by_address).await["delivered"], true);
    let refused = acme.post("/hub/v1/subscribers", fields(&receiver.url())).await;
    assert_eq!(error_pointers(&refused), ["/url"]);
    assert!(refused.text.contains("not a public address"), "{refused:?}");

    // By name, and over the origin for which `main` has an open connection.
    let url = receiver.url().replace("127.0.0.1", "localhost");
    let by_name = subscribe(&main, &url, json!({})).await;
    assert_eq!(test_delivery(&main, &by_name).await["delivered"], true);
    let delivered = receiver.count();
    let strangers = acme.post("/hub/v1/subscribers", fields(&url)).await.json();
    let tested = test_delivery(&acme, &strangers).await;
    assert_eq!((&tested["delivered"], &tested["error"]), (&json!(false), &json!("address_refused")), "{tested}");
    let posted = acme.post("/hub/v1/events", json!({"event_type": "order.paid", "payload": 1})).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    let dead = wait_for_dead_letters(&acme, &strangers, 1).await;
    assert_eq!(dead[0]["reason"], "exhausted", "{dead:?}");
    assert_eq!(receiver.count(), delivered, "nothing of the other tenant has arrived");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_network_that_the_operator_allows_is_open_to_every_tenant() {
    let fixture = Fixture::start().await; // it allows loopback
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&fixture.manager, &receiver.url(), json!({})).await;
    assert_eq!(test_delivery(&fixture.manager, &subscriber).await["delivered"], true);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_metadata_service_is_refused_even_if_its_network_is_allowed() {
    let fixture = Fixture::start_with(|settings| {
        let everything = ["0.0.0.0/0", "::/0"].map(|network| network.parse().unwrap());
        settings.hub.allowed_networks = Some(webhook_client::AllowedNetworks::new(everything));
    })
    .await;
    for host in ["169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "[fd00:ec2::254]"] {
        let fields = json!({"name": "test", "url": format!("http://{host}/latest"), "event_types": ["*"]});
        let refused = fixture.manager.post("/hub/v1/subscribers", fields).await;
        assert_eq!(error_pointers(&refused), ["/url"], "{host}");
        assert!(refused.text.contains("metadata service"), "{refused:?}");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_port_that_is_not_permitted_is_refused_also_for_older_subscribers() {
    let (database, receiver) = (TestDatabase::new(&migrations()).await, Receiver::start().await);
    let app = TestApp::start(&database).await;
    let acme = caller(&app, "manage", "acme").await;
    let older = subscribe(&acme, &receiver.url(), json!({})).await;
    app.stop().await;

    let app = TestApp::start_with(&database, |settings| settings.hub.allowed_ports = vec![443, 8443]).await;
    let acme = app.anonymous().bearer(acme.credential());
    for (url, is_permitted) in [
        ("https://example.com/", true),
        ("https://example.com:8443/", true),
        ("http://example.com:443/", true),
        ("http://example.com/", false),
        ("https://example.com:22/", false),
    ] {
        let fields = json!({"name": "test", "url": url, "event_types": ["*"]});
        let made = acme.post("/hub/v1/subscribers", fields).await;
        assert_eq!(made.status, if is_permitted { 201 } else { 422 }, "{url}: {made:?}");
        assert!(is_permitted || made.text.contains("`hub.allowed_ports` permits 443, 8443"), "{made:?}");
    }
    let tested = test_delivery(&acme, &older).await;
    assert_eq!((&tested["delivered"], &tested["error"]), (&json!(false), &json!("address_refused")), "{tested}");
    assert_eq!(receiver.count(), 0);
    app.stop().await;
}
