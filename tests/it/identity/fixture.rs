//! The fixture of the identity service's tests: a server with cheap hashes and without limits, and users with accounts.

use hyper::Method;
use identity::IdentitySettings;
use runtime::secret::digest;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, Response, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::support::{DEADLINE, text};

pub(crate) const PASSWORD: &str = "correct horse battery staple";

pub(crate) struct Fixture {
    pub(crate) database: TestDatabase,
    pub(crate) app: TestApp,
}

/// A user who is signed in.
pub(crate) struct Person {
    pub(crate) id: Uuid,
    pub(crate) email: String,
    /// With the access token.
    pub(crate) client: Client,
    pub(crate) refresh_token: String,
}

impl Fixture {
    pub(crate) async fn start() -> Fixture {
        Fixture::start_with(|_| {}).await
    }

    /// Starts with other settings of the service.
    pub(crate) async fn start_with(change: impl FnOnce(&mut IdentitySettings)) -> Fixture {
        let database = TestDatabase::new(&migrations()).await;
        let app = TestApp::start_with(&database, |settings| {
            unlimited(settings);
            // All requests of the tests are those of one network, which gets half of them.
            settings.pool_max = 10;
            change(&mut settings.identity);
        });
        let app = app.await;
        Fixture { database, app }
    }

    pub(crate) fn db(&self) -> &PgPool {
        self.database.pool()
    }

    /// Another server on the same database.
    pub(crate) async fn replica(&self) -> TestApp {
        let settings = self.app.settings.identity.clone();
        TestApp::start_with(&self.database, |of_replica| {
            unlimited(of_replica);
            of_replica.identity = settings;
        })
        .await
    }

    pub(crate) async fn person(&self, name: &str) -> Person {
        person(&self.app, self.db(), name).await
    }

    /// Posts to `/identity/v1/...` without credentials.
    pub(crate) async fn post(&self, path: &str, body: Value) -> Response {
        self.app.anonymous().post(&format!("/identity/v1/{path}"), body).await
    }

    pub(crate) async fn register(&self, email: &str, password: &str) -> Response {
        self.post("register", json!({"email": email, "password": password, "name": "Ada Lovelace"})).await
    }

    pub(crate) async fn login(&self, email: &str, password: &str) -> Response {
        self.post("login", json!({"email": email, "password": password})).await
    }

    pub(crate) async fn refresh(&self, token: &str) -> Response {
        self.post("refresh", json!({"refresh_token": token})).await
    }

    /// Waits until all accepted requests have been processed.
    pub(crate) async fn wait_until_processed(&self) {
        wait_until_processed(self.db()).await;
    }

    /// The payloads of the messages with this topic, oldest first.
    pub(crate) async fn messages(&self, topic: &str) -> Vec<Value> {
        let query = "select payload from pillarbox.log where source = 'identity' and topic = $1 order by id";
        sqlx::query_scalar(query).bind(topic).fetch_all(self.db()).await.unwrap()
    }

    /// The token of the last message with this topic.
    pub(crate) async fn emailed_token(&self, topic: &str) -> String {
        let messages = self.messages(topic).await;
        text(&messages.last().unwrap()["data"]["variables"]["token"]).to_owned()
    }

    pub(crate) async fn count(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query).fetch_one(self.db()).await.unwrap()
    }

    pub(crate) async fn execute(&self, statement: &'static str) {
        sqlx::query(statement).execute(self.db()).await.unwrap();
    }
}

impl Person {
    /// The same person with the tokens of an answer.
    pub(crate) fn with_tokens(&self, app: &TestApp, answer: &Response) -> Person {
        assert_eq!(answer.status, 200, "{answer:?}");
        let tokens = answer.json();
        Person {
            id: self.id,
            email: self.email.clone(),
            client: app.anonymous().bearer(text(&tokens["access_token"])),
            refresh_token: text(&tokens["refresh_token"]).to_owned(),
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client.get(&format!("/identity/v1/{path}")).await
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Response {
        self.client.send(method, &format!("/identity/v1/{path}"), body).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Response {
        self.send(Method::POST, path, Some(body)).await
    }

    /// The session of the access token.
    pub(crate) async fn session(&self) -> String {
        let sessions = self.get("sessions").await.json();
        let current = sessions["items"].as_array().unwrap().iter().find(|item| item["is_current"] == true).unwrap();
        text(&current["id"]).to_owned()
    }
}

/// Cheap hashes and no limits: most tests are about something else.
pub(crate) fn unlimited(settings: &mut Settings) {
    let identity = &mut settings.identity;
    (identity.hash_memory_kib, identity.hash_iterations, identity.hash_queue_max) = (8, 1, 10_000);
    (identity.login_failures_max, identity.login_failures_per_network_max) = (0, 0);
    (identity.emails_per_account_max, identity.email_requests_per_network_max) = (0, 0);
}

pub(crate) async fn wait_until_processed(db: &PgPool) {
    let waiting = "select count(*) from pillarbox_identity.accepted_request";
    eventually("all accepted requests are processed", DEADLINE, async || {
        sqlx::query_scalar::<_, i64>(waiting).fetch_one(db).await.unwrap() == 0
    })
    .await;
}

/// Registers and verifies an account, and signs in. The address contains the name.
pub(crate) async fn person(app: &TestApp, db: &PgPool, name: &str) -> Person {
    let email = format!("{name}@example.org");
    let body = json!({"email": email, "password": PASSWORD, "name": "Ada Lovelace"});
    let accepted = app.anonymous().post("/identity/v1/register", body).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    wait_until_processed(db).await;
    let id = account_id(db, &email).await;
    let token = known_token(db, id, "verification").await;
    let verified = app.anonymous().post("/identity/v1/verify", json!({"token": token})).await;
    assert_eq!(verified.json(), json!({"password_reset_required": false}), "{verified:?}");
    sign_in(app, id, &email, PASSWORD).await
}

pub(crate) async fn sign_in(app: &TestApp, id: Uuid, email: &str, password: &str) -> Person {
    let tokens = app.anonymous().post("/identity/v1/login", json!({"email": email, "password": password})).await;
    assert_eq!(tokens.status, 200, "{tokens:?}");
    let tokens = tokens.json();
    Person {
        id,
        email: email.to_owned(),
        client: app.anonymous().bearer(text(&tokens["access_token"])),
        refresh_token: text(&tokens["refresh_token"]).to_owned(),
    }
}

pub(crate) async fn account_id(db: &PgPool, email: &str) -> Uuid {
    let query = "select id from pillarbox_identity.account where email = $1";
    sqlx::query_scalar(query).bind(email).fetch_one(db).await.unwrap()
}

/// Replaces the token of an e-mail by one that the test knows.
pub(crate) async fn known_token(db: &PgPool, user: Uuid, kind: &str) -> String {
    let token = format!("{}{}", user.simple(), "A".repeat(11));
    insert_token(db, user, kind, &token).await;
    token
}

pub(crate) async fn insert_token(db: &PgPool, user: Uuid, kind: &str, token: &str) {
    let query = "insert into pillarbox_identity.one_time_token (user_id, kind, digest, expires_at)
                 values ($1, $2, $3, now() + interval '1 hour')
                 on conflict (user_id, kind) do update set digest = excluded.digest";
    sqlx::query(query).bind(user).bind(kind).bind(digest(token).as_slice()).execute(db).await.unwrap();
}
