//! Changes of a project that are repeated, or that depend on a version.

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Response};

use crate::progress::fixture::{BOTH, Backend, Fixture, PROJECTS, change, counts, create, mark, show};

async fn keyed(client: &Client, id: &str, key: &str, fields: Value) -> Response {
    change(&client.with_header("idempotency-key", key), id, fields).await
}

#[tokio::test]
async fn a_repeated_change_whose_response_was_not_stored_does_not_undo_a_later_one() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let (client, db) = (&fixture.client, fixture.db());
        let id = create(client).await;
        let refuse = "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'refused'; end $$;
                      create trigger refuse before insert on pillarbox.idempotency for each row execute function refuse()";
        sqlx::raw_sql(refuse).execute(db).await.unwrap();
        assert_eq!(keyed(client, &id, "crawl", json!({"status": "CRAWLING", "total": 7})).await.status, 500);
        let expected = match backend {
            Backend::Redis => ("CRAWLING".to_owned(), 7, 0, 0),
            // The effect and the response commit together.
            Backend::Postgres => ("INITIALIZING".to_owned(), 0, 0, 0),
        };
        assert_eq!(counts(&show(client, &id).await), expected, "{backend:?}");
        sqlx::raw_sql("drop trigger refuse on pillarbox.idempotency").execute(db).await.unwrap();
        if backend == Backend::Redis {
            change(client, &id, json!({"status": "PROCESSING", "total": 9})).await;
            let repeated = keyed(client, &id, "crawl", json!({"status": "CRAWLING", "total": 7})).await;
            assert_eq!(counts(&repeated), ("PROCESSING".to_owned(), 9, 0, 0));
        }
        // From now on the responses are stored: repeats get the same, at the same time, too.
        let fields = || json!({"status": "PROCESSING_WAIT", "total": 11});
        let (one, other) = tokio::join!(keyed(client, &id, "wait", fields()), keyed(client, &id, "wait", fields()));
        assert_eq!((one.status, &one.text), (200, &other.text), "{backend:?}");
        change(client, &id, json!({"status": "CRAWLING"})).await;
        let again = keyed(client, &id, "wait", fields()).await;
        assert_eq!((&again.text, again.header("idempotent-replayed")), (&one.text, "true"), "{backend:?}");
        assert_eq!(counts(&show(client, &id).await), ("CRAWLING".to_owned(), 11, 0, 0), "{backend:?}");
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn a_change_of_another_version_is_refused_and_a_known_one_is_not_sent_again() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        let id = create(client).await;
        let shown = show(client, &id).await;
        let tag = shown.header("etag").to_owned();
        let path = format!("{PROJECTS}/{id}");
        let known = client.with_header("if-none-match", &tag).get(&path).await;
        assert_eq!((known.status, known.header("etag")), (304, tag.as_str()), "{backend:?}");
        // Items change what is shown, and not what the total depends on.
        mark(client, &id, &["a"]).await;
        assert_eq!(client.with_header("if-none-match", &tag).get(&path).await.status, 200);
        let matching = client.with_header("if-match", &tag);
        let changed = matching.send(Method::PATCH, &path, Some(json!({"total": 5}))).await;
        assert_eq!(changed.status, 200, "{backend:?}: {changed:?}");
        matching.send(Method::PATCH, &path, Some(json!({"total": 6}))).await.assert_problem(412, "stale");
        assert_eq!(counts(&show(client, &id).await), ("INITIALIZING".to_owned(), 5, 1, 0), "{backend:?}");
        let matching = client.with_header("if-match", changed.header("etag"));
        assert_eq!(matching.send(Method::PATCH, &path, Some(json!({"total": 6}))).await.status, 200, "{backend:?}");
        fixture.app.stop().await;
    }
}
