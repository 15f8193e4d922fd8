//! Support for tests of confidential messages: requests to send an e-mail, and a consumer of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::consumers::{Consumer, ConsumerKind, ConsumerOptions, Handler, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Filter, Message, MessagePattern, Post, Source, post};
use pillarbox::operations::confidential::Blanking;
use runtime::worker::Round;
use serde_json::json;
use serde_json::value::to_raw_value;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::TestDatabase;
use uuid::Uuid;

use crate::consumers::support::Process;
use crate::support::tables_with;

pub(crate) const IDENTITY: Source = Source::new("identity");
pub(crate) const TOPIC: &str = "email.verification.requested";

/// A request to send an e-mail, with a secret in its variables.
pub(crate) fn email(key: &str, secret: &str) -> Post {
    let data = json!({"to": format!("{key}@{secret}.example"), "template": "verification", "locale": "en",
                      "variables": {"token": secret, "name": "Ann"}});
    let payload = to_raw_value(&json!({"idempotency_key": Uuid::now_v7(), "data": data})).unwrap();
    Post::new(TOPIC, payload).with_key(key).confidential_until(in_an_hour())
}

pub(crate) fn in_an_hour() -> DateTime<Utc> {
    Utc::now() + TimeDelta::hours(1)
}

pub(crate) async fn post_email(db: &PgPool, message: &Post) -> Uuid {
    let mut tx = db.begin().await.unwrap();
    let id = post(&mut tx, &IDENTITY, message).await.unwrap();
    tx.commit().await.unwrap();
    id
}

/// The consumer of e-mails. It records what it gets in the table `email_record`, and fails while `is_failing` is set, with an
/// error that quotes the payload.
#[derive(Default)]
pub(crate) struct EmailHandler {
    pub(crate) is_failing: AtomicBool,
}

impl Handler for EmailHandler {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            if self.is_failing.load(Ordering::SeqCst) {
                return Err(format!("cannot render {}", message.payload.get()).into());
            }
            let insert = "insert into email_record (message_id, source, is_blanked) values ($1, $2, $3)";
            let query = sqlx::query(insert).bind(message.message_id).bind(&message.source).bind(message.is_blanked());
            query.execute(&mut **tx).await?;
            Ok(())
        })
    }
}

pub(crate) fn email_subscription(handler: Arc<EmailHandler>, options: ConsumerOptions) -> Subscription {
    let sources = ["identity", "notify"].map(str::to_owned).to_vec();
    let matching = MessagePattern { sources, ..MessagePattern::topic("email.#") };
    Subscription { consumer: "notify.mail".into(), matching, start: StartAt::Beginning, handler, options }
}

/// Starts a process with the consumer of e-mails.
pub(crate) fn email_process(db: &PgPool, handler: &Arc<EmailHandler>, options: ConsumerOptions) -> Process {
    let process = Process::idle(db);
    process.runtime.subscribe(&email_subscription(handler.clone(), options));
    process
}

pub(crate) async fn create_email_table(db: &PgPool) {
    let create = "create table email_record (n bigint generated always as identity, message_id uuid, source text, is_blanked boolean)";
    sqlx::query(create).execute(db).await.unwrap();
}

/// The messages that the consumer of e-mails has recorded.
pub(crate) async fn recorded_emails(db: &PgPool) -> Vec<Uuid> {
    sqlx::query_scalar("select message_id from email_record order by n").fetch_all(db).await.unwrap()
}

/// Registers a consumer of e-mails that no process runs.
pub(crate) async fn register_stalled(db: &PgPool, name: &str) {
    let pattern = MessagePattern { sources: vec!["identity".to_owned()], ..MessagePattern::topic("email.#") };
    let (kind, filter, start) = (ConsumerKind::Relay, Filter::matching(&pattern), StartAt::Beginning);
    Consumer { name: name.to_owned(), kind, filter, start }.register(db).await.unwrap();
}

/// Checks all confidential messages, as the role `maintain` does.
pub(crate) async fn blank(db: &PgPool) {
    let blanking = Blanking::default();
    while blanking.run_once(db).await.unwrap() == Round::Busy {}
}

/// In how many tables the text is.
pub(crate) async fn occurrences(database: &TestDatabase, text: &str) -> usize {
    tables_with(database.pool(), text).await.len()
}

pub(crate) async fn expire_all(db: &PgPool) {
    sqlx::query("update pillarbox.confidential set until = now()").execute(db).await.unwrap();
}

/// The state of a message for a consumer, and its last error.
pub(crate) async fn state(db: &PgPool, consumer: &str, id: Uuid) -> (String, Option<String>) {
    let query = "select status, last_error from pillarbox.outbox_status where consumer = $1 and message_id = $2";
    sqlx::query_as(query).bind(consumer).bind(id).fetch_one(db).await.unwrap()
}
