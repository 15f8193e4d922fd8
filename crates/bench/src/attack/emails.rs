//! Attacks with e-mails that an organizer causes: to persons who have nothing to do with an event, and so many that others
//! wait for theirs.

use std::time::{Duration, Instant};

use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

use super::accounts::{address, insert_accounts};
use super::client::{Client, Request};
use super::finding::{Finding, Measured};
use super::lab::{ATTACKER_IP, BYSTANDER_IP, Lab, Setting, publish_event};
use super::smtp_sink::SmtpSink;
use crate::Outcome;

const ORGANIZER: Uuid = Uuid::from_u128(0x6666_0000);
const VICTIM: Uuid = Uuid::from_u128(0x7777_0000);
/// A person waits at most so long for an e-mail that they have requested.
const CONFIRMATION_MS_MAX: f64 = 5_000.0;
const CONFIRMATION_WAIT_MAX: Duration = Duration::from_secs(90);
const PARTICIPANTS: u128 = 500;
/// So many that their e-mails need longer than the two that are measured.
const CANCELED_PARTICIPANTS: u128 = 4_000;
/// The e-mails of an announcement are awaited at most so long.
const ANNOUNCEMENT_WAIT_MAX: Duration = Duration::from_secs(120);
const TOGGLES: u64 = 200;
/// E-mails about the changes of one event that a participant gets at most, in the time of the attack.
const EMAILS_OF_AN_EVENT_MAX: f64 = 5.0;

/// An organizer bans a person 200 times from an event that the person has never joined. The title of the event and the reason
/// look like a warning of the installation. No e-mail must be sent.
pub(super) async fn bans_of_a_stranger(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, sink, organizer) = with_email(setting).await?;
    insert_accounts(lab.db(), &[VICTIM]).await?;
    let person = lab.person().await?;
    lab.measure("bans-of-a-stranger", &person, async |_, running| {
        let event = publish_event(&organizer, "Security notice: your account at Pillarbox was locked").await?;
        let ban = move |number: u64| ban_of(&event, VICTIM, number);
        send_all(&running, &organizer, 200, ban).await?;
        tokio::time::sleep_until(running.until.into()).await;
        let emails = sink.received(&address(VICTIM)).map_or(0, |(count, _)| count);
        Ok(vec![Measured::new("e-mails to the banned person", emails as f64, "e-mails").at_most(0.0)])
    })
    .await
}

/// An organizer cancels an event with 4,000 participants, each of whom gets an e-mail, however many that are. Then another person
/// joins an event of another organizer, and a stranger registers: both wait for an e-mail behind those of the cancellation.
pub(super) async fn cancellation_before_a_confirmation(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, sink, organizer) = with_email(setting).await?;
    let participants: Vec<Uuid> = (0..CANCELED_PARTICIPANTS).map(|n| Uuid::from_u128(0x7777_0000 + n)).collect();
    let guests = [Uuid::from_u128(0x9999_0000), Uuid::from_u128(0x9999_0001)];
    insert_accounts(lab.db(), &[&participants[..], &guests].concat()).await?;
    let event = publish_event(&organizer, "A concert").await?;
    insert_joins(lab.db(), event.parse()?, &participants).await?;
    let person = lab.person().await?;
    let host = lab.client(&lab.user_token(Uuid::from_u128(1))?, BYSTANDER_IP);
    let informed = || participants.iter().filter(|one| sink.received(&address(**one)).is_some()).count() as f64;
    lab.measure("cancellation-before-a-confirmation", &person, async |lab, running| {
        let newcomer = lab.client("", BYSTANDER_IP);
        let party = publish_event(&host, "A party").await?;
        let before = join_ms(lab, &sink, &party, guests[0]).await?;
        let cancel = Request::post(format!("/event/v1/events/{event}/cancel"), "");
        running.answers.add_answer(&organizer.send(&cancel).await);
        wait_until(async || informed() >= 1.0).await;
        let (joined, registered) = tokio::try_join!(
            join_ms(lab, &sink, &party, guests[1]),
            registration_ms(&newcomer, &sink, "late@example.org")
        )?;
        let informed_before = informed();
        let all = participants.len() as f64;
        wait_until(async || informed() >= all).await;
        Ok(vec![
            Measured::new("the e-mail about a join before", before, "ms"),
            Measured::new("the e-mail about a join behind the cancellation", joined, "ms").at_most(CONFIRMATION_MS_MAX),
            Measured::new("the e-mail of a registration behind the cancellation", registered, "ms")
                .at_most(CONFIRMATION_MS_MAX),
            // Without a backlog, nothing is measured.
            Measured::new("e-mails of the cancellation before these two", informed_before, "e-mails")
                .at_least(1.0)
                .at_most(all - 1.0),
            Measured::new("e-mails of the cancellation", informed(), "e-mails").at_least(all),
        ])
    })
    .await
}

