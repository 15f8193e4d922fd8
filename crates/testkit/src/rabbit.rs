//! A vhost per test.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use crate::{servers, unique_name};

const API_ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// A RabbitMQ vhost of the test's own, deleted with this value, its connections, queues and exchanges with it.
pub struct TestVhost {
    name: String,
}

impl TestVhost {
    pub async fn new() -> TestVhost {
        // Owned before it is made: if the API fails half-way, the drop deletes what there is.
        let vhost = TestVhost { name: unique_name() };
        let path = format!("/api/vhosts/{}", vhost.name);
        // The API also lets its caller, the user in the URL, do everything in the new vhost.
        tokio::task::spawn_blocking(move || call("PUT", &path, "")).await.expect("the call ends").expect("a new vhost");
        vhost
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Publishes to a queue what no client can be made to say: `properties` as JSON.
    pub async fn publish(&self, queue: &str, properties: &str, body: &str) {
        let path = format!("/api/exchanges/{}/amq.default/publish", self.name);
        let request = format!(
            r#"{{"routing_key":"{queue}","properties":{properties},"payload":{body:?},"payload_encoding":"string"}}"#
        );
        let publishing = tokio::task::spawn_blocking(move || call("POST", &path, &request));
        publishing.await.expect("the call ends").expect("it is published");
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
            // A panic while another one unwinds would abort the process and hide the first.
            eprintln!("vhost {} is not deleted: {error}", self.name);
        }
    }
}

/// One request to RabbitMQ's management API: a fresh connection, and of the answer only the status counts. It blocks, because
/// `drop` cannot await; it is not worth an HTTP client.
fn call(method: &str, path: &str, body: &str) -> io::Result<()> {
    let api = servers::amqp_api();
    let (credentials, address) = api
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('@'))
        .expect("PBX_TEST_AMQP_API is http://user:password@host:port");
    let credentials = BASE64_STANDARD.encode(credentials);

    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(API_ANSWERS_WITHIN))?;
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

        declare(&here, "orders", true).await.expect("it is here");
        declare(&there, "orders", true).await.expect_err("it is not there");
    }

    #[tokio::test]
    async fn a_dropped_vhost_is_gone() {
        let vhost = TestVhost::new().await;
        let url = vhost.amqp_url();
        drop(vhost);
        connect(&url).await.expect_err("there is no such vhost any more");
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
