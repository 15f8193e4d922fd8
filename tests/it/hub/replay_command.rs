//! `pillarbox replay webhooks`: the same job on the command line, with a progress bar in a terminal.

use serde_json::json;
use testkit::{Receiver, Terminal, program};

use crate::hub::fixture::{Fixture, numbered_events, post_batch, subscribe, wait_for_webhooks};
use crate::hub::replays::show_replay;
use crate::operator::commands::Cli;
use crate::server::process::DataFolder;
use crate::support::{DEADLINE, text};

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_of_webhooks_shows_a_bar_in_a_terminal_and_is_controlled_from_the_command_line() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let (cli, receiver) = (Cli::with_server(&database, &app), Receiver::start().await);
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    post_batch(&manager, numbered_events(2, 1..=100)).await;
    wait_for_webhooks(&receiver, 200).await;
    let of_tenant = "--tenant acme";
    let counted = cli.ok(&format!("replay webhooks --from 1h --dry-run {of_tenant}")).await;
    assert!(counted.contains("200 messages would be sent"), "{counted}");
    assert!(cli.refused(&format!("replay webhooks {of_tenant}")).await.contains("--from"));
    assert!(cli.refused("replay").await.contains("--consumer"));

    let folder = DataFolder::new();
    let admin = app.admin();
    let mut terminal = Terminal::open(std::env::temp_dir().as_path(), &[("PILLARBOX_API_KEY", admin.credential())]);
    let connection = format!("--data-dir {} --server {}", folder.text(), admin.base());
    let command = format!("replay webhooks --from 1h --rate 100 {of_tenant}");
    let shown = terminal.run(&format!("{} {command} {connection} > /dev/null", program().display()), DEADLINE).await;
    // The same line is written again and again, on standard error.
    let is_rewritten =
        |line: &str| line.contains("running [") && line.contains("100 %  200 created, 200 delivered, 0 dead");
    assert!(shown.lines().any(is_rewritten), "{shown}");
    assert!(shown.contains("running [") && shown.contains("/s, ") && shown.contains(" s left"), "{shown}");
    assert_eq!(receiver.count(), 400);

    let lines = cli.ok(&format!("replay webhooks --from 1h {of_tenant}")).await;
    assert!(lines.contains("finished") && !lines.contains('\r'), "lines, where there is no terminal: {lines}");
    let slow = format!("--subscriber {} --from 1h --rate 1 --no-wait {of_tenant}", text(&subscriber["id"]));
    let created = cli.ok(&format!("replay webhooks {slow}")).await;
    let id = created.split_whitespace().nth(1).unwrap();
    for (action, state) in [("pause", "paused"), ("resume", "running"), ("cancel", "canceled")] {
        assert!(cli.ok(&format!("replay webhooks {action} {id} {of_tenant}")).await.contains(id));
        let shown = show_replay(&manager, &json!({"id": id})).await;
        let is_expected = shown["state"] == state || (state == "running" && shown["state"] == "pending");
        assert!(is_expected, "{action}: {shown}");
    }
    assert!(cli.refused(&format!("replay webhooks watch {id} {of_tenant}")).await.contains("canceled"));
    let list = cli.ok(&format!("replay webhooks list {of_tenant}")).await;
    assert!(list.lines().nth(1).is_some_and(|line| line.contains(id) && line.contains("canceled")), "{list}");
    app.stop().await;
}
