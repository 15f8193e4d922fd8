//! Greetings: the smallest complete service.
//!
//! Owns the schema `pillarbox_greetings`. Publishes `greeting.received`, and consumes it to answer the greeting.

pub mod contract;
mod flow;
mod http;
mod inbox;
mod store;

use std::sync::Arc;
use std::time::Duration;

use pillarbox::consumers::{Runtime, Subscription};
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use service::{Role, Service, ServiceContext};
use utoipa_axum::router::OpenApiRouter;

/// Time between two runs of the retention task.
const RETENTION_PAUSE: Duration = Duration::from_secs(1);

/// The migrations of the schema `pillarbox_greetings`.
pub const MIGRATIONS: SchemaMigrations =
    SchemaMigrations { schema: "pillarbox_greetings", texts: &[include_str!("migration.sql")] };

pub struct Greetings {
    db: Database,
    clock: Clock,
}

impl Service for Greetings {
    const NAME: &'static str = "greetings";
    const DESCRIPTION: &'static str = "Greetings. Requires a user's token.";
    const WORK: &'static [(Role, &'static str)] = &[(Role::Consume, inbox::CONSUMER)];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = ();

    fn build(context: &ServiceContext, (): &()) -> Result<Greetings, InvalidSetting> {
        Ok(Greetings { db: context.db.clone(), clock: context.clock.clone() })
    }

    fn routes() -> OpenApiRouter<Arc<Greetings>> {
        http::router()
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        vec![inbox::subscription()]
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("greetings.retention".to_owned(), RETENTION_PAUSE);
        let db = runtime.db().clone();
        runtime.spawn(async move { worker.run(|| maintain(db.pool(), flow::remove_old(&db))).await });
    }
}
