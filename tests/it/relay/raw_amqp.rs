//! A client of RabbitMQ that publishes any bytes. Other clients refuse texts that are not UTF-8.

use lapin::uri::AMQPUri;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const FRAME_END: u8 = 0xCE;

/// Flags of properties.
pub(crate) const HEADERS: u16 = 1 << 13;
pub(crate) const MESSAGE_ID: u16 = 1 << 7;
pub(crate) const TYPE: u16 = 1 << 5;
pub(crate) const APP_ID: u16 = 1 << 3;

pub(crate) fn short(text: &[u8]) -> Vec<u8> {
    [&[text.len() as u8], text].concat()
}

pub(crate) fn long(text: &[u8]) -> Vec<u8> {
    [(text.len() as u32).to_be_bytes().as_slice(), text].concat()
}

/// An open channel.
pub(crate) struct RawAmqp(TcpStream);

impl RawAmqp {
    pub(crate) async fn connect(url: &str) -> RawAmqp {
        let uri: AMQPUri = url.parse().unwrap();
        let (host, port, user) = (uri.authority.host, uri.authority.port, uri.authority.userinfo);
        let mut client = RawAmqp(TcpStream::connect((host.as_str(), port)).await.unwrap());
        client.0.write_all(b"AMQP\0\0\x09\x01").await.unwrap();
        client.expect([10, 10]).await;
        let login = format!("\0{}\0{}", user.username, user.password);
        let start_ok = [long(b""), short(b"PLAIN"), long(login.as_bytes()), short(b"en_US")].concat();
        client.method(0, [10, 11], &start_ok).await;
        let mut tune = client.expect([10, 30]).await;
        tune.truncate(6);
        tune.extend([0, 0]); // no heartbeat
        client.method(0, [10, 31], &tune).await;
        client.method(0, [10, 40], &[short(uri.vhost.as_bytes()), short(b""), vec![0]].concat()).await;
        client.expect([10, 41]).await;
        client.method(1, [20, 10], &short(b"")).await;
        client.expect([20, 11]).await;
        client
    }

    /// Publishes a message. `properties`: those of the flags, encoded.
    pub(crate) async fn publish(
        &mut self,
        (exchange, routing_key): (&[u8], &[u8]),
        (flags, properties): (u16, &[u8]),
        body: &[u8],
    ) {
        self.method(1, [60, 40], &[vec![0, 0], short(exchange), short(routing_key), vec![0]].concat()).await;
        let size = (body.len() as u64).to_be_bytes();
        let head = [&[0, 60, 0, 0], size.as_slice(), &flags.to_be_bytes(), properties].concat();
        self.frame(HEADER, 1, &head).await;
        self.frame(BODY, 1, body).await;
    }

    /// Closes the channel. RabbitMQ has processed everything before it answers.
    pub(crate) async fn close(mut self) {
        self.method(1, [20, 40], &[vec![0, 200], short(b""), vec![0, 0, 0, 0]].concat()).await;
        self.expect([20, 41]).await;
    }

    async fn method(&mut self, channel: u16, [class, method]: [u8; 2], arguments: &[u8]) {
        self.frame(METHOD, channel, &[&[0, class, 0, method], arguments].concat()).await;
    }

    async fn frame(&mut self, kind: u8, channel: u16, content: &[u8]) {
        let size = (content.len() as u32).to_be_bytes();
        let frame = [&[kind], channel.to_be_bytes().as_slice(), &size, content, &[FRAME_END]].concat();
        self.0.write_all(&frame).await.unwrap();
    }

    /// Reads a method and returns its arguments. Panics if it is another one.
    async fn expect(&mut self, [class, method]: [u8; 2]) -> Vec<u8> {
        let mut head = [0; 7];
        self.0.read_exact(&mut head).await.unwrap();
        let size = u32::from_be_bytes(head[3..].try_into().unwrap()) as usize;
        let mut content = vec![0; size + 1];
        self.0.read_exact(&mut content).await.unwrap();
        let text = String::from_utf8_lossy(&content).into_owned();
        assert_eq!((head[0], &content[..4]), (METHOD, [0, class, 0, method].as_slice()), "{text}");
        content[4..size].to_vec()
    }
}
