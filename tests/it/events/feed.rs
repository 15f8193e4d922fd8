//! Finding events: feeds, search and suggested cities.

use std::collections::HashSet;
use std::sync::Arc;

use events::{Events, EventsSettings};
use http_kit::auth::TokenVerifier;
use pillarbox::database::Database;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use serde_json::json;
use service::{Service, ServiceContext};
use uuid::Uuid;

use crate::events::fixture::{
    Fixture, create_event, feed_titles, in_hours, insert_events, join_message, meetup_with, patch_event, post_action,
    post_messages, publish_event, score_events, walk_feed,
};

#[tokio::test]
async fn a_feed_lists_matching_upcoming_events_in_order() {
    let fixture = Fixture::start().await;
    let at = |hours: i64| json!({"start_time": in_hours(hours), "end_time": in_hours(hours + 2)});
    let event = |title: &str, hours: i64, city: &str, category: &str| {
        let mut fields = at(hours);
        fields
            .as_object_mut()
            .unwrap()
            .extend(json!({"title": title, "city": city, "category": category}).as_object().unwrap().clone());
        meetup_with(fields)
    };
    for body in [
        event("c", 30, "Zürich", "Tech"),
        event("a", 10, "ZURICH", "music"),
        event("b", 20, "São Paulo", "tech"),
        event("past", 50, "Zürich", "Tech"),
        event("d", 40, "zurich", "TECH"),
    ] {
        publish_event(&fixture.owner, body).await;
    }
    let past = "update pillarbox_events.event set start_time = $1, end_time = $2 where title = 'past'";
    sqlx::query(past).bind(in_hours(-10)).bind(in_hours(-8)).execute(fixture.db()).await.unwrap();
    create_event(&fixture.owner, event("draft", 5, "Zürich", "tech")).await;
    let canceled = publish_event(&fixture.owner, event("canceled", 5, "Zürich", "tech")).await;
    post_action(&fixture.owner, &canceled, "cancel").await;
    let reader = fixture.app.anonymous();
    let time = |hours: i64| in_hours(hours).format("%Y-%m-%dT%H:%M:%SZ").to_string();
    for (query, expected) in [
        (String::new(), vec!["a", "b", "c", "d"]),
        ("city=zu%CC%88rich".to_owned(), vec!["a", "c", "d"]),
        ("city=SAO%20PAULO".to_owned(), vec!["b"]),
        ("category=tech".to_owned(), vec!["b", "c", "d"]),
        ("city=z%C3%BCrich&category=Tech".to_owned(), vec!["c", "d"]),
        (format!("from={}&to={}", time(19), time(39)), vec!["b", "c"]),
        (format!("from={}", time(-20)), vec!["past", "a", "b", "c", "d"]),
        (format!("city=zurich&category=tech&from={}&to={}", time(31), time(99)), vec!["d"]),
        ("city=nowhere".to_owned(), vec![]),
        ("limit=2".to_owned(), vec!["a", "b"]),
    ] {
        assert_eq!(feed_titles(&reader, &query).await, expected, "{query}");
        assert_eq!(feed_titles(&reader, &query).await, expected, "the copy of {query}");
    }
    // An event that moves to another city is found there, and no longer in the previous one.
    let mine = fixture.owner.get("/event/v1/me/events").await.json();
    let d = mine["items"].as_array().unwrap().iter().find(|event| event["title"] == "d").unwrap().clone();
    patch_event(&fixture.owner, &d, json!({"city": "Bern"})).await;
    assert_eq!(feed_titles(&reader, "city=bern").await, ["d"]);
    assert_eq!(feed_titles(&reader, "city=zurich").await, ["a", "c"]);
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_invalid_query_is_rejected_with_the_parameter() {
    let fixture = Fixture::start().await;
    for number in 0..3 {
        publish_event(&fixture.owner, meetup_with(json!({"title": format!("No {number}")}))).await;
    }
    let reader = fixture.app.anonymous();
    let long = |name: &str, chars: usize| format!("{name}={}", "x".repeat(chars));
    for query in [long("city", 100), long("category", 50), long("q", 200)] {
        assert_eq!(feed_titles(&reader, &query).await, [""; 0], "{query}");
    }
    for (query, pointer) in [
        (&long("city", 101)[..], "/city"),
        (&long("category", 51), "/category"),
        (&long("q", 201), "/q"),
        ("limit=0", "/limit"),
        ("limit=101", "/limit"),
        ("sort=best", "/sort"),
        ("sort=relevance", "/sort"),
        ("sort=trending&q=x", "/sort"),
        ("q=", "/q"),
        ("q=%20", "/q"),
        ("from=yesterday", "/from"),
        ("from=2027-01-02T00:00:00Z&to=2027-01-01T00:00:00Z", "/to"),
        ("colour=red", ""),
        ("cursor=AAAA", "/cursor"),
    ] {
        let answer = reader.get(&format!("/event/v1/events?{query}")).await;
        answer.assert_problem(400, "malformed-query");
        assert!(answer.json()["errors"][0]["pointer"].as_str().unwrap().starts_with(pointer), "{query}: {answer:?}");
    }
    let page = reader.get("/event/v1/events?limit=1").await;
    let cursor = page.json()["next_cursor"].as_str().unwrap().to_owned();
    assert!(page.header("link").contains(&cursor) && page.header("link").ends_with("rel=\"next\""));
    reader
        .get(&format!("/event/v1/events?limit=1&city=bern&cursor={cursor}"))
        .await
        .assert_problem(400, "malformed-query");
    reader
        .get(&format!("/event/v1/events?limit=1&sort=trending&cursor={cursor}"))
        .await
        .assert_problem(400, "malformed-query");
    for query in ["limit=0", "limit=51", &long("q", 101)] {
        reader.get(&format!("/event/v1/meta/cities?{query}")).await.assert_problem(400, "malformed-query");
    }
    assert_eq!(reader.get(&format!("/event/v1/meta/cities?limit=50&{}", long("q", 100))).await.status, 200);
    reader.get("/event/v1/events/not-an-id").await.assert_problem(400, "malformed-path");
    fixture.app.stop().await;
}

#[tokio::test]
async fn paging_shows_each_event_once_while_counts_and_scores_change() {
    let fixture = Fixture::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    insert_events(fixture.db(), 300).await;
    let ids: Vec<Uuid> =
        sqlx::query_scalar("select id from pillarbox_events.event").fetch_all(fixture.db()).await.unwrap();
    let all: HashSet<Uuid> = ids.iter().copied().collect();
    let reader = fixture.app.anonymous();
    let mut version = 0;
    let mut change_counts = async || {
        version += 1;
        // Different events each time: pages already read lose rank, and pages not yet read gain rank.
        let chosen = ids.iter().filter(|_| rand::random_ratio(1, 7));
        let joins: Vec<_> = chosen.map(|id| join_message(*id, rand::random_range(0..1_000), version)).collect();
        post_messages(fixture.db(), "joins", &joins).await;
    };
    let latest = walk_feed(&reader, "limit=7", &mut change_counts).await;
    assert_eq!((latest.len(), latest.iter().copied().collect::<HashSet<_>>()), (300, all.clone()));
    let by_time: Vec<Uuid> = sqlx::query_scalar("select id from pillarbox_events.event order by start_time, id")
        .fetch_all(fixture.db())
        .await
        .unwrap();
    assert_eq!(latest, by_time);

    score_events(&fixture).await;
    let mut pages = 0;
    let trending = walk_feed(&reader, "sort=trending&limit=7", async || {
        change_counts().await;
        pages += 1;
        if pages == 10 {
            // The order changes in the middle of the paging.
            score_events(&fixture).await;
        }
    })
    .await;
    assert_eq!((trending.len(), trending.iter().copied().collect::<HashSet<_>>()), (300, all));
    let zurich = walk_feed(&reader, "sort=trending&limit=7&city=z%C3%BCrich&category=TECH", async || {}).await;
    assert_eq!(zurich.iter().collect::<HashSet<_>>().len(), 20);
    fixture.app.stop().await;
}

#[tokio::test]
async fn every_feed_query_uses_an_index_without_sorting() {
    let fixture = Fixture::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    insert_events(fixture.db(), 40_000).await;
    // With few different words, PostgreSQL has no statistics about prefixes.
    for statement in [
        "update pillarbox_events.event set title = 'Event w' || abs(hashtext(id::text) % 500)",
        "analyze pillarbox_events.event",
    ] {
        sqlx::query(statement).execute(fixture.db()).await.unwrap();
    }
    score_events(&fixture).await;
    let epoch: i64 = sqlx::query_scalar("select max(epoch) from pillarbox_events.trending_epoch")
        .fetch_one(fixture.db())
        .await
        .unwrap();
    let query = format!("select count(*) from pillarbox_events.trending_{}", epoch % 3);
    let scored: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(fixture.db()).await.unwrap();
    assert!(scored >= 39_000, "{scored} events are scored");
    let keys = [MasterKey::generate()];
    let tokens = Arc::new(TokenVerifier::new(&keys, &[], Clock::system()).unwrap());
    let context = ServiceContext::new(Database::new(fixture.db().clone()), Clock::system(), &keys, tokens);
    let service = Events::build(&context, &EventsSettings::default()).unwrap();
    let plans = service.feed_plans().await.unwrap();
    assert_eq!(plans.len(), 67, "each filter with each sort order, first page and later pages, and three searches");
    for (question, plan) in plans {
        assert!(!plan.contains("Seq Scan"), "{question}\n{plan}");
        if question.starts_with("search") {
            let indexes = ["event_search", "event_title_words"].map(|index| plan.contains(index));
            assert_eq!(indexes, [true, true], "{question}\n{plan}");
            continue;
        }
        assert!(!plan.contains("Sort"), "{question}\n{plan}");
        assert!(!plan.contains("Hash"), "{question}\n{plan}");
        assert!(plan.contains("Index"), "{question}\n{plan}");
    }
    fixture.app.stop().await;
}
