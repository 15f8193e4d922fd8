//! What people hear of an event, by HTTP alone: with the shipped defaults and the embedded PostgreSQL, and over RabbitMQ and
//! Redis with a database for each service.

use runtime::secret::MasterKey;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestDatabase, TestRedis, TestVhost, eventually};

use super::{DEADLINE, PASSWORD, register_verified};
use crate::events::fixture::{create_event, event_id, meetup_with, post_action};
use crate::joins::fixture::post_join_action;
use crate::server::process::{ADMIN_KEY, DataFolder, serve, up};
use crate::support::text;

const TITLE: &str = "Rust in the evening";

/// The services, each at its address; all may have the same.
struct Site {
    identity: Client,
    events: Client,
    joins: Client,
    notify: Client,
}

impl Site {
    /// Registers and verifies a person. Returns the access token.
    async fn person(&self, address: &str) -> String {
        register_verified(&self.identity, &self.notify.bearer(ADMIN_KEY), address).await;
        let answer = super::log_in(&self.identity, address, PASSWORD).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        text(&answer.json()["access_token"]).to_owned()
    }

    /// The e-mails to an address about events of this type.
    async fn emails(&self, address: &str, event_type: &str) -> Vec<Value> {
        let template = format!("notification.{}", event_type.replace('.', "_"));
        let listed = self.notify.bearer(ADMIN_KEY).get(&format!("/admin/v1/mail?to={address}&limit=100")).await.json();
        let items = listed["items"].as_array().unwrap_or_else(|| panic!("{listed}")).iter();
        items.filter(|mail| mail["template"] == template).cloned().collect()
    }

    /// The notifications in the inbox of a person about events of this type.
    async fn inbox(&self, token: &str, event_type: &str) -> Vec<Value> {
        let listed = self.notify.bearer(token).get("/notify/v1/inbox?limit=100").await.json();
        let items = listed["items"].as_array().unwrap_or_else(|| panic!("{listed}")).iter();
        items.filter(|item| item["event_type"] == event_type).cloned().collect()
    }

    async fn wait_for_both(&self, address: &str, token: &str, event_type: &str) {
        eventually(&format!("{event_type} reaches {address}"), DEADLINE, async || {
            let heard = (self.emails(address, event_type).await.len(), self.inbox(token, event_type).await.len());
            if heard.0 > 0 && heard.1 > 0 { Ok(()) } else { Err(heard) }
        })
        .await;
    }

    async fn run(&self) {
        let owner = self.person("owner@example.org").await;
        let first = self.person("first@example.org").await;
        let second = self.person("second@example.org").await;
        let owner = self.events.bearer(&owner);
        let event = create_event(&owner, meetup_with(json!({"title": TITLE, "capacity": 1}))).await;
        assert_eq!(post_action(&owner, &event, "publish").await.status, 200);

        let act = async |token: &str, action: &str| {
            post_join_action(&self.joins.bearer(token), event_id(&event), action).await
        };
        let joined = eventually("the event can be joined", DEADLINE, async || {
            let joined = act(&first, "join").await;
            if joined.status == 201 { Ok(joined.json()) } else { Err(joined) }
        })
        .await;
        assert_eq!(joined["status"], "active");
        let waits = act(&second, "join").await;
        assert_eq!((waits.status, &waits.json()["status"]), (201, &json!("waitlisted")));
        self.wait_for_both("second@example.org", &second, "join.waitlisted").await;
        let canceled = act(&first, "cancel").await;
        assert_eq!(canceled.status, 200, "{canceled:?}");
        self.wait_for_both("second@example.org", &second, "join.promoted").await;

        // The messages about one event are processed in order, so nothing about the promotion can arrive after this.
        assert_eq!(post_action(&owner, &event, "cancel").await.status, 200);
        self.wait_for_both("second@example.org", &second, "event.canceled").await;
        for event_type in ["join.waitlisted", "join.promoted", "event.canceled"] {
            let emails = self.emails("second@example.org", event_type).await;
            let inbox = self.inbox(&second, event_type).await;
            assert_eq!((emails.len(), inbox.len()), (1, 1), "{event_type}: {emails:?} {inbox:?}");
            assert!(text(&emails[0]["subject"]).contains(TITLE), "{emails:?}");
            assert!(text(&inbox[0]["title"]).contains(TITLE), "{inbox:?}");
            assert_eq!(inbox[0]["subject"], json!({"type": "event", "id": event_id(&event)}), "what to open");
        }
        for event_type in ["join.promoted", "event.canceled"] {
            assert!(self.emails("first@example.org", event_type).await.is_empty(), "{event_type}");
        }
        assert_eq!(self.inbox(&first, "join.canceled").await.len(), 1);
    }
}

#[tokio::test]
async fn a_person_who_is_promoted_hears_of_it_once_by_email_and_in_the_inbox_with_the_shipped_defaults() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let client = Client::new(&process.base_url().await);
    Site { identity: client.clone(), events: client.clone(), joins: client.clone(), notify: client }.run().await;
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_person_who_is_promoted_hears_of_it_once_by_email_and_in_the_inbox_with_a_database_for_each_service() {
    let (vhost, redis, key) = (TestVhost::new().await, TestRedis::new(), MasterKey::generate().to_base64());
    let (folder, amqp) = (DataFolder::new(), vhost.amqp_url());
    let mut services = Vec::new();
    for service in ["identity", "events", "joins", "notify"] {
        let database = TestDatabase::new(&migrations()).await;
        let env = [
            ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
            ("PILLARBOX_SECRET_KEY", key.as_str()),
            ("PILLARBOX_AMQP_URL", &amqp),
            ("PILLARBOX_REDIS_URL", &redis.url()),
            ("PILLARBOX_REDIS_PREFIX", redis.prefix()),
            ("PILLARBOX_BUS", "rabbitmq"),
            ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
            ("PILLARBOX_SERVICES", &format!("[\"{service}\"]")),
        ];
        let process = serve(&folder, &database, &env);
        let client = Client::new(&process.base_url().await);
        services.push((client, process, database));
    }
    let client = |at: usize| services[at].0.clone();
    Site { identity: client(0), events: client(1), joins: client(2), notify: client(3) }.run().await;
    for (_, process, _) in &mut services {
        assert!(process.terminate().await.success());
    }
}