/// An organizer moves the start of an event with 500 participants 200 times. A stranger registers when the announcement, which
/// waits `notify.change_delay_seconds` for further changes, has begun.
pub(super) async fn moved_starts(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, sink, organizer) = with_email(setting).await?;
    let participants: Vec<Uuid> = (0..PARTICIPANTS).map(|n| Uuid::from_u128(0x7777_0000 + n)).collect();
    insert_accounts(lab.db(), &participants).await?;
    let event = publish_event(&organizer, "A concert").await?;
    for participant in &participants {
        let client = lab.client(&lab.user_token(*participant)?, ATTACKER_IP);
        let join = Request::post(format!("/join/v1/events/{event}/join"), "").with_key(participant);
        client.expect(&join).await?;
    }
    // The first e-mail to a participant is the confirmation.
    let received = |count: u64| {
        let has_received = |one: &&Uuid| sink.received(&address(**one)).is_some_and(|(emails, _)| emails >= count);
        participants.iter().filter(has_received).count() as f64
    };
    wait_until(async || received(1) >= PARTICIPANTS as f64).await;
    let person = lab.person().await?;
    lab.measure("moved-starts", &person, async |lab, running| {
        let before = emails_of_changes(lab.db()).await?;
        let path = format!("/event/v1/events/{event}");
        let change = move |n: u64| {
            let start = format!("2090-03-01T{:02}:{:02}:00Z", 10 + n / 60 % 8, n % 60);
            Request::with_body("PATCH", path.clone(), json!({"start_time": start}))
        };
        send_all(&running, &organizer, TOGGLES, change).await?;
        wait_until(async || received(2) >= 1.0).await;
        let newcomer = lab.client("", BYSTANDER_IP);
        let confirmation = registration_ms(&newcomer, &sink, "late@example.org").await?;
        let announced_before = received(2);
        tokio::time::sleep_until(running.until.into()).await;
        wait_until(async || received(2) >= PARTICIPANTS as f64).await;
        let emails = (emails_of_changes(lab.db()).await? - before) as f64 / PARTICIPANTS as f64;
        Ok(vec![
            Measured::new("e-mails to each participant so far", emails, "e-mails").at_most(EMAILS_OF_AN_EVENT_MAX),
            Measured::new("the e-mail of a registration behind them", confirmation, "ms").at_most(CONFIRMATION_MS_MAX),
            Measured::new("participants informed before it", announced_before, "persons")
                .at_least(1.0)
                .at_most(PARTICIPANTS as f64 - 1.0),
            Measured::new("participants informed", received(2), "persons").at_least(PARTICIPANTS as f64),
        ])
    })
    .await
}

/// A server that sends e-mails to a sink, and the attacking organizer.
async fn with_email(setting: Setting<'_>) -> Outcome<(Lab, SmtpSink, Client)> {
    let sink = SmtpSink::start().await?;
    let lab = Lab::start(setting, &format!("smtp_url = \"smtp://{}\"\n", sink.address)).await?;
    let organizer = lab.client(&lab.user_token(ORGANIZER)?, ATTACKER_IP);
    Ok((lab, sink, organizer))
}

