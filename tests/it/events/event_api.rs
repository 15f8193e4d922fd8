//! The HTTP API of events: lifecycle, permissions, validation, versions and idempotency.

use chrono::DateTime;
use hyper::Method;
use serde_json::{Value, json};

use crate::events::fixture::{
    Fixture, create_event, event_messages, event_path, in_hours, meetup, meetup_with, new_user, patch_event,
    post_action, publish_event,
};
use crate::support::collect_pages;

#[tokio::test]
async fn an_event_goes_through_its_whole_lifecycle() {
    let fixture = Fixture::start().await;
    let (owner, anyone) = (&fixture.owner, fixture.app.anonymous());
    let body = meetup();
    let answer = owner.post("/event/v1/events", body.clone()).await;
    assert_eq!((answer.status, &answer.json()["version"]), (201, &json!(1)), "{answer:?}");
    let draft = answer.json();
    assert_eq!(answer.header("location"), event_path(&draft));
    assert_eq!(
        (&draft["status"], &draft["version"], &draft["active_participants"]),
        (&json!("draft"), &json!(1), &json!(0))
    );
    for (field, value) in body.as_object().unwrap() {
        let is_time = field.ends_with("_time");
        let same = |a: &Value, b: &Value| match is_time {
            true => {
                DateTime::parse_from_rfc3339(a.as_str().unwrap()) == DateTime::parse_from_rfc3339(b.as_str().unwrap())
            }
            false => a == b,
        };
        assert!(same(&draft[field], value), "{field}: {draft}");
    }
    assert_eq!(owner.get(&event_path(&draft)).await.json(), draft);
    anyone.get(&event_path(&draft)).await.assert_problem(404, "event-not-found");

    let published = post_action(owner, &draft, "publish").await.json();
    assert_eq!((&published["status"], &published["version"]), (&json!("published"), &json!(2)));
    assert!(published["published_at"].is_string());
    assert_eq!(anyone.get(&event_path(&draft)).await.json(), published);
    let feed = anyone.get("/event/v1/events").await.json();
    let mut summary = published.clone();
    summary.as_object_mut().unwrap().remove("description");
    assert_eq!(feed, json!({ "items": [summary] }));

    let changed = patch_event(owner, &draft, json!({"title": "Rust night", "capacity": null})).await.json();
    assert_eq!(
        (&changed["title"], &changed["capacity"], &changed["version"]),
        (&json!("Rust night"), &json!(0), &json!(3))
    );
    let same = patch_event(owner, &draft, json!({"title": "Rust night"})).await.json();
    assert_eq!(same, changed, "a change without effect creates no version");
    assert_eq!(anyone.get(&event_path(&draft)).await.json()["title"], "Rust night");

    assert_eq!(post_action(owner, &draft, "unpublish").await.json()["status"], "draft");
    anyone.get(&event_path(&draft)).await.assert_problem(404, "event-not-found");
    assert_eq!(anyone.get("/event/v1/events").await.json(), json!({"items": []}));
    assert_eq!(patch_event(owner, &draft, json!({"capacity": 5})).await.json()["version"], 5);
    post_action(owner, &draft, "publish").await;
    let canceled = post_action(owner, &draft, "cancel").await.json();
    assert_eq!((&canceled["status"], &canceled["version"]), (&json!("canceled"), &json!(7)));
    assert!(canceled["canceled_at"].is_string());
    assert_eq!(
        anyone.get(&event_path(&draft)).await.json()["status"],
        "canceled",
        "a reader with the link sees the cancellation"
    );
    assert_eq!(anyone.get("/event/v1/events").await.json(), json!({"items": []}));

    let posted: Vec<(String, i64, String)> = event_messages(fixture.db(), &draft)
        .await
        .into_iter()
        .map(|(topic, payload)| {
            (topic, payload["version"].as_i64().unwrap(), payload["status"].as_str().unwrap().to_owned())
        })
        .collect();
    let expected = [
        ("event.published", 2, "published"),
        ("event.updated", 3, "published"),
        ("event.unpublished", 4, "draft"),
        ("event.published", 6, "published"),
        ("event.canceled", 7, "canceled"),
    ];
    assert_eq!(posted, expected.map(|(topic, version, status)| (topic.to_owned(), version, status.to_owned())));
    let last = event_messages(fixture.db(), &draft).await.pop().unwrap().1;
    for field in ["owner_id", "title", "city", "category", "start_time", "end_time", "time_zone", "capacity"] {
        assert_eq!(last[field], canceled[field], "{field}");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_illegal_transition_is_rejected_and_changes_nothing() {
    let fixture = Fixture::start().await;
    let draft = create_event(&fixture.owner, meetup()).await;
    post_action(&fixture.owner, &draft, "unpublish").await.assert_problem(409, "transition-refused");
    post_action(&fixture.owner, &draft, "publish").await;
    let twice = post_action(&fixture.owner, &draft, "publish").await;
    twice.assert_problem(409, "transition-refused");
    assert_eq!(twice.json()["detail"], "an event that is published cannot be published");
    post_action(&fixture.owner, &draft, "cancel").await;
    for action in ["publish", "unpublish", "cancel"] {
        post_action(&fixture.owner, &draft, action).await.assert_problem(409, "transition-refused");
    }
    patch_event(&fixture.owner, &draft, json!({"title": "x"})).await.assert_problem(409, "transition-refused");
    assert_eq!(fixture.owner.get(&event_path(&draft)).await.json()["version"], 3);
    fixture.app.stop().await;
}

#[tokio::test]
async fn only_the_owner_can_change_an_event_or_see_its_draft() {
    let fixture = Fixture::start().await;
    let (app, draft) = (&fixture.app, create_event(&fixture.owner, meetup()).await);
    let public = publish_event(&fixture.owner, meetup()).await;
    let stranger = new_user(app);
    let writes: Vec<(Method, String, Option<Value>)> = vec![
        (Method::PATCH, String::new(), Some(json!({"title": "mine now"}))),
        (Method::POST, "/publish".to_owned(), None),
        (Method::POST, "/unpublish".to_owned(), None),
        (Method::POST, "/cancel".to_owned(), None),
        (Method::GET, "/history".to_owned(), None),
    ];
    for (method, below, body) in &writes {
        let at = |event: &Value| format!("{}{below}", event_path(event));
        stranger.send(method.clone(), &at(&draft), body.clone()).await.assert_problem(404, "event-not-found");
        stranger.send(method.clone(), &at(&public), body.clone()).await.assert_problem(403, "forbidden");
        let anonymous =
            app.anonymous().send(method.clone(), &format!("{}{below}", event_path(&public)), body.clone()).await;
        anonymous.assert_problem(401, "unauthorized");
        if !["", "/publish"].contains(&below.as_str()) {
            continue; // Admins may do it.
        }
        let key = app.admin().send(method.clone(), &format!("{}{below}", event_path(&public)), body.clone()).await;
        key.assert_problem(403, "forbidden");
        assert!(key.json()["detail"].as_str().unwrap().contains("user's token"), "{key:?}");
    }
    for (path, method, body) in
        [("/event/v1/events", Method::POST, Some(meetup())), ("/event/v1/me/events", Method::GET, None)]
    {
        app.anonymous().send(method.clone(), path, body.clone()).await.assert_problem(401, "unauthorized");
        app.admin().send(method, path, body).await.assert_problem(403, "forbidden");
    }
    for reader in [app.anonymous(), stranger.clone()] {
        reader.get(&event_path(&draft)).await.assert_problem(404, "event-not-found");
        assert_eq!(reader.get(&event_path(&public)).await.json(), public);
    }
    // No request changed anything.
    assert_eq!(fixture.owner.get(&event_path(&draft)).await.json(), draft);
    assert_eq!(stranger.get("/event/v1/me/events").await.json(), json!({"items": []}));
    fixture.app.stop().await;
}

#[tokio::test]
async fn every_invalid_field_is_named_with_the_accepted_values() {
    let fixture = Fixture::start().await;
    let long = |count: usize| "x".repeat(count);
    let covers = |count: usize| vec!["img"; count];
    let wrong: Vec<(Value, &str, &str)> = vec![
        (json!({"title": ""}), "/title", "1 to 200"),
        (json!({"title": "   "}), "/title", "blank"),
        (json!({"title": long(201)}), "/title", "1 to 200"),
        (json!({"title": "a\u{7}b"}), "/title", "control"),
        (json!({"title": null}), "/title", "required"),
        (json!({"description": long(10_001)}), "/description", "10000"),
        (json!({"description": "a\u{7}b"}), "/description", "control"),
        (json!({"city": ""}), "/city", "1 to 100"),
        (json!({"city": long(101)}), "/city", "1 to 100"),
        (json!({"city": "\u{301}"}), "/city", "letter"),
        (json!({"city": null}), "/city", "required"),
        (json!({"category": ""}), "/category", "1 to 50"),
        (json!({"category": long(51)}), "/category", "1 to 50"),
        (json!({"category": "\u{301}"}), "/category", "letter"),
        (json!({"category": null}), "/category", "required"),
        (json!({"time_zone": null}), "/time_zone", "required"),
        (json!({"time_zone": "Mars/Olympus"}), "/time_zone", "IANA"),
        (json!({"time_zone": "+01:00"}), "/time_zone", "IANA"),
        (json!({"end_time": in_hours(24)}), "/end_time", "after start_time"),
        (json!({"start_time": "0900-01-01T00:00:00Z"}), "/start_time", "1970"),
        (json!({"start_time": null}), "/start_time", "required"),
        (json!({"end_time": "0900-01-01T00:00:00Z"}), "/end_time", "1970"),
        (json!({"end_time": "+10000-01-01T00:00:00Z"}), "/end_time", "9999"),
        (json!({"end_time": null}), "/end_time", "required"),
        (json!({"start_time": "tomorrow"}), "/start_time", "must be a time such as"),
        (json!({"start_time": "2027-01-01T00:00:00"}), "/start_time", "must be a time such as"),
        (json!({"capacity": -1}), "/capacity", "from 0"),
        (json!({"capacity": 1_000_001}), "/capacity", "1000000"),
        (json!({"capacity": 1.5}), "/capacity", "whole number"),
        (json!({"cover_image_ids": covers(11)}), "/cover_image_ids", "at most 10"),
        (json!({"cover_image_ids": ["a", ""]}), "/cover_image_ids/1", "1 to 200"),
        (json!({"cover_image_ids": ["a", "b", long(201)]}), "/cover_image_ids/2", "1 to 200"),
        (json!({"status": "published"}), "/status", "does not exist"),
    ];
    let draft = create_event(&fixture.owner, meetup()).await;
    for (fields, pointer, accepted) in wrong {
        for answer in [
            fixture.owner.post("/event/v1/events", meetup_with(fields.clone())).await,
            patch_event(&fixture.owner, &draft, fields.clone()).await,
        ] {
            answer.assert_problem(422, "validation-failed");
            let error = answer.json()["errors"][0].clone();
            assert!(error["pointer"].as_str().unwrap().starts_with(pointer), "{fields}: {answer:?}");
            assert!(error["detail"].as_str().unwrap().contains(accepted), "{fields}: {answer:?}");
        }
    }
    let nothing = fixture.owner.post("/event/v1/events", json!({})).await.json();
    let missing: Vec<&str> =
        nothing["errors"].as_array().unwrap().iter().map(|e| e["pointer"].as_str().unwrap()).collect();
    assert_eq!(missing, ["/title", "/city", "/category", "/start_time", "/end_time", "/time_zone"]);
    let late = patch_event(&fixture.owner, &draft, json!({"start_time": in_hours(100)})).await;
    assert_eq!(late.json()["errors"][0]["pointer"], "/start_time", "{late:?}");
    // The largest accepted values.
    let most = json!({
        "title": "é".repeat(200), "description": "é\n\r\té".repeat(2_000), "city": "é".repeat(100), "category": "é".repeat(50),
        "start_time": "9999-12-31T23:59:58Z", "end_time": "9999-12-31T23:59:59Z", "capacity": 1_000_000,
        "cover_image_ids": vec!["é".repeat(200); 10],
    });
    let made = create_event(&fixture.owner, meetup_with(most.clone())).await;
    for (field, value) in most.as_object().unwrap() {
        assert_eq!(made[field], *value, "{field}");
    }
    // Surrounding blanks are trimmed, and PostgreSQL stores microseconds.
    let typed = json!({"title": " a ", "city": "  b  ", "category": "c ",
        "start_time": "2030-01-01T00:00:00.123456789Z", "end_time": "2030-01-01T02:00:00+01:00"});
    let normalized = patch_event(&fixture.owner, &made, typed).await.json();
    assert_eq!([&normalized["title"], &normalized["city"], &normalized["category"]], ["a", "b", "c"]);
    assert_eq!(normalized["start_time"], "2030-01-01T00:00:00.123456Z");
    assert_eq!(normalized["end_time"], "2030-01-01T01:00:00Z");
    assert_eq!(fixture.owner.get(&event_path(&draft)).await.json(), draft);
    fixture.app.stop().await;
}

#[tokio::test]
async fn if_match_rejects_old_versions_and_if_none_match_returns_304() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let shown = fixture.app.anonymous().get(&event_path(&event)).await;
    let tag = shown.header("etag").to_owned();
    let reader = fixture.app.anonymous().with_header("if-none-match", &tag);
    let again = reader.get(&event_path(&event)).await;
    assert_eq!((again.status, again.text.as_str(), again.header("etag")), (304, "", tag.as_str()));
    let with = |tag: &str| fixture.owner.with_header("if-match", tag);
    assert_eq!(patch_event(&with(&tag), &event, json!({"title": "Second"})).await.status, 200);
    assert_eq!(reader.get(&event_path(&event)).await.status, 200, "the event has a new version");
    for action in ["unpublish", "cancel"] {
        post_action(&with(&tag), &event, action).await.assert_problem(412, "stale");
    }
    patch_event(&with(&tag), &event, json!({"title": "Third"})).await.assert_problem(412, "stale");
    let stale = post_action(&with("\"3\""), &event, "unpublish").await;
    stale.assert_problem(412, "stale");
    assert!(stale.text.contains("with its ETag in If-Match"), "the number alone may belong to two versions: {stale:?}");
    let (third, current) =
        (reader.get(&event_path(&event)).await.header("etag").to_owned(), "a version without the count");
    let without_count = format!("{}\"", third.rsplit_once('.').unwrap().0);
    assert_eq!(post_action(&with(&without_count), &event, "unpublish").await.status, 200, "{current} is accepted");
    post_action(&with(&without_count), &event, "publish").await.assert_problem(412, "stale");
    assert_eq!(post_action(&with("*"), &event, "publish").await.status, 200);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_repeated_request_has_no_further_effect() {
    let fixture = Fixture::start().await;
    let once = fixture.owner.with_header("idempotency-key", "make-it");
    let body = meetup();
    let requests = futures_util::future::join_all((0..20).map(|_| once.post("/event/v1/events", body.clone()))).await;
    let first = requests[0].json();
    assert!(requests.iter().all(|answer| answer.status == 201 && answer.json() == first));
    assert_eq!(requests.iter().filter(|answer| answer.headers.contains_key("idempotent-replayed")).count(), 19);
    for answer in &requests {
        assert_eq!(answer.header("location"), event_path(&first));
        assert_eq!(answer.header("etag"), requests[0].header("etag"));
    }
    once.post("/event/v1/events", meetup_with(json!({"title": "Another"})))
        .await
        .assert_problem(422, "idempotency-key-reused");
    let mine = fixture.owner.get("/event/v1/me/events").await.json();
    assert_eq!(mine["items"].as_array().unwrap().len(), 1);
    let publish = fixture.owner.with_header("idempotency-key", "publish-it");
    let answers = futures_util::future::join_all((0..20).map(|_| post_action(&publish, &first, "publish"))).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.json()["version"] == 2), "{answers:?}");
    assert!(answers.iter().all(|answer| answer.header("etag") == answers[0].header("etag")), "{answers:?}");
    assert_eq!(fixture.owner.get(&event_path(&first)).await.header("etag"), answers[0].header("etag"));
    assert_eq!(event_messages(fixture.db(), &first).await.len(), 1);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_change_for_a_newer_version_needs_a_new_idempotency_key() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let keyed = fixture.owner.with_header("idempotency-key", "rename");
    patch_event(&keyed.with_header("if-match", "\"1\""), &event, json!({"title": "Second"}))
        .await
        .assert_problem(412, "stale");
    let other = patch_event(&keyed.with_header("if-match", "\"2\""), &event, json!({"title": "Second"})).await;
    other.assert_problem(422, "idempotency-key-reused");
    fixture.app.stop().await;
}

