//! A mail server that accepts every e-mail and stores none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::Outcome;

/// How long a transfer lasts, as it does with a mail server on another machine.
const TRANSFER_TIME: Duration = Duration::from_millis(50);

/// Runs until it is dropped.
pub(super) struct SmtpSink {
    pub(super) address: String,
    /// For each recipient, how many e-mails have arrived, and when the first one did.
    received: Received,
    _serving: AbortOnDropHandle<()>,
}

type Received = Arc<Mutex<HashMap<String, (u64, Instant)>>>;

impl SmtpSink {
    pub(super) async fn start() -> Outcome<SmtpSink> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, received) = (listener.local_addr()?.to_string(), Received::default());
        let counted = received.clone();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, counted.clone()));
            }
        });
        Ok(SmtpSink { address, received, _serving: AbortOnDropHandle::new(serving) })
    }

    /// The number of e-mails to a recipient, and when the first one arrived.
    pub(super) fn received(&self, recipient: &str) -> Option<(u64, Instant)> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).get(recipient).copied()
    }
}

async fn serve(stream: TcpStream, received: Received) -> Outcome<()> {
    let mut stream = BufReader::new(stream);
    stream.write_all(b"220 sink\r\n").await?;
    let (mut line, mut recipients) = (String::new(), Vec::new());
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let answer: &[u8] = match line.trim_end().to_ascii_uppercase() {
            command if command.starts_with("DATA") => {
                stream.write_all(b"354 go on\r\n").await?;
                read_content(&mut stream).await?;
                tokio::time::sleep(TRANSFER_TIME).await;
                let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
                for recipient in recipients.drain(..) {
                    received.entry(recipient).or_insert((0, Instant::now())).0 += 1;
                }
                b"250 accepted\r\n"
            }
            command if command.starts_with("RCPT TO:") => {
                recipients.extend(recipient_of(&line));
                b"250 ok\r\n"
            }
            command if command.starts_with("QUIT") => {
                stream.write_all(b"221 bye\r\n").await?;
                return Ok(());
            }
            command => {
                if command.starts_with("RSET") || command.starts_with("MAIL") {
                    recipients.clear();
                }
                b"250 ok\r\n"
            }
        };
        stream.write_all(answer).await?;
    }
}

/// Reads up to the line that is a single dot.
async fn read_content(stream: &mut BufReader<TcpStream>) -> Outcome<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if stream.read_until(b'\n', &mut line).await? == 0 {
            return Err("the connection was closed in the middle of an e-mail".into());
        }
        if line == b".\r\n" {
            return Ok(());
        }
    }
}

/// The address in `RCPT TO:<ada@example.org>`.
fn recipient_of(line: &str) -> Option<String> {
    let (_, rest) = line.split_once('<')?;
    rest.split_once('>').map(|(address, _)| address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_email_is_counted_for_its_recipient() {
        let sink = SmtpSink::start().await.unwrap();
        let mut stream = BufReader::new(TcpStream::connect(&sink.address).await.unwrap());
        let commands = ["", "EHLO x\r\n", "MAIL FROM:<a@x>\r\n", "RCPT TO:<ada@x>\r\n", "DATA\r\n", "Hello\r\n.\r\n"];
        for (command, answer) in commands.into_iter().zip(["220", "250", "250", "250", "354", "250"]) {
            stream.write_all(command.as_bytes()).await.unwrap();
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert!(line.starts_with(answer), "{command}: {line}");
        }
        assert_eq!(sink.received("ada@x").map(|(count, _)| count), Some(1));
        assert!(sink.received("a@x").is_none());
    }
}