fn ban_of(event: &str, user: Uuid, number: u64) -> Request {
    let reason = format!("A stranger has signed in as you. Confirm your password at example.org/{number}");
    let body = json!({"user_id": user, "reason": reason});
    Request::post(format!("/join/v1/events/{event}/ban"), body).with_key(Uuid::from_u128(u128::from(number)))
}

/// Sends so many requests over 16 connections, as fast as they are answered.
async fn send_all(
    running: &super::lab::Running,
    client: &Client,
    count: u64,
    request: impl Fn(u64) -> Request + Clone + Send + 'static,
) -> Outcome<()> {
    const CONNECTIONS: u64 = 16;
    let tasks: Vec<_> = (0..CONNECTIONS)
        .map(|first| {
            let (answers, client, request) = (running.answers.clone(), client.clone(), request.clone());
            tokio::spawn(async move {
                for number in (first..count).step_by(CONNECTIONS as usize) {
                    answers.add_answer(&client.send(&request(number)).await);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await?;
    }
    Ok(())
}

/// Registers an account. Returns the time until the e-mail that verifies the address arrives.
async fn registration_ms(client: &Client, sink: &SmtpSink, email: &str) -> Outcome<f64> {
    let account = json!({"email": email, "password": "four other random words", "name": "Ada"});
    client.expect(&Request::post("/identity/v1/register", account)).await?;
    arrival_ms(sink, email).await
}

/// Joins an event. Returns the time until the e-mail about it arrives.
async fn join_ms(lab: &Lab, sink: &SmtpSink, event: &str, user: Uuid) -> Outcome<f64> {
    let client = lab.client(&lab.user_token(user)?, BYSTANDER_IP);
    client.expect(&Request::post(format!("/join/v1/events/{event}/join"), "").with_key(user)).await?;
    arrival_ms(sink, &address(user)).await
}

/// The time from now to the first e-mail to a recipient, or the time after which it is not awaited any longer.
async fn arrival_ms(sink: &SmtpSink, email: &str) -> Outcome<f64> {
    let began = Instant::now();
    while began.elapsed() < CONFIRMATION_WAIT_MAX {
        if let Some((_, at)) = sink.received(email) {
            return Ok(at.saturating_duration_since(began).as_secs_f64() * 1e3);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(CONFIRMATION_WAIT_MAX.as_secs_f64() * 1e3)
}

/// Waits until the condition is true, or for the longest time that an announcement may take: the measured value then
/// misses its goal.
async fn wait_until(is_true: impl AsyncFn() -> bool) {
    let until = Instant::now() + ANNOUNCEMENT_WAIT_MAX;
    while !is_true().await && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Inserts registrations as joins would have them, without their e-mails.
async fn insert_joins(db: &PgPool, event: Uuid, users: &[Uuid]) -> Outcome<()> {
    sqlx::query(
        "insert into pillarbox_joins.joins (id, event_id, user_id, status, seq, created_at, updated_at, activated_at)
         select gen_random_uuid(), $1, one, 'active', number, now(), now(), now()
         from unnest($2::uuid[]) with ordinality as users (one, number)",
    )
    .bind(event)
    .bind(users)
    .execute(db)
    .await?;
    let counted = "update pillarbox_joins.event_capacity
                   set active_count = $2, next_seq = $2 + 1, version = version + 1 where event_id = $1";
    let counted = sqlx::query(counted).bind(event).bind(i32::try_from(users.len())?).execute(db).await?;
    if counted.rows_affected() != 1 {
        return Err("joins does not know the event".into());
    }
    Ok(())
}

/// The number of e-mails about changes of events, sent or not.
async fn emails_of_changes(db: &PgPool) -> Outcome<i64> {
    let query = "select count(*) from pillarbox_notify.notification n
                 join pillarbox_notify.business_event e on e.id = n.event_id
                 where n.channel = 'email' and e.event_type = 'event.updated'";
    Ok(sqlx::query_scalar(query).fetch_one(db).await?)
}
