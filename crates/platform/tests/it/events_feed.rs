//! Finding events: feeds, search, cities.

use std::collections::HashSet;

use events::{Events, Stores};
use kit::clock::Clock;
use kit::page::CursorKey;
use mailbox::watch::Watcher;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, drain};
use uuid::Uuid;

use crate::events_world::{
    PATIENCE, World, act, id, in_hours, joined, made, meetup_with, patch, published, replica, say, walk,
};

/// Many published events, without asking for each: in these cities and categories by turns, one every minute.
async fn fill(db: &PgPool, count: i32) {
    sqlx::query(
        "insert into pillarbox_events.event (id, owner_id, title, description, city, city_norm, category, category_norm,
             start_time, end_time, time_zone, capacity, status, cover_image_ids, published_at, created_at, updated_at)
         select gen_random_uuid(), gen_random_uuid(), 'Event ' || n, 'No ' || n, cities.name, lower(cities.name),
             categories.name, categories.name, now() + n * interval '1 minute', now() + n * interval '1 minute' + interval '2 hours',
             'UTC', 10, 'published', '{}', now(), now(), now()
         from generate_series(1, $1) as n,
             lateral (select (array['Zurich', 'Bern', 'Basel', 'Genf', 'Chur'])[1 + n % 5] as name) cities,
             lateral (select (array['tech', 'music', 'sport'])[1 + n % 3] as name) categories",
    )
    .bind(count)
    .execute(db)
    .await
    .unwrap();
    sqlx::query("analyze pillarbox_events.event").execute(db).await.unwrap();
}

