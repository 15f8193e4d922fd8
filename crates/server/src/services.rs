//! The list of services, and how the server uses a service without knowing its type.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use admin::Administration;
use admin::tenants::flow::DeleteTenantRows;
use axum::Router;
use events::Events;
use hub::Hub;
use identity::Identity;
use joins::Joins;
use notify::Notify;
use pillarbox::consumers::{Runtime, Subscription};
use pillarbox::database::{Database, Migrations, SchemaMigrations};
use progress::Progress;
use runtime::MetricHelp;
use runtime::config::InvalidSetting;
use runtime::worker::Round;
use service::{AddedSubscriptions, Role, Roles, Service, ServiceContext};
use tokio::sync::Mutex;
use utoipa::openapi::OpenApi;
use utoipa::openapi::tag::TagBuilder;

use crate::message_bus::MessageBus;
use crate::settings::{Bus, Settings};

/// The longest time until a message handler runs that depends on data, such as that of a new aggregate type.
const ADDED_SUBSCRIPTIONS_PAUSE: Duration = Duration::from_secs(1);

/// A list of services, in the order in which they are started and described.
pub type ServiceList = &'static [&'static dyn ServiceEntry];

/// Every service of this binary. A new service adds its line here.
pub static SERVICES: ServiceList = &[
    &Entry::<Hub> { section: |settings| settings.hub.clone() },
    &Entry::<Events> { section: |settings| settings.events.clone() },
    &Entry::<Joins> { section: |_| () },
    &Entry::<Identity> { section: |settings| settings.identity.clone() },
    &Entry::<Progress> {
        section: |settings| progress::Settings {
            progress: settings.progress.clone(),
            redis_prefix: settings.redis_prefix.clone(),
        },
    },
    &Entry::<Notify> {
        section: |settings| notify::Settings { notify: settings.notify.clone(), mail: settings.mail.clone() },
    },
];

/// A service in the list: its type, and its part of the settings.
pub struct Entry<S: Service> {
    pub section: fn(&Settings) -> S::Settings,
}

/// The static part of a service: what every process knows about it, whether it runs the service or not.
pub trait ServiceEntry: Sync {
    fn name(&self) -> &'static str;
    /// The OpenAPI description of the service's routes, with its tag.
    fn describe(&self) -> OpenApi;
    /// See [`Service::METRICS`].
    fn metrics(&self) -> &'static [MetricHelp];
    /// See [`Service::MIGRATIONS`].
    fn migrations(&self) -> SchemaMigrations;
    /// See [`Service::TENANT_ROUTES`].
    fn tenant_routes(&self) -> &'static [&'static str];
    /// See [`Service::WORK`].
    fn work(&self) -> &'static [(Role, &'static str)];
    /// See [`Service::delete_tenant_rows`].
    fn delete_tenant_rows(&self) -> DeleteTenantRows;
    /// Checks the service's section of the settings. Fails with the name of the invalid setting.
    fn check(&self, settings: &Settings) -> Result<(), InvalidSetting>;
    fn build(&self, context: &ServiceContext, settings: &Settings) -> Result<Arc<dyn BuiltService>, InvalidSetting>;
}

/// A service that this process runs: the part of [`Service`] that does not need its type.
pub trait BuiltService: Send + Sync {
    fn router(self: Arc<Self>) -> Router;
    fn subscriptions(&self) -> Vec<Subscription>;
    fn added_subscriptions<'a>(&'a self, db: &'a Database) -> AddedSubscriptions<'a>;
    fn start_workers(&self, runtime: &Runtime, roles: &Roles);
    fn start_maintenance(&self, runtime: &Runtime);
}

impl<S: Service> ServiceEntry for Entry<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn describe(&self) -> OpenApi {
        let mut described = S::routes().into_openapi();
        described.tags = Some(vec![TagBuilder::new().name(S::NAME).description(Some(S::DESCRIPTION)).build()]);
        described
    }

    fn metrics(&self) -> &'static [MetricHelp] {
        S::METRICS
    }

    fn migrations(&self) -> SchemaMigrations {
        S::MIGRATIONS
    }

    fn tenant_routes(&self) -> &'static [&'static str] {
        S::TENANT_ROUTES
    }

    fn work(&self) -> &'static [(Role, &'static str)] {
        S::WORK
    }

    fn delete_tenant_rows(&self) -> DeleteTenantRows {
        S::delete_tenant_rows
    }

    fn check(&self, settings: &Settings) -> Result<(), InvalidSetting> {
        S::check(&(self.section)(settings))
    }

    fn build(&self, context: &ServiceContext, settings: &Settings) -> Result<Arc<dyn BuiltService>, InvalidSetting> {
        Ok(Arc::new(S::build(context, &(self.section)(settings))?))
    }
}

