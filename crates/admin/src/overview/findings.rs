//! What an operator should look at, and what to do about it. The texts agree with `pillarbox status` and the runbook.

use chrono::{DateTime, TimeDelta, Utc};
use hub::{Issue, SubscriberWithIssue};
use pillarbox::operations::status::ConsumerStatus;
use runtime::health::{Kind, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::DeadLetterCounts;
use crate::operator::BEHIND_SECONDS;

const CONSUMERS_PAGE: &str = "#/log";
const DEAD_LETTERS_PAGE: &str = "#/dead-letters";
/// Subscribers, tenants or consumers that one finding names.
const NAMES_MAX: usize = 5;

/// Something that an operator should look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Finding {
    pub(super) severity: Severity,
    #[schema(example = "No process runs relay.default")]
    title: String,
    /// The numbers or the reason behind it.
    detail: String,
    /// The command or the page that helps.
    what_to_do: String,
    /// The pages of the console that show more.
    links: Vec<FindingLink>,
}

/// A page of the console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
struct FindingLink {
    #[schema(example = "acme (12)")]
    label: String,
    /// The address within the console.
    #[schema(example = "#/dead-letters")]
    address: String,
    /// The tenant whose data the page has to show. Absent: the page shows all tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
}

impl FindingLink {
    /// A page that shows the whole installation.
    fn page(label: &str, address: &str) -> FindingLink {
        FindingLink { label: label.to_owned(), address: address.to_owned(), tenant: None }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = FindingSeverity)]
pub(super) enum Severity {
    /// Messages do not arrive.
    Critical,
    Warning,
}

/// The dependencies and tasks of this process that are down.
pub(super) fn of_checks(checks: &[State]) -> Vec<Finding> {
    let finding = |check: &State| Finding {
        severity: if check.required { Severity::Critical } else { Severity::Warning },
        title: match check.kind {
            Kind::Dependency => format!("{} is down", check.name),
            Kind::Task => format!("The task {} fails", check.name),
        },
        detail: check.error.clone().unwrap_or_default(),
        what_to_do: "Run `pillarbox status`, and see docs/runbook.md.".to_owned(),
        links: Vec::new(),
    };
    checks.iter().filter(|check| !check.up).map(finding).collect()
}

/// Consumers that do not read, that lag, or that have set messages apart. Messages that `optional_routes` could not route do
/// not count: an installation has these routes without a setting, and needs no queue for them.
pub(super) fn of_consumers(consumers: &[ConsumerStatus], optional_routes: &[String]) -> Vec<Finding> {
    let of_one = |consumer| position_of(consumer).into_iter().chain(messages_of(consumer, optional_routes));
    without_worker(consumers).into_iter().chain(consumers.iter().flat_map(of_one)).collect()
}

/// The process that runs a consumer. Consumers of the same process are behind for one cause when it is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Runner {
    Relay,
    FanOut,
    Handlers,
}

impl Runner {
    const ALL: [Runner; 3] = [Runner::Relay, Runner::FanOut, Runner::Handlers];

    fn of(status: &ConsumerStatus) -> Runner {
        if status.kind == "relay" {
            Runner::Relay
        } else if status.consumer == hub::FAN_OUT {
            Runner::FanOut
        } else {
            Runner::Handlers
        }
    }

    /// The settings that such a process needs.
    fn settings(self) -> &'static str {
        match self {
            Runner::Relay => "the role `relay` and the setting `amqp_url`",
            Runner::FanOut => "the role `fanout`",
            Runner::Handlers => "the role `consume`",
        }
    }
}

fn is_behind(status: &ConsumerStatus) -> bool {
    status.lag_seconds > BEHIND_SECONDS
}

fn lacks_worker(status: &ConsumerStatus) -> bool {
    status.lapsed_at.is_none() && is_behind(status) && status.workers.is_empty()
}

