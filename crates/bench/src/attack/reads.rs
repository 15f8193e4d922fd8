//! Attacks with reads of the public list of events, by strangers without an account, while a signed-in person uses the
//! services. There are 100,000 events.

use super::client::Request;
use super::finding::Finding;
use super::lab::{ATTACKER_IP, Lab, Setting};
use crate::Outcome;
use crate::feed::fixture::{fill, wait_for_scores};
use crate::installation::Site;

const EVENTS: u64 = 100_000;

/// 20 connections search for a phrase of two words that every event has, but never one after the other: PostgreSQL examines
/// all events for each page.
pub(super) async fn search_phrases(setting: Setting<'_>) -> Outcome<Finding> {
    pages(setting, "search-phrases", 20, "&q=%22ipsum%20ipsum%22").await
}

/// 20 connections search for a phrase that nothing matches and for the beginning of a word that all titles have, by start time:
/// PostgreSQL walks along the index of start times and parses each title.
pub(super) async fn search_latest(setting: Setting<'_>) -> Outcome<Finding> {
    pages(setting, "search-latest", 20, "&sort=latest&q=%22ipsum%20ipsum%22%20event").await
}

/// 500 connections request first pages that no cache has. Each is cheap.
pub(super) async fn list_pages(setting: Setting<'_>) -> Outcome<Finding> {
    pages(setting, "list-pages", 500, "").await
}

/// Requests a different page each time, so that none is cached.
async fn pages(setting: Setting<'_>, name: &str, connections: u64, query: &'static str) -> Outcome<Finding> {
    let site = Site::new(setting.pillarbox).await?;
    fill(&site.db, EVENTS).await?;
    let lab = Lab::start_on(site, setting, "", &[]).await?;
    wait_for_scores(lab.db()).await?;
    let person = lab.person().await?;
    let stranger = lab.client("", ATTACKER_IP);
    lab.measure(name, &person, async |_, running| {
        let page = move |number| Request::get(format!("/event/v1/events?to=9000-01-01T00:00:00.{number:06}Z{query}"));
        running.flood(&stranger, connections, page).await?;
        Ok(Vec::new())
    })
    .await
}
