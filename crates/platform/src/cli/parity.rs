//! `parity`: compares the two routes of dual publish.

use mailbox::operations::status::{self, ConsumerStatus};

use super::Failure;
use super::installation::connect;
use super::table::{self, print_line};
use crate::settings::Settings;

/// The two routes of dual publish, which send the same messages: to the new exchange, and to the legacy exchange.
const NEW: &str = "relay.email";
const LEGACY: &str = "relay.legacy";

/// Prints whether the legacy exchange has received everything that the new one has. Fails with
/// `is_check` if it has not, and if the database cannot be reached.
pub(super) async fn run(settings: &Settings, is_check: bool) -> Result<(), Failure> {
    let consumers = status::consumers(&connect(settings)?).await?;
    let of = |name: &str| consumers.iter().find(|consumer| consumer.consumer == name);
    let result = match (of(NEW), of(LEGACY)) {
        (Some(new), Some(legacy)) => {
            print_parity(new, legacy)?;
            compare(new, legacy)
        }
        (_, None) => {
            Err("relay.legacy is not registered: dual publish was never enabled here, or the consumer was dropped.\n\
                          To enable it, set relay.enable_dual_publish = true for the processes with the role relay."
                .to_owned())
        }
        (None, Some(_)) => Err("relay.email is not registered: the default route `email` never ran here, so there is \
                                nothing to compare."
            .to_owned()),
    };
    match (result, is_check) {
        (Err(text), true) => return Err(Failure::Other(text)),
        (Ok(text) | Err(text), _) => print_line(&text)?,
    }
    if of(LEGACY).is_some_and(|legacy| legacy.workers.is_empty()) && of(NEW).is_some() {
        print_line(
            "No process runs relay.legacy. When dual publish is enabled again, it continues where it stopped; to remove it for \
             good, run `pillarbox cursors drop relay.legacy`.",
        )?;
    }
    Ok(())
}

/// Fails with a description of what the legacy exchange lacks.
fn compare(new: &ConsumerStatus, legacy: &ConsumerStatus) -> Result<String, String> {
    match (new.read_to - legacy.read_to, legacy.parked + legacy.dead) {
        (..=0, 0) => Ok("The legacy exchange has received everything that the new one has.".to_owned()),
        (..=0, stuck) => {
            Err(format!("The legacy exchange is not behind, but {stuck} of its messages are parked or dead."))
        }
        (behind, stuck) => {
            Err(format!("The legacy exchange is behind by {behind} messages of the log; {stuck} are parked or dead."))
        }
    }
}

fn print_parity(new: &ConsumerStatus, legacy: &ConsumerStatus) -> std::io::Result<()> {
    let row = |consumer: &ConsumerStatus| {
        let lag = [consumer.read_to, consumer.lag_messages, consumer.parked, consumer.dead].map(|n| n.to_string());
        let [read_to, lag_messages, parked, dead] = lag;
        let name = consumer.consumer.clone();
        [name, read_to, format!("{:.1}", consumer.lag_seconds), lag_messages, parked, dead]
    };
    table::print(["CONSUMER", "READ_TO", "LAG_S", "LAG", "PARKED", "DEAD"], &[row(new), row(legacy)])
}
