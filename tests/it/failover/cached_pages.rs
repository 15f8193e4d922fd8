//! Cached pages and ETags across a failover: versions and generations are assigned again, and none is confused.

use std::collections::BTreeSet;

use runtime::secret::Secret;
use serde_json::{Value, json};
use testkit::{Client, TestRedis, eventually};
use uuid::Uuid;

use super::fixture::Cluster;
use crate::events::fixture::{create_event, event_path, meetup_with, patch_event, post_action, publish_event};
use crate::hub::fixture::{patch_subscriber, subscribe, subscriber_path};
use crate::support::{DEADLINE, text, uuid_of};

const PUBLIC_EVENTS: &str = "/event/v1/events";

async fn titles(reader: &Client, path: &str) -> BTreeSet<String> {
    let feed = reader.get(path).await.json();
    feed["items"].as_array().unwrap().iter().map(|event| text(&event["title"]).to_owned()).collect()
}

/// Changes the title of an event as soon as the server is connected again.
async fn rename_again(owner: &Client, event: &Value, title: &str) -> Value {
    eventually("the title is changed", DEADLINE, async || {
        let changed = patch_event(owner, event, json!({ "title": title })).await;
        if changed.status == 200 { Ok(changed.json()) } else { Err(changed.status) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_page_and_no_etag_of_a_lost_version_passes_as_the_version_that_replaces_it() {
    let (cluster, redis) = (Cluster::start().await, TestRedis::new());
    let with_redis = |settings: &mut server::settings::Settings| {
        settings.redis_url = Some(Secret::new(redis.url()));
        settings.redis_prefix = redis.prefix().to_owned();
    };
    let app = cluster.start_app(with_redis).await;
    let (admin, owner, reader) = (app.admin(), app.user(Uuid::now_v7(), None), app.anonymous());
    let event = publish_event(&owner, meetup_with(json!({"title": "First"}))).await;
    let drafts = [
        create_event(&owner, meetup_with(json!({"title": "Lost draft"}))).await,
        create_event(&owner, meetup_with(json!({"title": "Other draft"}))).await,
    ];
    let subscriber = subscribe(&admin, "http://127.0.0.1:1/", json!({"is_active": false})).await;
    cluster.cut_replication().await;

    let lost = patch_event(&owner, &event, json!({"title": "Lost"})).await;
    assert_eq!(lost.json()["version"], 3);
    assert_eq!(post_action(&owner, &drafts[0], "publish").await.status, 200);
    assert_eq!(reader.get(&event_path(&event)).await.json()["title"], "Lost");
    assert_eq!(titles(&reader, PUBLIC_EVENTS).await, BTreeSet::from(["Lost".to_owned(), "Lost draft".to_owned()]));
    let lost_name = patch_subscriber(&admin, uuid_of(&subscriber["id"]), json!({"name": "lost"})).await;

    cluster.fail_over().await;
    assert_eq!(rename_again(&owner, &event, "Kept").await["version"], 3, "the version is assigned again");
    assert_eq!(post_action(&owner, &drafts[1], "publish").await.status, 200);
    let name = patch_subscriber(&admin, uuid_of(&subscriber["id"]), json!({"name": "kept"})).await;
    assert_eq!(name.json()["version"], lost_name.json()["version"]);

    assert_eq!(titles(&reader, PUBLIC_EVENTS).await, BTreeSet::from(["Kept".to_owned(), "Other draft".to_owned()]));
    let shown = reader.get(&event_path(&event)).await;
    assert_eq!(shown.json()["title"], "Kept");
    for (client, path, tag) in [
        (&reader, event_path(&event), lost.header("etag")),
        (&admin, subscriber_path(&subscriber), lost_name.header("etag")),
    ] {
        let copy = client.with_header("if-none-match", tag);
        assert_eq!(copy.get(&path).await.status, 200, "{path}: the copy of the lost version is not current");
    }
    let based_on = |client: &Client, tag: &str| client.with_header("if-match", tag);
    patch_event(&based_on(&owner, lost.header("etag")), &event, json!({"title": "x"}))
        .await
        .assert_problem(412, "stale");
    let stale = based_on(&admin, lost_name.header("etag"));
    patch_subscriber(&stale, uuid_of(&subscriber["id"]), json!({"name": "x"})).await.assert_problem(412, "stale");
    assert_eq!(patch_event(&based_on(&owner, shown.header("etag")), &event, json!({"title": "y"})).await.status, 200);
    app.stop().await;
}