async fn titles(reader: &Client, query: &str) -> Vec<String> {
    let answer = reader.get(&format!("/event/v1/events?{query}")).await;
    assert_eq!(answer.status, 200, "{query}: {answer:?}");
    answer.json()["items"].as_array().unwrap().iter().map(|e| e["title"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_feed_has_what_is_upcoming_and_asked_for_in_order() {
    let world = World::start().await;
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
        event("past", -10, "Zürich", "Tech"),
        event("d", 40, "zurich", "TECH"),
    ] {
        published(&world.owner, body).await;
    }
    made(&world.owner, event("draft", 5, "Zürich", "tech")).await;
    let canceled = published(&world.owner, event("canceled", 5, "Zürich", "tech")).await;
    act(&world.owner, &canceled, "cancel").await;
    let reader = world.app.anyone();
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
        assert_eq!(titles(&reader, &query).await, expected, "{query}");
        assert_eq!(titles(&reader, &query).await, expected, "the copy of {query}");
    }
    // Who moves to another city is found there, and no more where it was.
    let mine = world.owner.get("/event/v1/me/events").await.json();
    let d = mine["items"].as_array().unwrap().iter().find(|event| event["title"] == "d").unwrap().clone();
    patch(&world.owner, &d, json!({"city": "Bern"})).await;
    assert_eq!(titles(&reader, "city=bern").await, ["d"]);
    assert_eq!(titles(&reader, "city=zurich").await, ["a", "c"]);
    world.app.stop().await;
}

#[tokio::test]
async fn a_bad_question_is_told_what_it_takes() {
    let world = World::start().await;
    for number in 0..3 {
        published(&world.owner, meetup_with(json!({"title": format!("No {number}")}))).await;
    }
    let reader = world.app.anyone();
    let long = |name: &str, chars: usize| format!("{name}={}", "x".repeat(chars));
    for query in [long("city", 100), long("category", 50), long("q", 200)] {
        assert_eq!(titles(&reader, &query).await, [""; 0], "{query}");
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
    world.app.stop().await;
}

#[tokio::test]
async fn a_walk_shows_each_event_once_while_counts_and_scores_change() {
    let world = World::start_with(|settings| settings.events.trending_seconds = 6).await;
    fill(world.db(), 300).await;
    let ids: Vec<Uuid> =
        sqlx::query_scalar("select id from pillarbox_events.event").fetch_all(world.db()).await.unwrap();
    let all: HashSet<Uuid> = ids.iter().copied().collect();
    let reader = world.app.anyone();
    let mut version = 0;
    let mut people_come = async || {
        version += 1;
        // Others each time: what was shown falls behind, and what was not comes to the front.
        let chosen = ids.iter().filter(|_| rand::random_ratio(1, 7));
        let joins: Vec<_> = chosen.map(|id| joined(*id, rand::random_range(0..1_000), version)).collect();
        say(world.db(), "joins", &joins).await;
    };
    let latest = walk(&reader, "limit=7", &mut people_come).await;
    assert_eq!((latest.len(), latest.iter().copied().collect::<HashSet<_>>()), (300, all.clone()));
    let by_time: Vec<Uuid> = sqlx::query_scalar("select id from pillarbox_events.event order by start_time, id")
        .fetch_all(world.db())
        .await
        .unwrap();
    assert_eq!(latest, by_time);

    let newest = async || {
        let query = "select coalesce(max(epoch), 0) from pillarbox_events.trending_epoch";
        sqlx::query_scalar::<_, i64>(query).fetch_one(world.db()).await.unwrap()
    };
    let next_epoch = async || {
        let before = newest().await;
        drain("new scores", PATIENCE, async || newest().await > before).await;
    };
    next_epoch().await;
    let mut pages = 0;
    let trending = walk(&reader, "sort=trending&limit=7", async || {
        people_come().await;
        pages += 1;
        if pages == 10 {
            // In the midst of the walk the order becomes another.
            next_epoch().await;
        }
    })
    .await;
    assert_eq!((trending.len(), trending.iter().copied().collect::<HashSet<_>>()), (300, all));
    let zurich = walk(&reader, "sort=trending&limit=7&city=z%C3%BCrich&category=TECH", async || {}).await;
    assert_eq!(zurich.iter().collect::<HashSet<_>>().len(), 20);
    world.app.stop().await;
}

#[tokio::test]
async fn trending_is_what_people_go_to_and_an_order_that_is_gone_says_so() {
    let world = World::start_with(|settings| settings.events.trending_seconds = 1).await;
    let mut events = Vec::new();
    for (title, capacity) in [("empty", 0), ("half full", 4), ("full", 2), ("crowd", 0)] {
        events.push(published(&world.owner, meetup_with(json!({"title": title, "capacity": capacity}))).await);
    }
    let counts = [0, 2, 2, 500];
    let joins: Vec<_> = events.iter().zip(counts).map(|(event, count)| joined(id(event), count, 1)).collect();
    say(world.db(), "joins", &joins).await;
    let reader = world.app.anyone();
    // Copies of pages may be 15 s old; a question of another kind is another copy.
    let mut limit = 4;
    drain("they are scored", PATIENCE, async || {
        limit += 1;
        match titles(&reader, &format!("sort=trending&limit={limit}")).await {
            found if found == ["crowd", "full", "half full", "empty"] => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let page = reader.get("/event/v1/events?sort=trending&limit=2").await.json();
    assert_eq!(page["items"][0]["title"], "crowd");
    // What is canceled meanwhile is not shown, whatever its score was.
    act(&world.owner, &events[1], "cancel").await;
    let next = format!("/event/v1/events?sort=trending&limit=2&cursor={}", page["next_cursor"].as_str().unwrap());
    assert_eq!(reader.get(&next).await.json()["items"][0]["title"], "empty");
    let epoch: i64 = sqlx::query_scalar("select max(epoch) from pillarbox_events.trending_epoch")
        .fetch_one(world.db())
        .await
        .unwrap();
    drain("its epoch is gone", PATIENCE, async || {
        let oldest: i64 = sqlx::query_scalar("select min(epoch) from pillarbox_events.trending_epoch")
            .fetch_one(world.db())
            .await
            .unwrap();
        oldest > epoch
    })
    .await;
    // A change of any kind, so that no copy of the page is good.
    patch(&world.owner, &events[0], json!({"title": "still empty"})).await;
    let late = reader.get(&next).await;
    late.assert_problem(410, "cursor-expired");
    world.app.stop().await;
}

#[tokio::test]
async fn every_feed_is_served_by_an_index_without_a_sort() {
    let world = World::start_with(|settings| settings.events.trending_seconds = 1).await;
    fill(world.db(), 40_000).await;
    drain("all are scored", PATIENCE, async || {
        let epoch: Option<i64> = sqlx::query_scalar("select max(epoch) from pillarbox_events.trending_epoch")
            .fetch_one(world.db())
            .await
            .unwrap();
        let query = format!("select count(*) from pillarbox_events.trending_{}", epoch.unwrap_or(0) % 3);
        let scored: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(world.db()).await.unwrap();
        scored >= 39_000
    })
    .await;
    let stores = Stores { db: world.db().clone(), feed_db: world.db().clone(), redis: None };
    let (service, _reading) = Events::new(stores, Clock::system(), CursorKey::new(vec![[7; 32]]), Watcher::default());
    let plans = service.feed_plans().await.unwrap();
    assert_eq!(plans.len(), 64, "each filter with each sort, first page and later");
    for (question, plan) in plans {
        assert!(!plan.contains("Seq Scan"), "{question}\n{plan}");
        assert!(!plan.contains("Sort"), "{question}\n{plan}");
        assert!(!plan.contains("Hash"), "{question}\n{plan}");
        assert!(plan.contains("Index"), "{question}\n{plan}");
    }
    world.app.stop().await;
}

#[tokio::test]
async fn a_search_finds_words_and_ranks_what_has_them_in_its_title() {
    let world = World::start().await;
    for (title, description) in [
        ("Chess evening", "Bring a friend."),
        ("Friendly football", "No chess, we promise. Also running."),
        ("Run in the park", "Runners of all ages."),
    ] {
        published(&world.owner, meetup_with(json!({"title": title, "description": description}))).await;
    }
    made(&world.owner, meetup_with(json!({"title": "Chess in secret"}))).await;
    let reader = world.app.anyone();
    assert_eq!(titles(&reader, "q=chess").await, ["Chess evening", "Friendly football"]);
    assert_eq!(titles(&reader, "q=running").await, ["Run in the park", "Friendly football"], "by their stems");
    assert_eq!(titles(&reader, "q=chess%20-football").await, ["Chess evening"]);
    assert_eq!(titles(&reader, "q=chess&sort=latest").await.len(), 2);
    assert_eq!(titles(&reader, "q=chess&city=bern").await.len(), 0);
    for odd in ["q=the", "q=%27%22%28%26%7C%21%3A*", "q=%5C"] {
        assert_eq!(titles(&reader, odd).await.len(), 0, "{odd}");
    }
    let walked = walk(&reader, "q=chess&limit=1", async || {}).await;
    assert_eq!(walked.len(), 2);
    world.app.stop().await;
}

#[tokio::test]
async fn a_search_ranks_the_next_thousand_and_walks_through_them_while_counts_change() {
    let world = World::start().await;
    fill(world.db(), 1_500).await;
    let by_time: Vec<Uuid> = sqlx::query_scalar("select id from pillarbox_events.event order by start_time, id")
        .fetch_all(world.db())
        .await
        .unwrap();
    // Rows move in their table when a count changes.
    let people_come = async || {
        sqlx::query(
            "update pillarbox_events.event set active_participants = 1 + active_participants where random() < 0.5",
        )
        .execute(world.db())
        .await
        .unwrap();
    };
    let found = walk(&world.app.anyone(), "q=event&limit=100", people_come).await;
    let (distinct, next): (HashSet<&Uuid>, HashSet<&Uuid>) =
        (found.iter().collect(), by_time[..1_000].iter().collect());
    assert_eq!((found.len(), distinct.symmetric_difference(&next).count()), (1_000, 0));
    let latest = walk(&world.app.anyone(), "q=event&sort=latest&limit=100", people_come).await;
    assert!(latest == by_time, "{}: in this order none is ranked, so all are walked through", latest.len());
    world.app.stop().await;
}

/// The scores of what there is now; they stay.
async fn scored_once(world: &World) {
    sqlx::query("delete from pillarbox_events.trending_epoch").execute(world.db()).await.unwrap();
    // One that starts looks at once.
    let other = replica(&world.database).await;
    drain("scores", PATIENCE, async || {
        let query = "select exists (select from pillarbox_events.trending_epoch)";
        sqlx::query_scalar::<_, bool>(query).fetch_one(world.db()).await.unwrap()
    })
    .await;
    other.stop().await;
}

#[tokio::test]
async fn what_is_over_is_not_trending_and_what_is_going_on_is() {
    let world = World::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    let at =
        |title: &str, hours| json!({"title": title, "start_time": in_hours(hours), "end_time": in_hours(hours + 2)});
    for (title, hours) in [("over", 1), ("going on", -1), ("later", 5)] {
        published(&world.owner, meetup_with(at(title, hours))).await;
    }
    scored_once(&world).await;
    sqlx::query(
        "update pillarbox_events.event set start_time = now() - interval '2 hours', end_time = now() where title = 'over'",
    )
    .execute(world.db())
    .await
    .unwrap();
    let mut found = titles(&world.app.anyone(), "sort=trending").await;
    found.sort();
    assert_eq!(found, ["going on", "later"]);
    world.app.stop().await;
}

#[tokio::test]
async fn a_few_hours_of_what_is_trending_are_found_without_reading_all_of_it_at_once() {
    let world = World::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    fill(world.db(), 25_000).await;
    scored_once(&world).await;
    let time = |hours: i64| in_hours(hours).format("%Y-%m-%dT%H:%M:%SZ").to_string();
    let mut pages = 1;
    let found =
        walk(&world.app.anyone(), &format!("sort=trending&from={}&to={}", time(200), time(201)), async || pages += 1)
            .await;
    assert_eq!((found.len(), found.iter().collect::<HashSet<_>>().len()), (60, 60));
    assert!(pages > 3, "{pages}: each looks at some of the scores alone, and says where to go on");
    world.app.stop().await;
}

#[tokio::test]
async fn cities_are_suggested_by_how_they_begin_and_how_often_they_are_used() {
    let world = World::start().await;
    let mut events = Vec::new();
    for city in ["zurich", "ZÜRICH", "Zug", "Zürich", "Zermatt", "Łódź", "100% Berlin", "%-Stadt", r"\Ost"] {
        events.push(published(&world.owner, meetup_with(json!({"city": city}))).await);
    }
    made(&world.owner, meetup_with(json!({"city": "Zollikon"}))).await;
    let reader = world.app.anyone();
    let suggested = async |query: &str| -> Vec<(String, i64)> {
        let answer = reader.get(&format!("/event/v1/meta/cities?{query}")).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let items = answer.json()["items"].as_array().unwrap().clone();
        items
            .iter()
            .map(|item: &Value| (item["city"].as_str().unwrap().to_owned(), item["events"].as_i64().unwrap()))
            .collect()
    };
    let named =
        |list: &[(&str, i64)]| list.iter().map(|(city, events)| ((*city).to_owned(), *events)).collect::<Vec<_>>();
    assert_eq!(suggested("q=z").await, named(&[("Zürich", 3), ("Zermatt", 1), ("Zug", 1)]));
    assert_eq!(suggested("q=Z%C3%9C").await, named(&[("Zürich", 3), ("Zug", 1)]));
    assert_eq!(suggested("q=ZUR").await, named(&[("Zürich", 3)]));
    assert_eq!(suggested("q=lod").await, named(&[("Łódź", 1)]));
    assert_eq!(suggested("q=100%25").await, named(&[("100% Berlin", 1)]));
    // Nothing that is typed stands for anything else.
    assert_eq!(suggested("q=%25").await, named(&[("%-Stadt", 1)]));
    assert_eq!(suggested("q=%5C").await, named(&[(r"\Ost", 1)]));
    for typed in ["q=_", "q=z%25"] {
        assert_eq!(suggested(typed).await, named(&[]), "{typed}");
    }
    assert_eq!(suggested("q=urich").await, named(&[]), "it is how they begin");
    assert_eq!(suggested("limit=1").await, named(&[("Zürich", 3)]));
    // A city that comes or goes is seen at once; how often one is used may be an hour old.
    act(&world.owner, &events[1], "unpublish").await;
    published(&world.owner, meetup_with(json!({"city": "Zofingen"}))).await;
    act(&world.owner, &events[4], "unpublish").await;
    patch(&world.owner, &events[2], json!({"city": "Zuoz"})).await;
    assert_eq!(suggested("q=z").await, named(&[("Zürich", 2), ("Zofingen", 1), ("Zuoz", 1)]));
    world.app.stop().await;
}
