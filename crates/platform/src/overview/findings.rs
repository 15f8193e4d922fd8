//! What an operator should look at, and what to do about it. The texts agree with `pillarbox status` and the runbook.

use chrono::{DateTime, TimeDelta, Utc};
use hub::{Trouble, TroubledSubscriber};
use kit::health::{Kind, State};
use mailbox::operations::status::ConsumerStatus;
use serde::Serialize;
use utoipa::ToSchema;

use super::DeadLetterCounts;
use crate::operator::BEHIND_SECONDS;

const CONSUMERS_PAGE: &str = "#/log";
const DEAD_LETTERS_PAGE: &str = "#/dead-letters";
/// Subscribers or tenants that one finding names.
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

/// Consumers that do not read, that lag, or that have set messages apart.
pub(super) fn of_consumers(consumers: &[ConsumerStatus]) -> Vec<Finding> {
    consumers.iter().flat_map(|consumer| position_of(consumer).into_iter().chain(messages_of(consumer))).collect()
}

/// The worst of what can be wrong with the position of a consumer.
fn position_of(status: &ConsumerStatus) -> Option<Finding> {
    let name = &status.consumer;
    let finding = |severity, title, what_to_do| {
        let (count, oldest) = (status.lag_messages, seconds(status.lag_seconds));
        let detail = match count {
            1 => format!("1 message waits, for {oldest}."),
            _ => format!("{count} messages wait, the oldest for {oldest}."),
        };
        Finding { severity, title, detail, what_to_do, links: vec![FindingLink::page("Consumers", CONSUMERS_PAGE)] }
    };
    let is_behind = status.lag_seconds > BEHIND_SECONDS;
    match () {
        () if status.lapsed_at.is_some() => Some(Finding {
            detail: "It was behind for longer than `behind_days`, and the log no longer retains messages for it."
                .to_owned(),
            ..finding(
                Severity::Critical,
                format!("{name} has lapsed"),
                format!(
                    "`pillarbox cursors reset {name}` continues with what the log has; `pillarbox cursors drop {name}` deletes it."
                ),
            )
        }),
        () if is_behind && status.workers.is_empty() => Some(finding(
            Severity::Critical,
            format!("No process runs {name}"),
            format!("Start a process with its role and settings, or drop it with `pillarbox cursors drop {name}`."),
        )),
        () if is_behind => Some(finding(
            Severity::Warning,
            format!("{name} lags"),
            "Run `pillarbox cursors`, and see the section about consumers that lag in docs/runbook.md.".to_owned(),
        )),
        () => None,
    }
}

fn messages_of(status: &ConsumerStatus) -> Vec<Finding> {
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
    if status.unrouted > 0 {
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
pub(super) fn of_subscribers(subscribers: &[TroubledSubscriber], now: DateTime<Utc>) -> Vec<Finding> {
    let (failing, disabled): (Vec<_>, Vec<_>) =
        subscribers.iter().partition(|subscriber| matches!(subscriber.trouble, Trouble::FailingSince(_)));
    let finding = |found: Vec<&TroubledSubscriber>, state: &str, what_to_do: &str| {
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
        "Look at its last attempts, and ask its owner to repair the endpoint; retries continue meanwhile.",
    );
    let disabled = finding(
        disabled,
        "was disabled",
        "When its endpoint is back, open it and choose Enable, or run `pillarbox subscribers enable ID`.",
    );
    failing.into_iter().chain(disabled).collect()
}

fn page_of(subscriber: &TroubledSubscriber) -> FindingLink {
    FindingLink {
        label: subscriber.name.clone(),
        address: format!("#/subscribers/{}", subscriber.id),
        tenant: Some(subscriber.tenant.clone()),
    }
}

fn describe(subscriber: &TroubledSubscriber, now: DateTime<Utc>) -> String {
    let TroubledSubscriber { tenant, name, trouble, .. } = subscriber;
    match trouble {
        Trouble::Disabled(reason) => format!("{name} of {tenant}: {reason}"),
        Trouble::FailingSince(since) => {
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
    use mailbox::operations::status::WorkerStatus;

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
        of_consumers(&[consumer]).into_iter().map(|finding| (finding.severity, finding.title)).collect()
    }

    #[test]
    fn the_worst_state_of_a_consumer_is_reported_once() {
        assert_eq!(titles(consumer(60.0, true)), []);
        assert_eq!(titles(consumer(0.0, false)), [], "nothing waits for it");
        assert_eq!(titles(consumer(61.0, true)), [(Severity::Warning, "relay.default lags".to_owned())]);
        let nobody = (Severity::Critical, "No process runs relay.default".to_owned());
        assert_eq!(titles(consumer(61.0, false)), [nobody]);
        let lapsed = ConsumerStatus { lapsed_at: Some(DateTime::UNIX_EPOCH), ..consumer(61.0, false) };
        assert_eq!(titles(lapsed), [(Severity::Critical, "relay.default has lapsed".to_owned())]);
        let parked = ConsumerStatus { parked: 2, unrouted: 3, ..consumer(0.0, true) };
        assert_eq!(titles(parked).len(), 2);
    }

    #[test]
    fn subscribers_are_one_finding_for_each_kind_of_trouble() {
        let subscriber = |name: &str, trouble| TroubledSubscriber {
            id: uuid::Uuid::nil(),
            tenant: "acme".to_owned(),
            name: name.to_owned(),
            trouble,
        };
        let now = DateTime::UNIX_EPOCH + TimeDelta::minutes(5);
        let mut found: Vec<_> =
            (0..7).map(|n| subscriber(&format!("s{n}"), Trouble::FailingSince(DateTime::UNIX_EPOCH))).collect();
        found.push(subscriber("off", Trouble::Disabled("it answered 410 Gone".to_owned())));
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