impl<S: Service> BuiltService for S {
    fn router(self: Arc<Self>) -> Router {
        Router::from(S::routes().with_state(self))
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        Service::subscriptions(self)
    }

    fn added_subscriptions<'a>(&'a self, db: &'a Database) -> AddedSubscriptions<'a> {
        Service::added_subscriptions(self, db)
    }

    fn start_workers(&self, runtime: &Runtime, roles: &Roles) {
        Service::start_workers(self, runtime, roles);
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        Service::start_maintenance(self, runtime);
    }
}

impl Settings {
    /// Checks what the types cannot express. Fails with the name of the first invalid setting and the values it accepts.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        self.check_values()?;
        SERVICES.iter().try_for_each(|service| service.check(self))?;
        let known: Vec<&str> = SERVICES.iter().map(|service| service.name()).collect();
        self.check_service_names(&known)
    }
}

/// The migrations of the log, of the installation and of these services. They apply to every database, whatever services its
/// processes run.
pub fn migrations(services: ServiceList) -> Migrations {
    let of_services = services.iter().map(|entry| entry.migrations());
    Migrations::default().with([Administration::MIGRATIONS]).with(of_services)
}

/// Builds the services that the settings enable.
pub(crate) fn build(
    services: ServiceList,
    context: &ServiceContext,
    settings: &Settings,
) -> Result<Vec<Arc<dyn BuiltService>>, InvalidSetting> {
    let enabled = services.iter().filter(|entry| settings.has_service(entry.name()));
    enabled.map(|entry| entry.build(context, settings)).collect()
}

/// Starts the background work of the services, as far as it belongs to the roles of this process.
pub(crate) fn start_workers(
    services: &[Arc<dyn BuiltService>],
    settings: &Settings,
    runtime: &Arc<Runtime>,
    bus: Option<&MessageBus>,
) {
    let roles = settings.roles();
    for service in services {
        service.start_workers(runtime, &roles);
        if roles.contains(Role::Maintain) {
            service.start_maintenance(runtime);
        }
    }
    if roles.contains(Role::Consume) {
        for subscription in services.iter().flat_map(|service| service.subscriptions()) {
            subscribe(settings, runtime, bus, subscription);
        }
        start_added_subscriptions(services, settings, runtime, bus);
    }
}

/// Starts the message handlers that depend on data, at once and whenever there are new ones.
fn start_added_subscriptions(
    services: &[Arc<dyn BuiltService>],
    settings: &Settings,
    runtime: &Arc<Runtime>,
    bus: Option<&MessageBus>,
) {
    let worker = runtime.worker("subscriptions".to_owned(), ADDED_SUBSCRIPTIONS_PAUSE);
    let (services, settings, bus) = (services.to_vec(), settings.clone(), bus.cloned());
    let shared = runtime.clone();
    runtime.spawn(async move {
        let started = Mutex::new(BTreeSet::new());
        let round = async || -> Result<Round, sqlx::Error> {
            for service in &services {
                for added in service.added_subscriptions(shared.db()).await? {
                    if started.lock().await.insert(added.consumer.clone()) {
                        subscribe(&settings, &shared, bus.as_ref(), added);
                    }
                }
            }
            Ok(Round::Idle)
        };
        worker.run(round).await;
    });
}

/// Runs a message handler on the configured bus. The handler behaves the same on both.
fn subscribe(settings: &Settings, runtime: &Runtime, bus: Option<&MessageBus>, subscription: Subscription) {
    match (settings.bus, bus) {
        (Bus::Rabbitmq, Some(bus)) => {
            relay::bus::subscribe(runtime, &settings.relay, &bus.broker, &bus.signer, subscription);
        }
        // `Settings::check` refuses the RabbitMQ bus without a broker.
        (Bus::Postgres, _) | (Bus::Rabbitmq, None) => {
            runtime.subscribe(&relay::bus::with_intake_sources(&settings.relay, subscription));
        }
    }
}
