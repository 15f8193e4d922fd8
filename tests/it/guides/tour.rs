//! The tour of README, pasted into terminals as a newcomer does it.

use std::time::Duration;

use testkit::{Terminal, program};

use crate::guides::{code_blocks, free_port, repository};
use crate::server::process::DataFolder;

/// Bounds each step. Some wait for a start, or for a retry of a webhook.
const STEP: Duration = Duration::from_secs(60);

/// The tour, with the ports of this test instead of those that another program on this machine may use.
struct Tour {
    blocks: std::vec::IntoIter<String>,
}

impl Tour {
    fn read(port: u16, receiver_port: u16) -> Tour {
        let target = program().parent().unwrap().display().to_string();
        let blocks: Vec<String> = code_blocks("README.md", Some("A tour in five minutes"))
            .into_iter()
            .map(|(_, code)| code.replace("8080", &port.to_string()).replace("9000", &receiver_port.to_string()))
            .map(|code| code.replace("target/debug", &target)) // the same folder, unless CARGO_TARGET_DIR is set
            .collect();
        Tour { blocks: blocks.into_iter() }
    }

    /// The next block, which begins with this text.
    fn next(&mut self, begins: &str) -> String {
        let block = self.blocks.next().expect("README has another block");
        assert!(block.starts_with(begins), "this test has other steps than README: {block}");
        block
    }
}

/// Pastes a block and checks that the output contains these texts.
async fn paste(terminal: &mut Terminal, block: &str, expected: &[&str]) -> String {
    let output = terminal.run(block, STEP).await;
    for text in expected {
        assert!(output.contains(text), "no {text:?} in:\n{output}");
    }
    for failure in ["command not found", "curl: (", "ERROR:", "syntax error", "psql: error"] {
        assert!(!output.contains(failure), "{output}");
    }
    output
}

/// `make run` builds the profile of the tests. A soak run has another profile, in which it would build for minutes.
#[cfg(debug_assertions)]
#[tokio::test]
async fn the_tour_of_the_readme_works_as_pasted() {
    let (port, receiver_port) = (free_port(), free_port());
    let mut tour = Tour::read(port, receiver_port);
    let folder = DataFolder::new();
    let data_dir = folder.path().display().to_string();
    let listen = format!("127.0.0.1:{port}");
    let environment = [("PILLARBOX_DATA_DIR", &*data_dir), ("PILLARBOX_LISTEN", &*listen)];
    // As terminals paste today. A block that starts a shell in which the next one is to run must end there.
    let open = || Terminal::open_with_bracketed_paste(&repository(), &environment);

    let mut first = open();
    first.paste(&tour.next("export PILLARBOX_ADMIN_KEY"));
    first.wait_for("is listening on http://", STEP).await;
    let mut second = open();
    second.run(&tour.next("export PILLARBOX_ADMIN_KEY"), STEP).await;
    paste(&mut second, &tour.next("curl localhost"), &["\"status\":\"", "\nserver "]).await;
    paste(&mut second, &tour.next("pillarbox tenants"), &["\"key\":\"pbx_", "\npbx_", "created by command", "acme"])
        .await;
    paste(&mut second, &tour.next("curl localhost"), &["/role", "ingest"]).await;
    paste(&mut second, &tour.next("TOKEN="), &["created by command"]).await;
    let log = paste(&mut second, &tour.next("psql"), &["order.created", "COMMIT", "ROLLBACK"]).await;
    assert_eq!(log.rsplit("ROLLBACK").next().unwrap().matches("order.created").count(), 1, "{log}");
    send_webhooks(&mut tour, &mut second, open()).await;
    paste(&mut second, &tour.next("ANNA="), &["\"waitlisted\"", "\"active\"", "\"active_participants\":1"]).await;

    first.interrupt();
    second.run("while kill -0 $(pillarbox status | awk '/^server/ { print $3 }'); do sleep 0.2; done", STEP).await;
    first.paste(&tour.next("make rabbitmq"));
    first.wait_for("RabbitMQ runs until you leave this shell", STEP).await;
    first.paste(&tour.next("make run"));
    first.wait_for("is listening on http://", STEP).await;
    paste(&mut first, &tour.next("alias"), &["\"routing_key\":\"order.created\"", "evt_"]).await;
    paste(&mut second, &tour.next("pillarbox cursors"), &["relay."]).await;
    paste(&mut second, &tour.next("kill -9"), &[]).await;
    first.paste("make run &");
    first.wait_for("is listening on http://", STEP).await;
    paste(&mut second, &tour.next("curl"), &["created by command"]).await;
    assert_eq!(tour.blocks.next(), None, "the test has all steps of README");
    second.run("kill $(pillarbox status | awk '/^server/ { print $3 }')", STEP).await;
    first.run("wait", STEP).await;
}

async fn send_webhooks(tour: &mut Tour, second: &mut Terminal, mut third: Terminal) {
    let listen = tour.next("alias");
    third.paste(&listen);
    third.wait_for("http://127.0.0.1", STEP).await;
    paste(second, &tour.next("curl"), &["whsec_", "evt_"]).await;
    third.wait_for("\"seq\":\"1\"", STEP).await;
    third.interrupt();
    paste(second, &tour.next("ID="), &["\"outcome\":\"failed\"", "next_attempt_at"]).await;
    third.paste(&listen);
    third.wait_for("\"seq\":\"2\"", STEP).await;
}
