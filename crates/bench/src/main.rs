//! `pillarbox-bench`: an outside client that measures the raw limit and ours in one run and prints the ratio.
//!
//! Machines are noisy: each run of ours stands between two of the raw limit, and what counts is the ratio's median and
//! spread. Absolute numbers say little.

mod costs;
mod feed;
mod foundation;
mod hub;
mod installation;
mod joins;
mod load;
mod relay;
mod report;
mod server;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// As in `pillarbox` itself: parts of it run in this process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measure Pillarbox next to the raw limit of this machine.
#[derive(Parser)]
#[command(name = "pillarbox-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The `pillarbox` to measure [default: the one beside this program]
    #[arg(long, global = true, value_name = "FILE")]
    pillarbox: Option<PathBuf>,
    /// Also write the results as JSON
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// How many pairs of raw and ours
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
    /// Webhooks, from the event accepted to the webhook received
    Hub {
        /// Only these parts [default: all]
        #[arg(long, value_delimiter = ',')]
        only: Vec<hub::Part>,
        /// Messages in the backlog
        #[arg(long, default_value_t = 1_000_000)]
        backlog: u64,
    },
    /// Feeds of a million events
    Feed {
        /// Only these parts [default: all]
        #[arg(long, value_delimiter = ',')]
        only: Vec<feed::Part>,
        /// How many events there are
        #[arg(long, default_value_t = 1_000_000)]
        events: u64,
    },
    /// Joins of one event, and of a thousand, beside one transaction for each join
    Joins {
        /// Joins of a run of ours
        #[arg(long, default_value_t = 20_000)]
        count: usize,
    },
    /// The raw limit for HTTP, as a process of its own
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
        Command::Foundation => foundation::measure(&pillarbox, cli.pairs.get()).await?,
        Command::Relay { only } => relay::measure(&pillarbox, cli.pairs.get(), &only).await?,
        Command::Feed { only, events } => feed::measure(&pillarbox, cli.pairs.get(), &only, events).await?,
        Command::Joins { count } => joins::measure(&pillarbox, cli.pairs.get(), count).await?,
        Command::Hub { only, backlog } => hub::measure(&pillarbox, cli.pairs.get(), &only, backlog).await?,
    };
    report.print();
    if let Some(file) = cli.json {
        std::fs::write(file, serde_json::to_vec_pretty(&report)?)?;
    }
    Ok(())
}
