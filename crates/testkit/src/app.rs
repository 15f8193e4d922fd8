//! Pillarbox in the test's own process: the real roles on a database of the test's own.

use hub::HubSettings;
use hub::address::Allowed;
use kit::auth::{Role, TokenSigner};
use kit::clock::Clock;
use kit::secret::{MasterKey, Secret};
use pillarbox::app::{Running, start};
use pillarbox::settings::Settings;
use std::time::Duration;
use tokio::net::TcpListener;
use uuid::Uuid;

use crate::{Client, TestDatabase};

/// A running server. A test may start several on one database: they are replicas of each other.
pub struct TestApp {
    pub settings: Settings,
    master_key: MasterKey,
    running: Running,
}

impl TestApp {
    pub async fn start(database: &TestDatabase) -> TestApp {
        TestApp::start_with(database, |_| {}).await
    }

    /// With other settings than the test's defaults.
    pub async fn start_with(database: &TestDatabase, change: impl FnOnce(&mut Settings)) -> TestApp {
        let mut settings = Settings {
            pool_min: 0,
            pool_max: 5,
            admin_key: Some(Secret::new(format!("pbx_{}", Uuid::new_v4().simple()))),
            database_url: Some(Secret::new(database.url())),
            secret_key: Some(Secret::new(master_key_of(database).to_base64())),
            hub: HubSettings { allowed_networks: Some(Allowed::loopback()), ..HubSettings::default() },
            ..Settings::default()
        };
        change(&mut settings);
        settings.check().expect("good settings");
        let master_key = settings.master_key_given().expect("a good key").expect("a key");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let options = settings.database().expect("a good address").expect("a database");
        let running = start(&settings, listener, options, std::slice::from_ref(&master_key)).await;
        TestApp { settings, master_key, running: running.unwrap_or_else(|error| panic!("{error}")) }
    }

    /// Calls as nobody.
    pub fn anyone(&self) -> Client {
        Client::new(&format!("http://{}", self.running.address))
    }

    /// Calls with the admin key of the settings.
    pub fn admin(&self) -> Client {
        self.anyone().bearer(self.settings.admin_key.as_ref().expect("an admin key").reveal())
    }

    /// Calls as a user, with a token as `pillarbox token` makes it.
    pub fn user(&self, id: Uuid, role: Option<Role>) -> Client {
        let now = Clock::system().now();
        let token = TokenSigner::new(&self.master_key).sign(id, role, now, Duration::from_secs(600));
        self.anyone().bearer(&token.expect("a token"))
    }

    /// Drains and stops, as SIGTERM does.
    pub async fn stop(self) {
        self.running.stop().await;
    }
}

/// Replicas on one database share one key, so it follows from the database's name.
fn master_key_of(database: &TestDatabase) -> MasterKey {
    MasterKey::from_bytes(kit::secret::digest(&database.url()))
}