/// One finding for all consumers that are behind because the same process is missing.
fn without_worker(consumers: &[ConsumerStatus]) -> Vec<Finding> {
    let of_runner = |runner: Runner| {
        let found: Vec<&ConsumerStatus> =
            consumers.iter().filter(|status| lacks_worker(status) && Runner::of(status) == runner).collect();
        missing_runner(runner, &found)
    };
    Runner::ALL.into_iter().filter_map(of_runner).collect()
}

/// Returns none if `found` is empty.
fn missing_runner(runner: Runner, found: &[&ConsumerStatus]) -> Option<Finding> {
    let first = found.first()?;
    let names: Vec<&str> = found.iter().take(NAMES_MAX).map(|status| status.consumer.as_str()).collect();
    let more = if found.len() > NAMES_MAX { ", …" } else { "" };
    let settings = runner.settings();
    let (detail, advice) = if found.len() == 1 {
        let name = &first.consumer;
        (waiting(first), format!("If {name} is no longer needed, drop it with `pillarbox cursors drop {name}`."))
    } else {
        let messages = found.iter().map(|status| status.lag_messages).max().unwrap_or_default();
        let oldest = found.iter().map(|status| status.lag_seconds).fold(0.0, f64::max);
        (
            format!(
                "Up to {messages} messages wait for each of {} consumers, the oldest for {}.",
                found.len(),
                seconds(oldest)
            ),
            "Drop those that are no longer needed with `pillarbox cursors drop NAME`.".to_owned(),
        )
    };
    Some(Finding {
        severity: Severity::Critical,
        title: format!("No process runs {}{more}", names.join(", ")),
        detail,
        what_to_do: format!("Start a process with {settings}. {advice}"),
        links: vec![FindingLink::page("Consumers", CONSUMERS_PAGE)],
    })
}

/// How many messages wait for a consumer, and for how long.
fn waiting(status: &ConsumerStatus) -> String {
    let oldest = seconds(status.lag_seconds);
    match status.lag_messages {
        1 => format!("1 message waits, for {oldest}."),
        count => format!("{count} messages wait, the oldest for {oldest}."),
    }
}

/// The worst of what can be wrong with the position of a consumer. One without a worker is part of another finding.
fn position_of(status: &ConsumerStatus) -> Option<Finding> {
    let name = &status.consumer;
    let finding = |severity, title, what_to_do| {
        let links = vec![FindingLink::page("Consumers", CONSUMERS_PAGE)];
        Finding { severity, title, detail: waiting(status), what_to_do, links }
    };
    if status.lapsed_at.is_some() {
        let detail = "It was behind for longer than `behind_days`, and the log no longer retains messages for it.";
        let what_to_do = format!(
            "`pillarbox cursors reset {name}` continues with what the log has; `pillarbox cursors drop {name}` deletes it."
        );
        let lapsed = finding(Severity::Critical, format!("{name} has lapsed"), what_to_do);
        return Some(Finding { detail: detail.to_owned(), ..lapsed });
    }
    let lags = is_behind(status) && !status.workers.is_empty();
    let advice = "Run `pillarbox cursors`, and see the section about consumers that lag in docs/runbook.md.";
    lags.then(|| finding(Severity::Warning, format!("{name} lags"), advice.to_owned()))
}

fn messages_of(status: &ConsumerStatus, optional_routes: &[String]) -> Vec<Finding> {
    let name = &status.consumer;
    let mut findings = Vec::new();
    if status.parked > 0 {
        findings.push(Finding {
            severity: Severity::Warning,
            title: match status.parked {
                1 => format!("1 message of {name} is parked"),
                count => format!("{count} messages of {name} are parked"),
            },
            detail: "They failed and are retried; later messages of their keys wait.".to_owned(),
            what_to_do: format!("`pillarbox parked list --consumer {name}` shows why."),
            links: vec![FindingLink::page("Consumers", CONSUMERS_PAGE)],
        });
    }
    if status.unrouted > 0 && !optional_routes.contains(name) {
        findings.push(Finding {
            severity: Severity::Warning,
            title: match status.unrouted {
                1 => format!("1 message of {name} is unrouted"),
                count => format!("{count} messages of {name} are unrouted"),
            },
            detail: "RabbitMQ had no queue for them.".to_owned(),
            what_to_do: format!(
                "Bind a queue to its exchange, then `pillarbox replay --consumer {name} --from 2h` sends them again."
            ),
            links: vec![FindingLink::page("Consumers", CONSUMERS_PAGE)],
        });
    }
    findings
}

