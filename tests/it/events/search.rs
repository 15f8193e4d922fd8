//! Full-text search of events, and suggested cities.

use std::collections::HashSet;

use serde_json::{Value, json};
use uuid::Uuid;

use crate::events::fixture::{
    Fixture, create_event, feed_titles, insert_events, meetup_with, patch_event, post_action, publish_event, walk_feed,
};

#[tokio::test]
async fn a_search_finds_words_and_ranks_titles_higher() {
    let fixture = Fixture::start().await;
    for (title, description) in [
        ("Chess evening", "Bring a friend."),
        ("Friendly football", "No chess, we promise. Also running."),
        ("Run in the park", "Runners of all ages."),
    ] {
        publish_event(&fixture.owner, meetup_with(json!({"title": title, "description": description}))).await;
    }
    create_event(&fixture.owner, meetup_with(json!({"title": "Chess in secret"}))).await;
    let reader = fixture.app.anonymous();
    assert_eq!(feed_titles(&reader, "q=chess").await, ["Chess evening", "Friendly football"]);
    assert_eq!(
        feed_titles(&reader, "q=running").await,
        ["Run in the park", "Friendly football"],
        "words match by their stems"
    );
    assert_eq!(feed_titles(&reader, "q=chess%20-football").await, ["Chess evening"]);
    assert_eq!(feed_titles(&reader, "q=chess&sort=latest").await.len(), 2);
    assert_eq!(feed_titles(&reader, "q=chess&city=bern").await.len(), 0);
    for odd in ["q=the", "q=%27%22%28%26%7C%21%3A*", "q=%5C"] {
        assert_eq!(feed_titles(&reader, odd).await.len(), 0, "{odd}");
    }
    let walked = walk_feed(&reader, "q=chess&limit=1", async || {}).await;
    assert_eq!(walked.len(), 2);
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_last_word_of_a_search_finds_longer_words() {
    let fixture = Fixture::start().await;
    for (title, description) in [
        ("Ferrara by night", "A walk."),
        ("Ferret show", "Bring yours to the theatre."),
        ("A walk", "From Ferrara to Bologna, until the evening."),
        ("Evening run", "Ten kilometres."),
    ] {
        publish_event(&fixture.owner, meetup_with(json!({"title": title, "description": description}))).await;
    }
    let reader = fixture.app.anonymous();
    let mut found = feed_titles(&reader, "q=ferr").await;
    assert_eq!(found.pop().unwrap(), "A walk", "titles rank higher");
    found.sort();
    assert_eq!(found, ["Ferrara by night", "Ferret show"]);
    assert_eq!(feed_titles(&reader, "q=ferrara").await, ["Ferrara by night", "A walk"]);
    assert_eq!(feed_titles(&reader, "q=walk%20ferr").await.len(), 2, "all words must match");
    assert_eq!(feed_titles(&reader, "q=walk%20ferre").await.len(), 0);
    assert_eq!(feed_titles(&reader, "q=kilometres%20or%20ferre").await.len(), 2);
    assert_eq!(feed_titles(&reader, "q=-show%20ferr&sort=latest").await.len(), 2);
    assert_eq!(feed_titles(&reader, "q=walk%20-ferr").await.len(), 2, "an excluded word is no prefix");
    // A word that is stored as another stem is found while it is typed: `evening` is stored as `even`.
    for typed in ["even", "eveni", "evenin", "evening", "evening%20ru"] {
        assert_eq!(feed_titles(&reader, &format!("q={typed}")).await[0], "Evening run", "{typed}");
    }
    // Neither a phrase, nor an excluded word, nor a word that is not indexed is a prefix.
    for none in ["q=%22ferr%22", "q=%22by%20nigh%22", "q=the", "q=f%3A*", "q=ferr%3A*%20%26%20walk", "q=%21ferr"] {
        let titles = feed_titles(&reader, none).await;
        assert!(!titles.iter().any(|title| title.contains("Ferr")), "{none}: {titles:?}");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_search_ranks_the_next_thousand_events_and_pages_through_them() {
    let fixture = Fixture::start().await;
    insert_events(fixture.db(), 1_500).await;
    let by_time: Vec<Uuid> = sqlx::query_scalar("select id from pillarbox_events.event order by start_time, id")
        .fetch_all(fixture.db())
        .await
        .unwrap();
    // Rows move within their table when a count changes.
    let change_counts = async || {
        sqlx::query(
            "update pillarbox_events.event set active_participants = 1 + active_participants where random() < 0.5",
        )
        .execute(fixture.db())
        .await
        .unwrap();
    };
    let found = walk_feed(&fixture.app.anonymous(), "q=event&limit=100", change_counts).await;
    let (distinct, next): (HashSet<&Uuid>, HashSet<&Uuid>) =
        (found.iter().collect(), by_time[..1_000].iter().collect());
    assert_eq!((found.len(), distinct.symmetric_difference(&next).count()), (1_000, 0));
    let latest = walk_feed(&fixture.app.anonymous(), "q=event&sort=latest&limit=100", change_counts).await;
    assert!(latest == by_time, "{}: this order needs no ranking, so it covers all events", latest.len());
    fixture.app.stop().await;
}

#[tokio::test]
async fn cities_are_suggested_by_prefix_and_ranked_by_use() {
    let fixture = Fixture::start().await;
    let mut events = Vec::new();
    for city in ["zurich", "ZÜRICH", "Zug", "Zürich", "Zermatt", "Łódź", "100% Berlin", "%-Stadt", r"\Ost"] {
        events.push(publish_event(&fixture.owner, meetup_with(json!({"city": city}))).await);
    }
    create_event(&fixture.owner, meetup_with(json!({"city": "Zollikon"}))).await;
    let reader = fixture.app.anonymous();
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
    // No character of the query is a wildcard.
    assert_eq!(suggested("q=%25").await, named(&[("%-Stadt", 1)]));
    assert_eq!(suggested("q=%5C").await, named(&[(r"\Ost", 1)]));
    for typed in ["q=_", "q=z%25"] {
        assert_eq!(suggested(typed).await, named(&[]), "{typed}");
    }
    assert_eq!(suggested("q=urich").await, named(&[]), "only prefixes match");
    assert_eq!(suggested("limit=1").await, named(&[("Zürich", 3)]));
    // New and removed cities are visible at once; the number of events may be an hour old.
    post_action(&fixture.owner, &events[1], "unpublish").await;
    publish_event(&fixture.owner, meetup_with(json!({"city": "Zofingen"}))).await;
    post_action(&fixture.owner, &events[4], "unpublish").await;
    patch_event(&fixture.owner, &events[2], json!({"city": "Zuoz"})).await;
    assert_eq!(suggested("q=z").await, named(&[("Zürich", 2), ("Zofingen", 1), ("Zuoz", 1)]));
    fixture.app.stop().await;
}
