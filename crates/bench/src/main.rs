//! `pillarbox-bench`: an external client that measures Pillarbox and the raw limit of the machine, and prints the ratio.
//!
//! Machines are noisy: each run of Pillarbox is between two runs of the raw limit, and the result is the median and the
//! spread of the ratios. Absolute numbers are not comparable between machines.

mod attack;
mod costs;
mod feed;
mod foundation;
mod hub;
mod identity;
mod inbox;
mod installation;
mod joins;
mod load;
mod notifications;
mod progress;
mod relay;
mod report;
mod server;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;

/// The same allocator as in `pillarbox`, since parts of it run in this process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures Pillarbox and the raw limit of this machine.
#[derive(Parser)]
#[command(name = "pillarbox-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The `pillarbox` binary to measure [default: the one in the folder of this program]
    #[arg(long, visible_alias = "binary", global = true, value_name = "FILE")]
    pillarbox: Option<PathBuf>,
    /// Also write the results as JSON
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Number of pairs of runs (raw limit and Pillarbox)
    #[arg(long, global = true, default_value = "5")]
    pairs: NonZeroUsize,
}

#[derive(Subcommand)]
enum Command {
    /// Start to ready, idle memory, and the rate of an empty request
    Foundation,
    /// The log and the relay to RabbitMQ
    Relay {
        /// Only these parts [default: all]
        #[arg(long, value_delimiter = ',')]
        only: Vec<relay::Part>,
    },
    /// Webhooks, from the accepted event to the received webhook
    Hub {
        /// Only these parts [default: all]
        #[arg(long, value_delimiter = ',')]
        only: Vec<hub::Part>,
        /// Messages in the backlog
        #[arg(long, default_value_t = 1_000_000)]
        backlog: u64,
    },
    /// Two builds of the server in turn: the CPU time that they need for an event
    Compare(hub::comparison::Options),
    /// Many tenants, without and with one that posts much more than each of the others
    Tenants(hub::tenants::Options),
    /// The feed of a million events
    Feed {
        /// Only these parts [default: all]
        #[arg(long, value_delimiter = ',')]
        only: Vec<feed::Part>,
        /// Number of events
        #[arg(long, default_value_t = 1_000_000)]
        events: u64,
    },
    /// Joins of one event and of a thousand, compared with one transaction per join
    Joins {
        /// Joins per run
        #[arg(long, default_value_t = 20_000)]
        count: usize,
    },
    /// Sign-ins compared with Argon2 alone, and a page of the feed while many clients sign in
    Identity {
        /// Seconds of a run
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// Business events to notifications, compared with inserts of the same rows
    Notifications {
        /// Events per run, with three recipients each
        #[arg(long, default_value_t = 10_000)]
        events: u32,
    },
    /// Marks of items in batches of 100, compared with raw HINCRBY in pipelines of 100
    Progress {
        /// Items per run
        #[arg(long, default_value_t = 1_000_000)]
        count: usize,
        /// Connections, of the raw limit and of Pillarbox
        #[arg(long, default_value_t = 16)]
        clients: usize,
        /// Projects over which the items are distributed
        #[arg(long, default_value_t = 10)]
        projects: usize,
    },
    /// The memory and the CPU time of idle streams of the inbox
    Inbox {
        /// Number of streams, each of another user
        #[arg(long, default_value_t = 1_000)]
        connections: usize,
        /// Seconds of the measurement
        #[arg(long, default_value_t = 30)]
        seconds: u64,
    },
    /// What an attack of one caller does to another one
    ///
    /// Each attack has a server and a database of its own. Goals: the other caller's p99 is at most 500 ms, it gets no errors,
    /// and the server needs at most 200 MiB more memory. Exits with 1 if a goal is missed. See docs/benchmarks.md.
    Attack(attack::Options),
    /// Serve the raw limit for HTTP (started as a separate process)
    #[command(hide = true)]
    RawServer,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> ExitCode {
    match run(Cli::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Outcome<()> {
    let beside = std::env::current_exe()?.with_file_name("pillarbox");
    let pillarbox = cli.pillarbox.unwrap_or(beside);
    let report = match cli.command.unwrap_or(Command::Foundation) {
        Command::RawServer => return server::run_raw().await,
        Command::Attack(options) => {
            let results = attack::run(&pillarbox, &options).await?;
            write_json(cli.json.as_deref(), &results)?;
            return results.verdict();
        }
        Command::Foundation => foundation::measure(&pillarbox, cli.pairs.get()).await?,
        Command::Relay { only } => relay::measure(&pillarbox, cli.pairs.get(), &only).await?,
        Command::Feed { only, events } => feed::measure(&pillarbox, cli.pairs.get(), &only, events).await?,
        Command::Joins { count } => joins::measure(&pillarbox, cli.pairs.get(), count).await?,
        Command::Progress { count, clients, projects } => {
            progress::measure(&pillarbox, cli.pairs.get(), (count, clients, projects)).await?
        }
        Command::Identity { seconds } => identity::measure(&pillarbox, cli.pairs.get(), seconds).await?,
        Command::Notifications { events } => notifications::measure(&pillarbox, cli.pairs.get(), events.into()).await?,
        Command::Inbox { connections, seconds } => inbox::measure(&pillarbox, connections, seconds).await?,
        Command::Compare(options) => hub::comparison::measure(&pillarbox, cli.pairs.get(), &options).await?,
        Command::Tenants(options) => hub::tenants::measure(&pillarbox, cli.pairs.get(), options).await?,
        Command::Hub { only, backlog } => hub::measure(&pillarbox, cli.pairs.get(), &only, backlog).await?,
    };
    report.print();
    write_json(cli.json.as_deref(), &report)
}

fn write_json(file: Option<&Path>, results: &impl Serialize) -> Outcome<()> {
    match file {
        Some(file) => Ok(std::fs::write(file, serde_json::to_vec_pretty(results)?)?),
        None => Ok(()),
    }
}