/// Subscribers that the hub has switched off, and those whose attempts fail.
pub(super) fn of_subscribers(subscribers: &[SubscriberWithIssue], now: DateTime<Utc>) -> Vec<Finding> {
    let (failing, disabled): (Vec<_>, Vec<_>) =
        subscribers.iter().partition(|subscriber| matches!(subscriber.issue, Issue::FailingSince(_)));
    let finding = |found: Vec<&SubscriberWithIssue>, state: &str, what_to_do: &str| {
        let described: Vec<String> = found.iter().take(NAMES_MAX).map(|one| describe(one, now)).collect();
        let more = if found.len() > NAMES_MAX { ", and others" } else { "" };
        (!found.is_empty()).then(|| Finding {
            severity: Severity::Warning,
            title: match found.as_slice() {
                [one] => format!("The subscriber {} {state}", one.name),
                several => format!("{} subscribers: each {state}", several.len()),
            },
            detail: format!("{}{more}", described.join("; ")),
            what_to_do: what_to_do.to_owned(),
            links: found.iter().take(NAMES_MAX).map(|one| page_of(one)).collect(),
        })
    };
    let failing = finding(
        failing,
        "does not accept webhooks",
        "Look at its last attempts, and ask its owner to repair the endpoint; retries continue.",
    );
    let disabled = finding(
        disabled,
        "was disabled",
        "When its endpoint is back, open it and choose Enable, or run `pillarbox subscribers enable ID`.",
    );
    failing.into_iter().chain(disabled).collect()
}

fn page_of(subscriber: &SubscriberWithIssue) -> FindingLink {
    FindingLink {
        label: subscriber.name.clone(),
        address: format!("#/subscribers/{}", subscriber.id),
        tenant: Some(subscriber.tenant.clone()),
    }
}

fn describe(subscriber: &SubscriberWithIssue, now: DateTime<Utc>) -> String {
    let SubscriberWithIssue { tenant, name, issue, .. } = subscriber;
    match issue {
        Issue::Disabled(reason) => format!("{name} of {tenant}: {reason}"),
        Issue::FailingSince(since) => {
            format!("{name} of {tenant}: for {}", seconds((now - *since).max(TimeDelta::zero()).num_seconds() as f64))
        }
    }
}

