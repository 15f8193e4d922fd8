//! Pillarbox inside the test process: the real roles on the database of the test.

use std::time::Duration;

use http_kit::auth::{Role, TokenSigner};
use hub::HubSettings;
use runtime::clock::Clock;
use runtime::secret::{MasterKey, Secret};
use server::app::{Running, start};
use server::services::SERVICES;
use server::settings::Settings;
use tokio::net::TcpListener;
use uuid::Uuid;
use webhook_client::AllowedNetworks;

use crate::{Client, TestDatabase, watchdog};

/// A running server. Several of them on one database are replicas of each other.
pub struct TestApp {
    pub settings: Settings,
    master_key: MasterKey,
    running: Running,
}

impl TestApp {
    pub async fn start(database: &TestDatabase) -> TestApp {
        TestApp::start_with(database, |_| {}).await
    }

    /// Starts with settings other than the defaults of the tests. Panics if the settings are invalid or the start fails.
    pub async fn start_with(database: &TestDatabase, change: impl FnOnce(&mut Settings)) -> TestApp {
        TestApp::start_on(&database.url(), change).await
    }

    /// Starts on a migrated database of the test's own servers.
    pub async fn start_on(database_url: &str, change: impl FnOnce(&mut Settings)) -> TestApp {
        watchdog::register_test();
        let mut settings = Settings {
            pool_min: 0,
            pool_max: 5,
            admin_key: Some(Secret::new(format!("pbx_{}", Uuid::new_v4().simple()))),
            database_url: Some(Secret::new(database_url.to_owned())),
            secret_key: Some(Secret::new(master_key_of(database_url).to_base64())),
            hub: HubSettings { allowed_networks: Some(AllowedNetworks::loopback()), ..HubSettings::default() },
            ..Settings::default()
        };
        change(&mut settings);
        settings.check().expect("valid settings");
        let master_key = settings.master_key_given().expect("a valid key").expect("a key");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let options = settings.database().expect("a valid database URL").expect("a database URL");
        let running = start(&settings, SERVICES, listener, options, std::slice::from_ref(&master_key)).await;
        TestApp { settings, master_key, running: running.unwrap_or_else(|error| panic!("{error}")) }
    }

    /// A client without credentials.
    pub fn anonymous(&self) -> Client {
        Client::new(&format!("http://{}", self.running.address))
    }

    /// A client with the admin key of the settings.
    pub fn admin(&self) -> Client {
        self.anonymous().bearer(self.settings.admin_key.as_ref().expect("an admin key").reveal())
    }

    /// A client with a user's token, as `pillarbox token` issues it.
    pub fn user(&self, id: Uuid, role: Option<Role>) -> Client {
        let now = Clock::system().now();
        let token = TokenSigner::new(&self.master_key).sign(id, role, now, Duration::from_secs(600));
        self.anonymous().bearer(&token.expect("a token"))
    }

    /// Finishes the work in progress and stops, as on SIGTERM.
    pub async fn stop(self) {
        self.running.stop().await;
    }
}

/// Replicas on one database must have the same key, so it is derived from the database's URL.
fn master_key_of(database_url: &str) -> MasterKey {
    MasterKey::from_bytes(runtime::secret::digest(database_url))
}
