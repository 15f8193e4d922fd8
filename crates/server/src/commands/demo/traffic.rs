//! Orders of the operator's own application, events of tenants, and business events that notify people.

use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::Method;
use cli::api::Api;
use runtime::secret::random_text;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::account::{self, Manager};
use super::setup::Created;
use super::{Demo, store, used_servers, with_key};
use crate::commands::Failure;
use cli::table::print_note;

/// The kinds of events that share the rate: orders, two tenants, business events, and gatherings with projects.
pub(super) const KINDS: f64 = 5.0;
/// The restaurant whose people are notified. Its number is unlikely to be another one's.
const RESTAURANT: u64 = 900_000_001;
/// One of so many business events is urgent, and becomes an e-mail at once.
const EVENTS_PER_EMAIL: usize = 5;
/// How long a pull of a stream waits for events.
const PULL_WAIT: Duration = Duration::from_secs(2);

/// Starts a task for each kind of event.
pub(super) fn start(demo: &Demo, created: &Created, tasks: &TaskTracker) -> Result<(), Failure> {
    tasks.spawn(post_orders(demo.clone()));
    for tenant in &created.tenants {
        let api = with_key(demo, &tenant.key);
        tasks.spawn(post_tenant_events(demo.clone(), api.clone()));
        if let Some(stream) = &tenant.stream {
            tasks.spawn(pull(demo.clone(), api, stream.clone()));
        }
    }
    if let Some(key) = &created.ingest_key {
        tasks.spawn(notify(demo.clone(), with_key(demo, key)));
    }
    Ok(())
}

/// The steps of an order, one after the other, posted in SQL.
async fn post_orders(demo: Demo) {
    let mut number = 0_u64;
    while demo.wait(demo.pause).await {
        number += 1;
        let (order, step) = (number.div_ceil(3), number % 3);
        let topic =
            ["order.created", "order.paid", "order.shipped"][usize::try_from((step + 2) % 3).unwrap_or_default()];
        let body = json!({"order": order, "total": 19.9 + (order % 7) as f64 * 10.0, "currency": "EUR",
            "items": [{"sku": format!("SKU-{}", order % 20), "count": 1 + order % 3}]});
        match post_order(&demo, topic, &body, &format!("demo-order-{order}")).await {
            Ok(()) => demo.counts.orders.fetch_add(1, Ordering::Relaxed),
            Err(_) => demo.counts.refused.fetch_add(1, Ordering::Relaxed),
        };
    }
}

async fn post_order(demo: &Demo, topic: &str, order: &Value, key: &str) -> sqlx::Result<()> {
    let mut tx = demo.db.begin().await?;
    store::post_order(&mut tx, topic, order, key).await?;
    tx.commit().await
}

/// Events that a tenant's application posts over HTTP.
async fn post_tenant_events(demo: Demo, tenant: Api) {
    let types = ["invoice.created", "invoice.paid", "customer.created", "subscription.renewed"];
    let mut number = 0_usize;
    while demo.wait(demo.pause).await {
        number += 1;
        let customer = format!("customer-{}", number % 9);
        let body = json!({"event_type": types[number % types.len()], "ordering_key": customer,
            "payload": {"number": number, "customer": customer, "amount": 5 + number % 50}});
        let posted = tenant.post("/hub/v1/events", &body).await;
        demo.count(posted, &demo.counts.tenant_events);
    }
}

/// Reads a stream, as a consumer does that has no endpoint: each pull acknowledges the messages of the one before.
async fn pull(demo: Demo, tenant: Api, stream: String) {
    let path = format!("/hub/v1/streams/{stream}/pull");
    let mut acknowledge = Value::Null;
    while !demo.stop.is_cancelled() {
        let mut body = json!({"reader": "demo", "wait_ms": PULL_WAIT.as_millis() as u64, "max": 100});
        if !acknowledge.is_null() {
            body["acknowledge"] = acknowledge.take();
        }
        let pulled = tokio::select! {
            () = demo.stop.cancelled() => break,
            pulled = tenant.post(&path, &body) => pulled,
        };
        match pulled {
            Ok(pulled) => acknowledge = pulled["cursor"].clone(),
            Err(_) if demo.wait(PULL_WAIT).await => {}
            Err(_) => break,
        }
    }
}

/// Business events of a restaurant, about which people are notified. Nothing waits for the registration of the manager, which
/// takes seconds on a slow machine.
async fn notify(demo: Demo, producer: Api) {
    let waiter = Uuid::now_v7().to_string();
    tokio::join!(with_recipient(&demo, &waiter, post_business_events(&demo, &producer)), notify_manager(&demo));
}

/// A person with an address, who gets e-mails. None with a mail server, which would send them.
async fn notify_manager(demo: &Demo) {
    match used_servers(&demo.operator).await {
        Ok(used) if used.iter().any(|name| name == "smtp") => return,
        Ok(_) => {}
        Err(error) => return print_note(&format!("warning: no e-mails are sent: {error}")),
    }
    match Manager::register(demo).await {
        Ok(manager) => {
            with_recipient(demo, &manager.id, demo.stop.cancelled()).await;
            manager.remove(demo).await;
        }
        Err(error) => print_note(&format!("warning: no e-mails are sent: {error}")),
    }
}

/// Makes a user a recipient of the restaurant while `work` is under way.
async fn with_recipient(demo: &Demo, user: &str, work: impl Future<Output = ()>) {
    let recipient = format!("/notify/v1/recipients/RESTAURANT/{RESTAURANT}/{user}");
    let added = demo.operator.send(Method::PUT, &recipient, None).await;
    work.await;
    if added.is_ok() && demo.operator.send(Method::DELETE, &recipient, None).await.is_err() {
        print_note(&format!("warning: the recipient {user} of restaurant {RESTAURANT} is not removed"));
    }
}

async fn post_business_events(demo: &Demo, producer: &Api) {
    let types = ["RESERVATION_REQUESTED", "RESERVATION_CANCELED", "REVIEW_POSTED"];
    let mut number = 0_usize;
    while demo.wait(demo.pause * 2).await {
        number += 1;
        let body = match number % EVENTS_PER_EMAIL {
            0 => account::urgent_event(number, RESTAURANT),
            _ => json!({"event_id": format!("demo-{}", random_text(16)), "event_type": types[number % types.len()],
                "aggregate_type": "RESTAURANT", "aggregate_id": RESTAURANT, "payload": {"guests": 1 + number % 6}}),
        };
        let posted = producer.post("/notify/v1/events", &body).await;
        demo.count(posted, &demo.counts.notifications);
    }
}