/// What was given up. `webhooks` are the counts of the tenants, most first.
pub(super) fn of_dead_letters(counts: &DeadLetterCounts, webhooks: &[(String, i64)]) -> Vec<Finding> {
    let of_tenant = |(tenant, count): &(String, i64)| FindingLink {
        label: format!("Dead letters of {tenant} ({count})"),
        address: DEAD_LETTERS_PAGE.to_owned(),
        tenant: Some(tenant.clone()),
    };
    let tenants = webhooks.iter().take(NAMES_MAX).map(of_tenant).collect();
    let kinds = [
        (
            (counts.webhooks, "webhook was", "webhooks were"),
            "Open the dead letters to see why they failed, and retry or discard them. \
             `pillarbox webhook-dead-letters` does the same on the command line.",
            tenants,
        ),
        (
            (counts.consumers, "message of a consumer was", "messages of consumers were"),
            "Open the dead letters to see why they failed, and retry or discard them. \
             `pillarbox dead-letters` does the same on the command line.",
            vec![FindingLink::page("Dead letters of consumers", "#/dead-letters/consumers")],
        ),
        (
            (counts.mail, "e-mail was", "e-mails were"),
            "Open the e-mails to see why they failed, and retry them. \
             On the command line, `pillarbox mail retry --all` retries them.",
            vec![FindingLink::page("E-mails", "#/notifications/mail?status=dead")],
        ),
        (
            (counts.notifications, "notification was", "notifications were"),
            "Open the notifications to see why they failed, and retry them. \
             On the command line, `pillarbox notifications retry --all` retries them.",
            vec![FindingLink::page("Notifications", "#/notifications?status=dead")],
        ),
    ];
    let finding = |((count, one, many), what_to_do, links): ((i64, &str, &str), &str, Vec<FindingLink>)| Finding {
        severity: Severity::Warning,
        title: format!("{count} {} given up", if count == 1 { one } else { many }),
        detail: format!("{} retained, and can be retried.", if count == 1 { "It is" } else { "They are" }),
        what_to_do: what_to_do.to_owned(),
        links,
    };
    kinds.into_iter().filter(|((count, ..), ..)| *count > 0).map(finding).collect()
}

