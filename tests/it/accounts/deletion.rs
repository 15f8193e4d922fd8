//! After the deletion of an account nothing contains the person's address or name: no table and no log line.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Pillarbox, TestDatabase, eventually};
use uuid::Uuid;

use super::{DEADLINE, PASSWORD, emailed_token, log_in, register_verified, session};
use crate::mail::fixture::{SmtpServer, wait_for_status};
use crate::server::process::{ADMIN_KEY, DataFolder, serve};
use crate::support::tables_with;

const ADDRESS: &str = "grace.hopper@example.org";
/// The name that `register` gives to every account.
const NAME: &str = "Ada Lovelace";

/// Deletes the account, and waits until no table has personal data of it. The handlers of notify delete its part a moment later.
async fn delete_account(user: &Client, db: &PgPool, personal: &[&str]) {
    let deleted = user.send(Method::DELETE, "/identity/v1/me", Some(json!({"password": PASSWORD}))).await;
    assert!((200..300).contains(&deleted.status), "{deleted:?}");
    eventually("no table has personal data", DEADLINE, async || {
        let mut found = Vec::new();
        for personal in personal {
            found.extend(tables_with(db, personal).await);
        }
        if found.is_empty() { Ok(()) } else { Err(found) }
    })
    .await;
}

fn assert_not_logged(process: &Pillarbox, secrets: &[&str]) {
    let logs = process.logs();
    for secret in secrets {
        let found = logs.lines().find(|line| line.contains(secret));
        assert!(found.is_none(), "`{secret}` is in the log: {}", found.unwrap());
    }
}

#[tokio::test]
async fn no_table_and_no_log_line_has_personal_data_of_a_deleted_account() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let mut process = serve(&folder, &database, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY), ("PILLARBOX_LOG", "trace")]);
    let anonymous = Client::new(&process.base_url().await);
    let admin = anonymous.bearer(ADMIN_KEY);
    register_verified(&anonymous, &admin, ADDRESS).await;
    assert_eq!(anonymous.post("/identity/v1/password/forgot", json!({"email": ADDRESS})).await.status, 202);
    emailed_token(&admin, ADDRESS, "password_reset").await;
    assert_eq!(log_in(&anonymous, ADDRESS, "a wrong password").await.status, 401);
    let (user, _) = session(&anonymous, ADDRESS, PASSWORD).await;
    // A response with personal data under an Idempotency-Key must not be stored.
    let keyed = user.with_header("idempotency-key", &Uuid::new_v4().to_string());
    let named = keyed.send(Method::PATCH, "/identity/v1/me", Some(json!({"name": "Rear Admiral Hopper"}))).await;
    assert_eq!(named.status, 200, "{named:?}");
    assert!(!tables_with(database.pool(), ADDRESS).await.is_empty(), "the search finds the address of an account");

    delete_account(&user, database.pool(), &[ADDRESS, NAME, "Rear Admiral Hopper"]).await;
    // A new mail to the address, as if it had never been registered.
    assert_eq!(anonymous.post("/identity/v1/password/forgot", json!({"email": ADDRESS})).await.status, 202);
    assert!(process.terminate().await.success());
    assert_eq!(tables_with(database.pool(), ADDRESS).await, [""; 0]);
    assert_not_logged(&process, &[ADDRESS, PASSWORD, "Rear Admiral Hopper"]);
}

/// Requests an e-mail with a token for a new password.
async fn request_reset(anonymous: &Client) {
    assert_eq!(anonymous.post("/identity/v1/password/forgot", json!({"email": ADDRESS})).await.status, 202);
}

/// Verifies the address with the token in the e-mail that the server has received.
async fn verify(anonymous: &Client, server: &SmtpServer) {
    let is_token =
        |word: &&str| word.len() >= 40 && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    let text = server.mails()[0].text.clone();
    let token = text.split_whitespace().find(is_token).unwrap_or_else(|| panic!("no token in {text}"));
    let verified = anonymous.post("/identity/v1/verify", json!({"token": token})).await;
    assert_eq!(verified.json(), json!({"password_reset_required": false}), "{verified:?}");
}

/// With a mail server, whose replies quote the address.
#[tokio::test]
async fn nothing_remains_of_the_sent_dead_and_queued_emails_of_a_deleted_account() {
    let (database, folder, server) =
        (TestDatabase::new(&migrations()).await, DataFolder::new(), SmtpServer::start().await);
    let (db, url) = (database.pool(), server.url());
    let settings = [
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_LOG", "trace"),
        ("PILLARBOX_SMTP_URL", url.as_str()),
        ("PILLARBOX_MAIL__RETRY_FIRST_MS", "600000"),
    ];
    let mut process = serve(&folder, &database, &settings);
    let anonymous = Client::new(&process.base_url().await);
    let body = json!({"email": ADDRESS, "password": PASSWORD, "name": NAME});
    assert_eq!(anonymous.post("/identity/v1/register", body).await.status, 202);
    wait_for_status(db, "sent", 1).await;
    verify(&anonymous, &server).await;
    let (user, _) = session(&anonymous, ADDRESS, PASSWORD).await;
    let rule = |reply: &str| json!({"rcpt": {ADDRESS: reply}});
    server.set_rules(&rule("550 5.1.1 <grace.hopper@example.org>: Ada Lovelace has left"));
    request_reset(&anonymous).await;
    wait_for_status(db, "dead", 1).await;
    // It waits for ten minutes, with the reply as its error.
    server.set_rules(&rule("451 4.7.1 <grace.hopper@example.org>: greylisted, Ada Lovelace"));
    request_reset(&anonymous).await;
    eventually("a queued e-mail was deferred", DEADLINE, async || {
        let query =
            "select exists (select from pillarbox_notify.mail where status = 'queued' and last_error like '%451%')";
        sqlx::query_scalar::<_, bool>(query).fetch_one(db).await.unwrap()
    })
    .await;
    // A request that cannot become an e-mail is a dead letter, with its payload. Of a request that is not blanked yet: the copies of
    // a blanked one are blanked already.
    let dead_letter =
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source,
                           tenant, topic, key, headers, payload, at)
                       select 'notify.mail', log.shard, 0, 4, 'x', log.id, log.message_id, source, log.tenant, topic, log.key,
                              headers, json_build_object('data', json_build_object('to', $1::text, 'name', $2::text)), log.at
                       from pillarbox.log join pillarbox.confidential on confidential.log_id = log.id
                       where topic like 'email.%' limit 1 for update of confidential";
    eventually("a request has a dead letter", DEADLINE, async || {
        let inserted = sqlx::query(dead_letter).bind(ADDRESS).bind(NAME).execute(db).await.unwrap().rows_affected();
        if inserted == 0 {
            request_reset(&anonymous).await;
        }
        inserted == 1
    })
    .await;
    let found = tables_with(db, ADDRESS).await;
    assert!(found.contains(&"pillarbox_notify.mail".to_owned()), "the search finds the address: {found:?}");

    delete_account(&user, db, &[ADDRESS, NAME]).await;
    let mails = anonymous.bearer(ADMIN_KEY).get("/admin/v1/mail").await.json();
    assert_eq!(mails["items"], Value::Array(Vec::new()));
    assert!(process.terminate().await.success());
    assert_eq!(tables_with(db, ADDRESS).await, [""; 0]);
    assert_not_logged(&process, &[ADDRESS, NAME, PASSWORD, "greylisted", "has left"]);
}
