//! A server process of the hub that a test can kill.

use server::settings::Settings;
use testkit::{Client, Pillarbox, program};

use crate::server::process::{ADMIN_KEY, DataFolder};

/// 32 bytes in base64. All replicas share the key.
const SECRET_KEY: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

/// A `pillarbox serve` process that may send webhooks to the loopback network.
pub(crate) struct Replica {
    pub(crate) process: Pillarbox,
    _folder: DataFolder,
}

impl Replica {
    pub(crate) fn start(database_url: &str) -> Replica {
        Replica::start_as(database_url, "api,relay,consume,fanout,dispatch,maintain")
    }

    /// A process with these roles only.
    pub(crate) fn start_as(database_url: &str, roles: &str) -> Replica {
        Replica::start_with(database_url, roles, &[])
    }

    /// A process with these roles beside servers of the test's own process, which have these settings.
    pub(crate) fn start_beside(settings: &Settings, roles: &str) -> Replica {
        let [database_url, secret_key] =
            [&settings.database_url, &settings.secret_key].map(|secret| secret.as_ref().unwrap().reveal().as_str());
        Replica::start_with(database_url, roles, &[("PILLARBOX_SECRET_KEY", secret_key)])
    }

    /// A process with these roles and settings, as environment variables.
    pub(crate) fn start_with(database_url: &str, roles: &str, settings: &[(&str, &str)]) -> Replica {
        let folder = DataFolder::new();
        let serve = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
        let args = [&serve[..], &["--database-url", database_url, "--roles", roles]].concat();
        let env = [
            ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
            ("PILLARBOX_SECRET_KEY", SECRET_KEY),
            ("PILLARBOX_LEASE_MS", "1000"),
            ("PILLARBOX_POOL_MIN", "0"),
            ("PILLARBOX_POOL_MAX", "5"),
            ("PILLARBOX_HUB__ALLOWED_NETWORKS", "127.0.0.0/8"),
        ];
        let env = [&env[..], settings].concat();
        Replica { process: Pillarbox::start(program(), &args, &env), _folder: folder }
    }

    /// A client with the admin key, in the tenant `main`.
    pub(crate) async fn admin(&self) -> Client {
        Client::new(&self.process.base_url().await).bearer(ADMIN_KEY)
    }

    /// The value of a metric without labels. Gauges belong to a whole process: those of the process of the tests are also set by
    /// the servers of other tests.
    pub(crate) async fn metric(&self, name: &str) -> Option<f64> {
        let exported = self.admin().await.get("/metrics").await.text;
        exported.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(|value| value.parse().unwrap())
    }
}