/// A readable duration: `90 s`, `12 min`, `3 h`, `2 d`.
fn seconds(seconds: f64) -> String {
    match seconds {
        _ if seconds < 120.0 => format!("{seconds:.0} s"),
        _ if seconds < 7_200.0 => format!("{:.0} min", seconds / 60.0),
        _ if seconds < 172_800.0 => format!("{:.0} h", seconds / 3_600.0),
        _ => format!("{:.0} d", seconds / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pillarbox::operations::status::WorkerStatus;

    fn consumer(lag_seconds: f64, has_worker: bool) -> ConsumerStatus {
        let worker = WorkerStatus { name: "web-1:1".to_owned(), shards: 16 };
        ConsumerStatus {
            consumer: "relay.default".to_owned(),
            kind: "relay".to_owned(),
            read_to: 1,
            lag_seconds,
            measured_at: DateTime::UNIX_EPOCH,
            lag_messages: 7,
            parked: 0,
            dead: 0,
            unrouted: 0,
            replays: 0,
            workers: if has_worker { vec![worker] } else { Vec::new() },
            lapsed_at: None,
        }
    }

    fn titles(consumer: ConsumerStatus) -> Vec<(Severity, String)> {
        of_consumers(&[consumer], &[]).into_iter().map(|finding| (finding.severity, finding.title)).collect()
    }

    #[test]
    fn the_worst_state_of_a_consumer_is_reported_once() {
        assert_eq!(titles(consumer(60.0, true)), []);
        assert_eq!(titles(consumer(0.0, false)), [], "nothing waits for it");
        assert_eq!(titles(consumer(61.0, true)), [(Severity::Warning, "relay.default lags".to_owned())]);
        let without_worker = (Severity::Critical, "No process runs relay.default".to_owned());
        assert_eq!(titles(consumer(61.0, false)), [without_worker]);
        let lapsed = ConsumerStatus { lapsed_at: Some(DateTime::UNIX_EPOCH), ..consumer(61.0, false) };
        assert_eq!(titles(lapsed), [(Severity::Critical, "relay.default has lapsed".to_owned())]);
        let parked = ConsumerStatus { parked: 2, unrouted: 3, ..consumer(0.0, true) };
        assert_eq!(titles(parked.clone()).len(), 2);
        let of_default_route = of_consumers(&[parked], &["relay.default".to_owned()]);
        assert!(of_default_route.len() == 1 && of_default_route[0].title.contains("parked"), "{of_default_route:?}");
    }

    #[test]
    fn consumers_without_a_worker_are_one_finding_for_each_process_that_is_missing() {
        let without_worker = |name: &str, kind: &str, lag_messages| ConsumerStatus {
            consumer: name.to_owned(),
            kind: kind.to_owned(),
            lag_messages,
            ..consumer(600.0, false)
        };
        let mut consumers: Vec<ConsumerStatus> =
            ["relay.default", "relay.smap"].map(|name| without_worker(name, "relay", 7)).into();
        consumers.push(without_worker("notify.mail", "handler", 1));
        consumers.push(without_worker(hub::FAN_OUT, "handler", 3));
        let found = of_consumers(&consumers, &[]);
        let titles: Vec<&str> = found.iter().map(|finding| finding.title.as_str()).collect();
        let expected =
            ["No process runs relay.default, relay.smap", "No process runs hub.fanout", "No process runs notify.mail"];
        assert_eq!(titles, expected);
        assert!(found.iter().all(|finding| finding.severity == Severity::Critical));
        assert_eq!(found[0].detail, "Up to 7 messages wait for each of 2 consumers, the oldest for 10 min.");
        assert!(found[0].what_to_do.starts_with("Start a process with the role `relay` and the setting `amqp_url`."));
        assert_eq!(found[2].detail, "1 message waits, for 10 min.");
        assert!(found[2].what_to_do.contains("`pillarbox cursors drop notify.mail`"));

        let many: Vec<ConsumerStatus> = (0..7).map(|n| without_worker(&format!("relay.r{n}"), "relay", 7)).collect();
        let found = of_consumers(&many, &[]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].title, "No process runs relay.r0, relay.r1, relay.r2, relay.r3, relay.r4, …");
    }

    #[test]
    fn subscribers_are_one_finding_for_each_kind_of_issue() {
        let subscriber = |name: &str, issue| SubscriberWithIssue {
            id: uuid::Uuid::nil(),
            tenant: "acme".to_owned(),
            name: name.to_owned(),
            issue,
        };
        let now = DateTime::UNIX_EPOCH + TimeDelta::minutes(5);
        let mut found: Vec<_> =
            (0..7).map(|n| subscriber(&format!("s{n}"), Issue::FailingSince(DateTime::UNIX_EPOCH))).collect();
        found.push(subscriber("off", Issue::Disabled("it answered 410 Gone".to_owned())));
        let findings = of_subscribers(&found, now);
        assert_eq!(findings[0].title, "7 subscribers: each does not accept webhooks");
        assert!(findings[0].detail.starts_with("s0 of acme: for 5 min; ") && findings[0].detail.ends_with("others"));
        assert_eq!(findings[1].title, "The subscriber off was disabled");
        assert_eq!(findings[1].detail, "off of acme: it answered 410 Gone");
        let page = FindingLink {
            label: "off".to_owned(),
            address: format!("#/subscribers/{}", uuid::Uuid::nil()),
            tenant: Some("acme".to_owned()),
        };
        assert_eq!((findings[0].links.len(), &findings[1].links), (NAMES_MAX, &vec![page]));
        assert_eq!(of_subscribers(&[], now), []);
    }

    #[test]
    fn only_what_was_given_up_is_reported() {
        let none = DeadLetterCounts { webhooks: 0, consumers: 0, mail: 0, notifications: 0 };
        assert_eq!(of_dead_letters(&none, &[]), []);
        let webhooks = [("acme".to_owned(), 2), ("main".to_owned(), 1)];
        let found = of_dead_letters(&DeadLetterCounts { webhooks: 3, mail: 1, ..none }, &webhooks);
        let titles: Vec<&str> = found.iter().map(|finding| finding.title.as_str()).collect();
        assert_eq!(titles, ["3 webhooks were given up", "1 e-mail was given up"]);
        let links: Vec<_> = found[0].links.iter().map(|link| (link.label.as_str(), link.tenant.as_deref())).collect();
        assert_eq!(links, [("Dead letters of acme (2)", Some("acme")), ("Dead letters of main (1)", Some("main"))]);
    }
}
