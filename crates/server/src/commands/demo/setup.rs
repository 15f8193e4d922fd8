//! What the demo creates before it starts, and removes at its end.

use axum::http::Method;
use cli::api::ApiError;
use runtime::secret::{Secret, random_text};
use serde_json::{Value, json};

use super::receiver::Receiver;
use super::{Demo, with_key};
use crate::commands::Failure;
use cli::table::print_note;

/// The customers: their names, and what they sell.
const TENANTS: [(&str, &str); 2] = [("acme", "Acme Inc. (demo)"), ("globex", "Globex Corp. (demo)")];
/// The subscribers of the operator's own tenant: the name, the endpoint, and other fields.
const SUBSCRIBERS: [(&str, &str); 4] =
    [("demo-billing", "well"), ("demo-warehouse", "flaky"), ("demo-crm", "slow"), ("demo-archive", "strict")];

/// What was created. Everything that was answered is in it, also if a later step failed.
#[derive(Default)]
pub(super) struct Created {
    /// Paths whose deletion removes something of the operator's tenant.
    paths: Vec<String>,
    pub(super) tenants: Vec<DemoTenant>,
    /// A key that posts business events in the tenant `main`.
    pub(super) ingest_key: Option<Secret<String>>,
}

pub(super) struct DemoTenant {
    pub(super) name: String,
    pub(super) key: Secret<String>,
    /// The stream that the demo reads, if the tenant's webhooks may not reach this machine.
    pub(super) stream: Option<String>,
}

/// Creates the tenants with their keys, the subscribers and the streams.
pub(super) async fn create(demo: &Demo, receiver: &Receiver, created: &mut Created) -> Result<(), Failure> {
    let (id, key) = create_key(demo, "demo-producer", "ingest", "main").await?;
    created.paths.push(format!("/admin/v1/keys/{id}"));
    created.ingest_key = Some(key);
    for (name, endpoint) in SUBSCRIBERS {
        let body = json!({"name": name, "url": receiver.url(endpoint), "event_types": ["order.*", "invoice.*"],
            "retry_backoff_seconds": [2, 5, 15, 30], "max_in_flight": 4});
        let subscriber = demo.operator.post("/hub/v1/subscribers", &body).await?;
        created.paths.push(format!("/hub/v1/subscribers/{}", text(&subscriber, "id")?));
    }
    for (name, display_name) in TENANTS {
        // The name of a deleted tenant stays in use while the log has its messages.
        let name = format!("demo-{name}-{}", random_text(4).to_lowercase());
        let body = json!({"name": name, "display_name": display_name});
        demo.operator.post("/admin/v1/tenants", &body).await?;
        let nothing = Secret::new(String::new());
        created.tenants.push(DemoTenant { name: name.clone(), key: nothing, stream: None });
        let (_, key) = create_key(demo, "demo-app", "manage", &name).await?;
        let stream = subscribe_tenant(demo, &key, receiver).await?;
        if let Some(tenant) = created.tenants.last_mut() {
            (tenant.key, tenant.stream) = (key, stream);
        }
    }
    Ok(())
}

async fn create_key(demo: &Demo, name: &str, role: &str, tenant: &str) -> Result<(String, Secret<String>), Failure> {
    let body = json!({"name": name, "role": role, "tenant": tenant});
    let key = demo.operator.post("/admin/v1/keys", &body).await?;
    Ok((text(&key, "id")?.to_owned(), Secret::new(text(&key, "key")?.to_owned())))
}

/// Creates a subscriber of the tenant, or a stream, which it returns, if the hub does not let tenants reach this machine.
async fn subscribe_tenant(demo: &Demo, key: &Secret<String>, receiver: &Receiver) -> Result<Option<String>, Failure> {
    let tenant = with_key(demo, key);
    let body = json!({"name": "demo-shop", "url": receiver.url("flaky"), "event_types": ["*"],
        "retry_backoff_seconds": [2, 5, 15, 30]});
    match tenant.post("/hub/v1/subscribers", &body).await {
        Ok(_) => Ok(None),
        Err(ApiError::Refused(status, _)) if status.as_u16() == 422 => {
            let stream = "demo-orders".to_owned();
            tenant.post("/hub/v1/streams", &json!({"name": stream, "event_types": ["*"]})).await?;
            Ok(Some(stream))
        }
        Err(error) => Err(error.into()),
    }
}

/// Removes everything that was created. What cannot be removed is named on standard error.
pub(super) async fn remove(demo: &Demo, created: &Created) {
    let delete = async |path: &str| {
        if let Err(error) = demo.operator.send(Method::DELETE, path, None).await {
            print_note(&format!("warning: {path} is not removed: {error}"));
        }
    };
    for path in &created.paths {
        if let Some(subscriber) = path.strip_prefix("/hub/v1/subscribers/") {
            discard_dead_letters(demo, subscriber).await;
        }
        delete(path).await;
    }
    for DemoTenant { name, .. } in &created.tenants {
        // Only a suspended tenant can be deleted. Its keys, subscribers and streams are deleted with it.
        let suspend = format!("/admin/v1/tenants/{name}/suspend");
        if let Err(error) = demo.operator.send(Method::POST, &suspend, None).await {
            print_note(&format!("warning: {name} is not suspended: {error}"));
        }
        delete(&format!("/admin/v1/tenants/{name}")).await;
    }
}

/// Discards what a subscriber of the demo has refused: once it is deleted, nothing can retry it.
async fn discard_dead_letters(demo: &Demo, subscriber: &str) {
    let pause = format!("/hub/v1/subscribers/{subscriber}/pause");
    let paused = demo.operator.send(Method::POST, &pause, None).await;
    let discarded = demo.operator.post("/hub/v1/dead-letters/discard", &json!({"subscriber_id": subscriber})).await;
    if let Err(error) = paused.and(discarded) {
        print_note(&format!("warning: the dead letters of {subscriber} are not discarded: {error}"));
    }
}

/// The text of a field in a response.
pub(super) fn text<'a>(body: &'a Value, field: &str) -> Result<&'a str, Failure> {
    body[field].as_str().ok_or_else(|| Failure::Other(format!("the server's response has no `{field}`")))
}
