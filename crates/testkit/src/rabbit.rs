//! A vhost per test.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use crate::{servers, unique_name, watchdog};

/// Bounds the wait for a response of the management API.
const API_TIMEOUT: Duration = Duration::from_secs(20);

/// A RabbitMQ vhost for one test. Dropping it deletes the vhost with its connections, queues and exchanges.
pub struct TestVhost {
    name: String,
}

impl TestVhost {
    pub async fn new() -> TestVhost {
        watchdog::register_test();
        // The value exists before the vhost: if the API call fails half-way, the drop deletes the vhost.
        let vhost = TestVhost { name: unique_name() };
        let path = format!("/api/vhosts/{}", vhost.name);
        // The API also grants the calling user all permissions in the new vhost.
        tokio::task::spawn_blocking(move || call("PUT", &path, "")).await.expect("the call ends").expect("a new vhost");
        vhost
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Publishes to a queue with arbitrary `properties` (JSON), including values that an AMQP client refuses to encode.
    pub async fn publish(&self, queue: &str, properties: &str, body: &str) {
        let path = format!("/api/exchanges/{}/amq.default/publish", self.name);
        let request = format!(
            r#"{{"routing_key":"{queue}","properties":{properties},"payload":{body:?},"payload_encoding":"string"}}"#
        );
        let publishing = tokio::task::spawn_blocking(move || call("POST", &path, &request));
        publishing.await.expect("the call ends").expect("the message is published");
    }

    pub fn amqp_url(&self) -> String {
        let default = servers::amqp_url();
        let (server, _) = default.rsplit_once('/').expect("PBX_TEST_AMQP_URL ends with a vhost");
        format!("{server}/{}", self.name)
    }
}

impl Drop for TestVhost {
    fn drop(&mut self) {
        if let Err(error) = call("DELETE", &format!("/api/vhosts/{}", self.name), "") {
            // A second panic during unwinding would abort the process and hide the first one.
            eprintln!("cannot delete vhost {}: {error}", self.name);
        }
    }
}

/// Sends one request to RabbitMQ's management API on a new connection. Fails unless the status is 2xx. It blocks, because
/// `drop` cannot await.
fn call(method: &str, path: &str, body: &str) -> io::Result<()> {
    let api = servers::amqp_api();
    let (credentials, address) = api
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('@'))
        .expect("PBX_TEST_AMQP_API is http://user:password@host:port");
    let credentials = BASE64_STANDARD.encode(credentials);

    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(API_TIMEOUT))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Basic {credentials}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    if response.starts_with("HTTP/1.1 2") {
        Ok(())
    } else {
        Err(io::Error::other(format!("{method} {path}: {response}")))
    }
}

#[cfg(test)]
mod tests {
    use lapin::options::QueueDeclareOptions;
    use lapin::types::FieldTable;
    use lapin::{Connection, ConnectionProperties};

    use super::*;

    #[tokio::test]
    async fn two_vhosts_do_not_share_a_queue() {
        let [here, there] = [TestVhost::new().await, TestVhost::new().await];
        declare(&here, "orders", false).await.unwrap();

        declare(&here, "orders", true).await.expect("the queue exists in this vhost");
        declare(&there, "orders", true).await.expect_err("the queue does not exist in the other vhost");
    }

    #[tokio::test]
    async fn dropping_a_vhost_deletes_it() {
        let vhost = TestVhost::new().await;
        let url = vhost.amqp_url();
        drop(vhost);
        connect(&url).await.expect_err("the vhost no longer exists");
    }

    async fn declare(vhost: &TestVhost, queue: &str, passive: bool) -> lapin::Result<()> {
        let channel = connect(&vhost.amqp_url()).await?.create_channel().await?;
        let options = QueueDeclareOptions { passive, durable: true, ..Default::default() };
        channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
        Ok(())
    }

    async fn connect(url: &str) -> lapin::Result<Connection> {
        Connection::connect(url, ConnectionProperties::default()).await
    }
}