#[tokio::test]
async fn publishing_again_does_not_change_published_at() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    post_action(&fixture.owner, &event, "unpublish").await;
    assert_eq!(post_action(&fixture.owner, &event, "publish").await.json()["published_at"], event["published_at"]);
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_owner_lists_their_events_and_the_history_of_each() {
    let fixture = Fixture::start().await;
    let mut made_ids = Vec::new();
    for number in 0..5 {
        made_ids.push(create_event(&fixture.owner, meetup_with(json!({"title": format!("No {number}")}))).await);
    }
    post_action(&fixture.owner, &made_ids[2], "publish").await;
    create_event(&new_user(&fixture.app), meetup()).await;
    let listed = collect_pages(&fixture.owner, "/event/v1/me/events?limit=2").await;
    let titles: Vec<&str> = listed.iter().map(|event| event["title"].as_str().unwrap()).collect();
    assert_eq!(titles, ["No 4", "No 3", "No 2", "No 1", "No 0"]);
    let only = fixture.owner.get("/event/v1/me/events?status=published").await.json();
    assert_eq!(only["items"].as_array().unwrap().len(), 1);
    fixture.owner.get("/event/v1/me/events?status=gone").await.assert_problem(400, "malformed-query");

    post_action(&fixture.owner, &made_ids[2], "unpublish").await;
    post_action(&fixture.owner, &made_ids[2], "cancel").await;
    let history = fixture.owner.get(&format!("{}/history?limit=3", event_path(&made_ids[2]))).await.json();
    let cursor = history["next_cursor"].as_str().unwrap();
    let rest = fixture.owner.get(&format!("{}/history?limit=3&cursor={cursor}", event_path(&made_ids[2]))).await.json();
    let changes = [history["items"].as_array().unwrap().as_slice(), rest["items"].as_array().unwrap()].concat();
    let moves: Vec<(&Value, &Value)> = changes.iter().map(|change| (&change["from"], &change["to"])).collect();
    let (draft, published, canceled) = (json!("draft"), json!("published"), json!("canceled"));
    assert_eq!(moves, [(&Value::Null, &draft), (&draft, &published), (&published, &draft), (&draft, &canceled)]);
    assert!(changes.iter().all(|change| change["by"] == made_ids[2]["owner_id"] && change["at"].is_string()));
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_canceled_draft_is_visible_to_its_owner_only() {
    let fixture = Fixture::start().await;
    let (anyone, stranger) = (fixture.app.anonymous(), new_user(&fixture.app));
    let never = create_event(&fixture.owner, meetup()).await;
    let once = publish_event(&fixture.owner, meetup()).await;
    assert_eq!(post_action(&fixture.owner, &once, "unpublish").await.status, 200);
    let shown = publish_event(&fixture.owner, meetup()).await;
    for event in [&never, &once, &shown] {
        assert_eq!(post_action(&fixture.owner, event, "cancel").await.status, 200);
        assert_eq!(fixture.owner.get(&event_path(event)).await.status, 200);
    }
    for hidden in [&never, &once] {
        assert_eq!(anyone.get(&event_path(hidden)).await.status, 404);
        assert_eq!(post_action(&stranger, hidden, "publish").await.status, 404);
    }
    assert_eq!(event_messages(fixture.db(), &never).await, [], "no message was ever posted about it");
    assert_eq!(event_messages(fixture.db(), &once).await.len(), 3, "participants are informed");
    assert_eq!(
        anyone.get(&event_path(&shown)).await.json()["status"],
        "canceled",
        "a reader with the link sees the cancellation"
    );
    fixture.app.stop().await;
}
