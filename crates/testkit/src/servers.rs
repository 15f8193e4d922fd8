//! The addresses of the servers that `scripts/with-servers` has started.

use std::path::PathBuf;

/// The maintenance database, as a superuser.
pub fn postgres_url() -> String {
    read("PBX_TEST_POSTGRES_URL")
}

/// RabbitMQ's default vhost, as an administrator.
pub fn amqp_url() -> String {
    read("PBX_TEST_AMQP_URL")
}

/// RabbitMQ's management API, with the credentials in the URL.
pub fn amqp_api() -> String {
    read("PBX_TEST_AMQP_API")
}

pub fn redis_url() -> String {
    read("PBX_TEST_REDIS_URL")
}

/// The directory in which the servers store their files. Tests may also create files there.
pub fn folder() -> PathBuf {
    PathBuf::from(read("PBX_TEST_DIR"))
}

fn read(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: run `make test`, or `scripts/with-servers cargo test NAME` for one test")
    })
}
