//! The programs of docs/python.md: a producer, a consumer and a webhook receiver in Python.

use serde_json::json;
use server::migrations;
use testkit::{Terminal, TestApp, TestDatabase, TestVhost};

use crate::guides::{code_blocks, free_port};
use crate::relay::support::relay_to;
use crate::server::process::DataFolder;
use crate::support::{DEADLINE, text};

/// With the packages that the guide names; `scripts/setup test` installs them.
pub(crate) const PYTHON: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin/python");

/// With bracketed paste, a block is one command: its lines after `make rabbitmq` would run when that shell ends. And what is
/// produced before the consumer has bound its queue is lost.
#[test]
fn the_blocks_of_the_guide_can_be_pasted() {
    let blocks = code_blocks("docs/python.md", None);
    let block = |line: &str| {
        let has_line = |code: &str| code.lines().any(|found| found == line);
        let at = blocks.iter().position(|(info, code)| info == "sh" && has_line(code));
        at.unwrap_or_else(|| panic!("no block has the line {line:?}"))
    };
    let shell = block("make rabbitmq");
    assert_eq!(blocks[shell].1.lines().last(), Some("make rabbitmq"));
    let (server, prepared) = (block("make run &"), block("alias pillarbox=\"$PWD/target/debug/pillarbox\""));
    assert!(shell < server && server < prepared, "the server starts in that shell, before the commands that need it");
    assert!(block("python consume.py &") < block("python produce.py 2"), "in a later block");
}

#[tokio::test]
async fn a_python_program_posts_in_a_transaction_and_receives_it_from_rabbitmq_and_as_a_verified_webhook() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, |settings| {
        let roles = settings.roles.clone();
        relay_to(&vhost)(settings);
        settings.roles = roles;
    })
    .await;
    let port = free_port().to_string();
    let folder = DataFolder::new();
    std::fs::create_dir(folder.path()).unwrap();
    for (info, code) in code_blocks("docs/python.md", None) {
        if let Some(name) = info.strip_prefix("python ") {
            std::fs::write(folder.path().join(name), code.replace("9001", &port)).unwrap();
        }
    }
    let subscriber = json!({"name": "python", "url": format!("http://127.0.0.1:{port}/"), "event_types": ["order.*"]});
    let subscriber = app.admin().post("/hub/v1/subscribers", subscriber).await;
    assert_eq!(subscriber.status, 201, "{subscriber:?}");
    let subscriber = subscriber.json();
    let (database_url, amqp_url) = (database.url(), vhost.amqp_url());
    let environment = [
        ("DATABASE_URL", &*database_url),
        ("PILLARBOX_AMQP_URL", &*amqp_url),
        ("WEBHOOK_SECRET", text(&subscriber["secret"])),
    ];

    let mut consumer = Terminal::open(folder.path(), &environment);
    consumer.paste(&format!("{PYTHON} consume.py"));
    consumer.wait_for("\nwaiting for messages", DEADLINE).await;
    let mut receiver = Terminal::open(folder.path(), &environment);
    receiver.paste(&format!("{PYTHON} receive.py"));
    receiver.wait_for("\nwaiting for webhooks", DEADLINE).await;
    let mut producer = Terminal::open(folder.path(), &environment);
    let output = producer.run(&format!("{PYTHON} produce.py 1; {PYTHON} produce.py 1"), DEADLINE).await;
    assert!(output.contains("\norder 1 is created\n"), "{output}");
    assert!(output.contains("UniqueViolation"), "the second transaction fails, so it posts nothing: {output}");
    producer.run(&format!("{PYTHON} produce.py 2"), DEADLINE).await;

    consumer.wait_for("order.created {'id': 2, 'total': 9.5}", DEADLINE).await;
    receiver.wait_for("\"id\": 2", DEADLINE).await;
    let (consumed, received) = (consumer.output(), receiver.output());
    assert_eq!(consumed.matches("order.created").count(), 2, "{consumed}");
    assert_eq!(received.matches("\nverified: ").count(), 2, "{received}");
    assert!(!received.contains("refused"), "{received}");
    drop((consumer, receiver, producer));
    app.stop().await;
}
