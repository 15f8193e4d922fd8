//! Gatherings that people join and leave again, and projects whose items are processed.

use std::collections::VecDeque;
use std::time::Duration;

use axum::http::Method;
use chrono::{SecondsFormat, TimeDelta, Utc};
use cli::api::Api;
use serde_json::json;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::Demo;
use super::setup::text;
use crate::commands::Failure;
use cli::table::print_note;

/// Guests who join. More than a gathering has seats, so that waitlists fill.
const GUESTS: usize = 12;
const SEATS: u64 = 5;
/// A new gathering is published after this many joins and cancellations.
const STEPS_PER_GATHERING: usize = 20;
/// Items of a project, and how many of them are marked at once.
const ITEMS: usize = 60;
const ITEMS_PER_STEP: usize = 4;
const TITLES: [(&str, &str, &str); 4] = [
    ("Rust meetup", "Zürich", "tech"),
    ("Jazz night", "Berlin", "music"),
    ("Morning run", "Wien", "sports"),
    ("Street food market", "Lyon", "food"),
];

/// Starts the organizer with the people, and the worker of the projects.
pub(super) fn start(demo: &Demo, tasks: &TaskTracker) -> Result<(), Failure> {
    let organizer = demo.user(Uuid::now_v7())?;
    let people = (0..GUESTS).map(|_| demo.user(Uuid::now_v7())).collect::<Result<Vec<_>, Failure>>()?;
    let worker = demo.user(Uuid::now_v7())?;
    tasks.spawn(organize(demo.clone(), organizer, people));
    tasks.spawn(process_projects(demo.clone(), worker));
    Ok(())
}

async fn organize(demo: Demo, organizer: Api, people: Vec<Api>) {
    let (mut published, mut step, mut joined) = (Vec::new(), 0_usize, VecDeque::new());
    while demo.wait(demo.pause).await {
        if step.is_multiple_of(STEPS_PER_GATHERING) {
            published.extend(publish(&demo, &organizer, published.len()).await);
            joined.clear();
        }
        step += 1;
        let Some(id) = published.last() else { continue };
        // Two join, then the one who joined first cancels.
        let (who, verb) = match joined.front().copied() {
            Some(first) if step.is_multiple_of(3) => {
                joined.pop_front();
                (first, "cancel")
            }
            _ => {
                joined.push_back(step % GUESTS);
                (step % GUESTS, "join")
            }
        };
        if let Some(person) = people.get(who) {
            let answer = person.send(Method::POST, &format!("/join/v1/events/{id}/{verb}"), None).await;
            demo.count(answer, &demo.counts.joins);
        }
    }
    for id in published {
        let path = format!("/event/v1/events/{id}/cancel");
        if let Err(error) = organizer.post(&path, &json!({"reason": "the demo has ended"})).await {
            print_note(&format!("warning: the gathering {id} is not canceled: {error}"));
        }
    }
}

/// Creates and publishes a gathering. Returns its id.
async fn publish(demo: &Demo, organizer: &Api, number: usize) -> Option<String> {
    let (title, city, category) = TITLES[number % TITLES.len()];
    let start = Utc::now() + TimeDelta::days(7);
    let time = |time: chrono::DateTime<Utc>| time.to_rfc3339_opts(SecondsFormat::Secs, true);
    let body = json!({"title": format!("{title} (demo-{})", number + 1), "city": city, "category": category,
        "capacity": SEATS, "time_zone": "Europe/Zurich", "start_time": time(start),
        "end_time": time(start + TimeDelta::hours(3))});
    let created = organizer.post("/event/v1/events", &body).await.ok()?;
    let id = text(&created, "id").ok()?.to_owned();
    let published = organizer.send(Method::POST, &format!("/event/v1/events/{id}/publish"), None).await;
    demo.count(published, &demo.counts.gatherings).map(|_| id)
}

/// One project after the other: its items are found, then marked, some of them as errors, until it is done.
async fn process_projects(demo: Demo, worker: Api) {
    while demo.wait(demo.pause).await {
        let Ok(project) =
            worker.post("/progress/v1/projects", &json!({"id": format!("demo-{}", Uuid::now_v7())})).await
        else {
            continue;
        };
        let Ok(id) = text(&project, "id") else { continue };
        let path = format!("/progress/v1/projects/{id}");
        let total = json!({"status": "PROCESSING", "total": ITEMS});
        if worker.send(Method::PATCH, &path, Some(&total)).await.is_err() {
            continue;
        }
        for first in (0..ITEMS).step_by(ITEMS_PER_STEP) {
            if !demo.wait(demo.pause.min(Duration::from_secs(2))).await {
                let failed = worker.send(Method::PATCH, &path, Some(&json!({"status": "FAILED"}))).await;
                if let Err(error) = failed {
                    print_note(&format!("warning: the project {id} is not ended: {error}"));
                }
                return;
            }
            let items = first..(first + ITEMS_PER_STEP).min(ITEMS);
            let item = |n: usize| json!({"id": format!("page-{n}"), "error": n % 13 == 12});
            let body = json!({"items": items.map(item).collect::<Vec<_>>()});
            let marked = worker.post(&format!("{path}/items"), &body).await;
            demo.count(marked, &demo.counts.items);
        }
    }
}
