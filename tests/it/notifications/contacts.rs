//! The notify service knows the verified address of every account and shows it to no caller.

use hyper::Method;
use serde_json::json;
use testkit::eventually;
use uuid::Uuid;

use crate::identity::fixture::Fixture;
use crate::mail::fixture::post_raw_from;
use crate::operator::commands::Cli;
use crate::support::DEADLINE;

type Contact = (String, String, String, i64);

async fn contact(fixture: &Fixture, user: Uuid) -> Option<Contact> {
    let query = "select email, name, locale, version from pillarbox_notify.contact where user_id = $1";
    sqlx::query_as(query).bind(user).fetch_optional(fixture.db()).await.unwrap()
}

#[tokio::test]
async fn a_verified_account_has_a_contact_and_its_address_is_shown_to_no_caller() {
    let fixture = Fixture::start().await;
    assert_eq!(fixture.register("not-verified@example.org", crate::identity::fixture::PASSWORD).await.status, 202);
    let ada = fixture.person("ada").await;
    let has = async |name: &str| {
        eventually(&format!("the contact is {name}"), DEADLINE, async || match contact(&fixture, ada.id).await {
            Some(found) if found.0 == ada.email && found.1 == name => Ok(()),
            other => Err(other),
        })
        .await;
    };
    let name = contact_name(&fixture, ada.id).await;
    has(&name).await;
    assert_eq!(ada.client.send(Method::PATCH, "/identity/v1/me", Some(json!({"name": "Ada L."}))).await.status, 200);
    has("Ada L.").await;
    assert_eq!(fixture.count("select count(*) from pillarbox_notify.contact").await, 1, "only of verified accounts");

    // A message that arrives late changes nothing.
    let late = json!({"user_id": ada.id, "version": 1, "email": "old@example.org", "name": "Old", "locale": "en"});
    let (source, topic) = (contracts::identity::CONTACTS_SOURCE, contracts::identity::ACCOUNT_CONTACT_CHANGED);
    post_raw_from(fixture.db(), source, topic, &late.to_string()).await;
    super::fixture::wait_until_processed(fixture.db(), "notify.contacts", 3).await;
    has("Ada L.").await;

    // Operators see that there was a message, and not its content.
    let listed = fixture.app.admin().get("/admin/v1/log?topic=account.contact_changed").await;
    let shown = listed.json();
    assert_eq!(shown["items"].as_array().map(Vec::len), Some(3), "{listed:?}");
    assert!(!listed.text.contains("ada@") && !listed.text.contains("Ada L."), "{listed:?}");
    eventually("the messages are blanked", DEADLINE, async || {
        let left = "select count(*) from pillarbox.log where topic = 'account.contact_changed'
                        and payload::text like '%Ada L.%'";
        fixture.count(left).await == 0
    })
    .await;

    // All accounts are announced again when an operator wants it.
    fixture.execute("update pillarbox_identity.account set name = 'Ada M.', version = version + 1").await;
    fixture.execute("delete from pillarbox_notify.contact").await;
    let printed = Cli::new(&fixture.database).ok("user announce").await;
    assert!(printed.contains("1 user is announced again"), "{printed}");
    let replica = fixture.replica().await;
    has("Ada M.").await;
    replica.stop().await;
    fixture.app.stop().await;
}

async fn contact_name(fixture: &Fixture, user: Uuid) -> String {
    let query = "select name from pillarbox_identity.account where id = $1";
    sqlx::query_scalar(query).bind(user).fetch_one(fixture.db()).await.unwrap()
}
