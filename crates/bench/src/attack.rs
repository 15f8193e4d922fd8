//! Attacks from outside: what one tenant, one user or a stranger can do to everybody else.
//!
//! Each attack starts a server of its own, measures a bystander alone and then beside the attack, and compares the result with
//! the goals: the bystander's p99 is at most 500 ms, the process needs at most 200 MB more, and the bystander gets no errors.
//! Attackers use the public API only: HTTP, SQL as the role of a producer, and AMQP. Bystanders begin at another network.

mod accounts;
mod broker;
mod bystander;
mod catalogue;
mod client;
mod emails;
mod finding;
mod hostile_schemas;
mod lab;
mod passwords;
mod reads;
mod responses;
mod seeded;
mod slow_readers;
mod smtp_sink;
mod webhooks;

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::Outcome;
use finding::Finding;
use lab::Setting;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only these attacks [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<Attack>,
    /// List the attacks
    #[arg(long)]
    list: bool,
    /// Seconds of an attack
    #[arg(long, default_value_t = 15)]
    seconds: u64,
}

/// What the attacks did.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Results {
    findings: Vec<Finding>,
    /// The names of the attacks that could not be run.
    failed: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Attack {
    /// A version of 123 patterns, compared with one of 150 lists
    CompareVersions,
    /// A type with 38 slow patterns and an example of 60 KB
    SlowExample,
    /// 12 posters of lists that are checked against 7,200 dependencies
    DependentRequired,
    /// 150 types with patterns that need much memory
    CompiledMemory,
    /// A flood of posts in SQL of a type whose schema is slow to check
    PostsInSql,
    /// Schemas with each keyword as often as it is accepted, and payloads that make it work
    HostileSchemas,
    /// 20 strangers who search for a phrase that nothing matches, among 100,000 events
    SearchPhrases,
    /// The same by start time, with the beginning of a word of all titles
    SearchLatest,
    /// 500 connections of a stranger with pages that no cache has
    ListPages,
    /// 200 bans of a person who never joined the event
    BansOfAStranger,
    /// The cancellation of an event with 4,000 participants, and the e-mails that others wait for behind it
    CancellationBeforeAConfirmation,
    /// 200 changes of the start of an event with 500 participants
    MovedStarts,
    /// 100 streams of an inbox of 20 MB that read nothing
    InboxStreams,
    /// 300 slow readers of pages of 10 MB of an inbox
    InboxPages,
    /// 200,000 unread notifications marked as read in one request
    ReadAll,
    /// 100 streams of each of 50 accounts
    StreamsOfManyAccounts,
    /// 15 slow readers of a catalogue of 38 MB
    CatalogueExports,
    /// 15 slow readers of the page of this catalogue
    CataloguePages,
    /// 300 slow readers of pulls of 5 MB
    SlowPulls,
    /// 100 waiting pulls of each of 11 portal tokens
    WaitingPulls,
    /// 24 imports at a time of each of two tenants
    ParallelImports,
    /// Four endpoints that answer with provisional responses only
    ProvisionalResponses,
    /// 230 guesses of a password at once
    PasswordGuesses,
    /// 400 connections that sign in to one account
    SignInsOfOneAccount,
    /// A queue of a service that is deleted while events are published (RabbitMQ)
    QueueDeleted,
    /// A queue of a service that is replaced by one whose messages expire (RabbitMQ)
    QueueReplaced,
    /// A queue of a service whose bindings are removed (RabbitMQ)
    BindingsRemoved,
}

/// Runs the attacks, and prints their results. An attack that cannot be run does not end the others.
pub(crate) async fn run(pillarbox: &Path, options: &Options) -> Outcome<Results> {
    let mut results = Results::default();
    if options.list {
        list();
        return Ok(results);
    }
    let setting = Setting { pillarbox, time: Duration::from_secs(options.seconds) };
    for attack in Attack::value_variants() {
        if !options.only.is_empty() && !options.only.contains(attack) {
            continue;
        }
        match attack.run(setting).await {
            Ok(finding) => {
                finding.print();
                results.findings.push(finding);
            }
            Err(error) => {
                let name = attack.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
                println!("{name}: CANNOT BE RUN: {error}");
                results.failed.push(name);
            }
        }
    }
    finding::print_table(&results.findings);
    Ok(results)
}

impl Results {
    /// Fails if an attack missed a goal, or could not be run.
    pub(crate) fn verdict(&self) -> Outcome<()> {
        let missed = self.findings.iter().filter(|one| !one.missed.is_empty()).map(|one| one.attack.as_str());
        let missed: Vec<&str> = missed.chain(self.failed.iter().map(String::as_str)).collect();
        if missed.is_empty() {
            return Ok(());
        }
        let count = self.findings.len() + self.failed.len();
        Err(format!("{} of {count} attacks missed a goal or could not be run: {}", missed.len(), missed.join(", "))
            .into())
    }
}

fn list() {
    for attack in Attack::value_variants() {
        if let Some(value) = attack.to_possible_value() {
            println!("{:28} {}", value.get_name(), value.get_help().map(ToString::to_string).unwrap_or_default());
        }
    }
}

impl Attack {
    async fn run(self, setting: Setting<'_>) -> Outcome<Finding> {
        match self {
            Attack::CompareVersions => catalogue::compare_versions(setting).await,
            Attack::SlowExample => catalogue::slow_example(setting).await,
            Attack::DependentRequired => catalogue::dependent_required(setting).await,
            Attack::CompiledMemory => catalogue::compiled_memory(setting).await,
            Attack::PostsInSql => catalogue::posts_in_sql(setting).await,
            Attack::HostileSchemas => hostile_schemas::hostile_schemas(setting).await,
            Attack::SearchPhrases => reads::search_phrases(setting).await,
            Attack::SearchLatest => reads::search_latest(setting).await,
            Attack::ListPages => reads::list_pages(setting).await,
            Attack::BansOfAStranger => emails::bans_of_a_stranger(setting).await,
            Attack::CancellationBeforeAConfirmation => emails::cancellation_before_a_confirmation(setting).await,
            Attack::MovedStarts => emails::moved_starts(setting).await,
            Attack::InboxStreams => responses::inbox_streams(setting).await,
            Attack::InboxPages => responses::inbox_pages(setting).await,
            Attack::ReadAll => responses::read_all(setting).await,
            Attack::StreamsOfManyAccounts => responses::streams_of_many_accounts(setting).await,
            Attack::CatalogueExports => responses::catalogue_exports(setting).await,
            Attack::CataloguePages => responses::catalogue_pages(setting).await,
            Attack::SlowPulls => responses::slow_pulls(setting).await,
            Attack::WaitingPulls => responses::waiting_pulls(setting).await,
            Attack::ParallelImports => catalogue::parallel_imports(setting).await,
            Attack::ProvisionalResponses => webhooks::provisional_responses(setting).await,
            Attack::PasswordGuesses => passwords::password_guesses(setting).await,
            Attack::SignInsOfOneAccount => passwords::sign_ins_of_one_account(setting).await,
            Attack::QueueDeleted => broker::queue_deleted(setting).await,
            Attack::QueueReplaced => broker::queue_replaced(setting).await,
            Attack::BindingsRemoved => broker::bindings_removed(setting).await,
        }
    }
}
