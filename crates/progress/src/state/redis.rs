//! Counts in Redis: the hash `smap:proj:{id}` with the fields `status`, `total`, `done` and `errors`, which other programs may
//! read and increment, and two companions with the same TTL: the set of the counted ids, with the token among them, and the rate,
//! with when the project has ended and which requests have changed it.
//!
//! Each change is one script, so it is atomic. Redis has every write in memory first, so a restart may lose writes that were
//! confirmed, and so may a failover. Both change the run of Redis, and counts that were initialised in another run are lost
//! (decision 0016).

mod link;
mod scripts;

use std::time::Duration;

use chrono::{DateTime, Utc};
use futures_util::future::try_join_all;
use redis::{FromRedisValue, Value};
use runtime::clock::Clock;
use uuid::Uuid;

use self::link::Connected;
pub(crate) use self::link::Link;
use self::scripts::Script;
use super::ReadResult;
use crate::counts::{Changed, Counts, Limits, Reading, Replaced};
use crate::domain::{Items, Rate, Snapshot, Status, Target};
use crate::error::StateError;

/// A control character, which no id of an item contains, distinguishes the token from the ids.
const TOKEN_MARK: char = '\u{1}';
/// Reads that are in flight together.
const READS: usize = 200;

/// The counts in one Redis.
pub(crate) struct RedisState {
    pub(crate) link: Link,
    /// The prefix of all keys of this installation.
    pub(crate) prefix: String,
    /// Whether the state survives a restart of Redis.
    pub(crate) is_durable: bool,
    pub(crate) clock: Clock,
    pub(crate) limits: Limits,
}

/// The answer of a script: an outcome, the four fields, and some numbers.
struct Answer {
    outcome: String,
    snapshot: Option<Snapshot>,
    counted: i64,
    ended: Option<DateTime<Utc>>,
    /// Whether the request had its effect before.
    is_known: bool,
    rate: Option<Rate>,
}

impl RedisState {
    pub(super) async fn check(&self) -> Result<(), StateError> {
        self.link.connected().await.map(drop)
    }

    pub(super) async fn initialise(
        &self,
        project_id: &str,
        token: Uuid,
        expires_at: DateTime<Utc>,
    ) -> Result<String, StateError> {
        let redis = self.link.connected().await?;
        let ttl_ms = (expires_at - self.clock.now()).num_milliseconds().max(1);
        let mut command = self.command(&scripts::INITIALISE, project_id, token);
        command.arg(ttl_ms).arg(Snapshot::INITIAL.status.as_str());
        self.run(&redis, &scripts::INITIALISE, &command).await?;
        Ok(redis.run.clone())
    }

    pub(super) async fn mark(&self, counts: &Counts, items: &Items) -> Result<Option<Changed>, StateError> {
        let Some(redis) = self.server_of(counts).await? else { return Ok(None) };
        let mut command = self.command(&scripts::MARK, &counts.project_id, counts.token);
        command.arg(self.limits.items_max).arg(items.succeeded.len()).arg(&items.succeeded).arg(&items.failed);
        let answer = self.run(&redis, &scripts::MARK, &command).await?;
        if answer.outcome == "full" {
            return Err(StateError::TooManyItems(self.limits.items_max));
        }
        self.confirm_loss(&redis, answer.snapshot.is_none()).await?;
        Ok(answer.changed())
    }

    /// Sets the status and the total, if they are still those of `from`. Completes the project if it is at the finish line then.
    pub(crate) async fn replace(
        &self,
        counts: &Counts,
        request: Option<&str>,
        from: &Snapshot,
        to: Target,
    ) -> Result<Replaced, StateError> {
        let Some(redis) = self.server_of(counts).await? else { return Ok(Replaced::Lost) };
        let mut command = self.command(&scripts::REPLACE, &counts.project_id, counts.token);
        command.arg(request_field(request));
        command.arg(from.status.as_str()).arg(from.total).arg(to.status.as_str()).arg(to.total);
        let answer = self.run(&redis, &scripts::REPLACE, &command).await?;
        if answer.outcome == "conflict" {
            return Ok(Replaced::Conflict);
        }
        self.confirm_loss(&redis, answer.snapshot.is_none()).await?;
        Ok(answer.changed().map_or(Replaced::Lost, Replaced::Changed))
    }

    /// Whether a request has had its effect on these counts.
    pub(crate) async fn has_applied(&self, counts: &Counts, request: &str) -> Result<bool, StateError> {
        let Some(redis) = self.server_of(counts).await? else { return Ok(false) };
        Ok(self.read_one(&redis, counts, false, Some(request)).await?.is_known)
    }

    pub(super) async fn read(&self, many: &[Counts], completes: bool) -> Result<Vec<ReadResult>, StateError> {
        let redis = self.link.connected().await?;
        let mut readings = Vec::with_capacity(many.len());
        for some in many.chunks(READS) {
            // The connection sends what is ready together, and Redis answers in order.
            let reads = some.iter().map(async |counts| {
                if !self.has(&redis, counts) {
                    return Ok(Ok(None));
                }
                match self.read_one(&redis, counts, completes, None).await {
                    Ok(answer) => Ok(Ok(answer.reading())),
                    // One project that a script cannot read does not concern the others.
                    Err(error @ StateError::Script(_)) => Ok(Err(error)),
                    Err(other) => Err(other),
                }
            });
            readings.extend(try_join_all(reads).await?);
        }
        self.confirm_loss(&redis, readings.iter().any(|reading| matches!(reading, Ok(None)))).await?;
        Ok(readings)
    }

    /// Deletes all counts of these projects.
    pub(super) async fn delete(&self, project_ids: &[String]) -> Result<(), StateError> {
        if project_ids.is_empty() {
            return Ok(());
        }
        let redis = self.link.connected().await?;
        // It returns at once, and Redis releases the memory later.
        let mut command = redis::cmd("UNLINK");
        for id in project_ids {
            let key = self.key(id);
            command.arg(format!("{key}:items")).arg(format!("{key}:rate")).arg(key);
        }
        self.link.execute(&redis, &command).await
    }

    async fn read_one(
        &self,
        redis: &Connected,
        counts: &Counts,
        completes: bool,
        request: Option<&str>,
    ) -> Result<Answer, StateError> {
        let mut command = self.command(&scripts::READ, &counts.project_id, counts.token);
        command.arg(i32::from(completes)).arg(request_field(request));
        self.run(redis, &scripts::READ, &command).await
    }

    /// The connection, if these counts can be complete there.
    async fn server_of(&self, counts: &Counts) -> Result<Option<Connected>, StateError> {
        let redis = self.link.connected().await?;
        let has_counts = self.has(&redis, counts);
        self.confirm_loss(&redis, !has_counts).await?;
        Ok(has_counts.then_some(redis))
    }

    /// Before counts are reported as lost: fails if the server has become a replica since it was checked. Counts that are
    /// missing there are not lost.
    async fn confirm_loss(&self, redis: &Connected, is_lost: bool) -> Result<(), StateError> {
        if is_lost { self.link.confirm(redis).await } else { Ok(()) }
    }

    /// Whether these counts can be complete on this server: a connection belongs to one run of Redis.
    fn has(&self, redis: &Connected, counts: &Counts) -> bool {
        self.is_durable || redis.run == counts.run
    }

    /// A call of a script for a project. `project_id` contains no colon, so no two keys are the same.
    fn command(&self, script: &Script, project_id: &str, token: Uuid) -> redis::Cmd {
        let key = self.key(project_id);
        let mut command = redis::cmd("EVALSHA");
        command.arg(script.hash()).arg(3).arg(&key).arg(format!("{key}:items")).arg(format!("{key}:rate"));
        command.arg(format!("{TOKEN_MARK}{}", token.simple()));
        command.arg(self.clock.now().timestamp_millis()).arg(self.limits.keep.num_milliseconds());
        command
    }

    fn key(&self, project_id: &str) -> String {
        format!("{}smap:proj:{project_id}", self.prefix)
    }

    async fn run(&self, redis: &Connected, script: &Script, command: &redis::Cmd) -> Result<Answer, StateError> {
        let value = self.link.query(redis, script, command).await?;
        Answer::parse(value).map_err(|error| StateError::Script(error.to_string()))
    }
}

impl Answer {
    fn parse(value: Value) -> Result<Answer, redis::ParsingError> {
        let (outcome, status, numbers, rate): (String, String, Vec<i64>, Vec<String>) =
            FromRedisValue::from_redis_value(value)?;
        let number = |at: usize| numbers.get(at).copied().unwrap_or_default();
        let snapshot = (outcome == "ok").then(|| status.parse::<Status>().ok()).flatten().map(|status| Snapshot {
            status,
            total: number(0),
            done: number(1),
            errors: number(2),
        });
        let ended = Some(number(4)).filter(|ms| *ms > 0).and_then(DateTime::from_timestamp_millis);
        let (counted, is_known) = (number(3), number(5) == 1);
        Ok(Answer { outcome, snapshot, counted, ended, is_known, rate: parse_rate(&rate) })
    }

    fn changed(self) -> Option<Changed> {
        let Answer { counted, ended, .. } = self;
        self.snapshot.map(|snapshot| Changed { snapshot, counted, ended })
    }

    fn reading(self) -> Option<Reading> {
        let Answer { rate, ended, .. } = self;
        self.snapshot.map(|snapshot| Reading { snapshot, rate, ended })
    }
}

/// The field that remembers a request; empty for none.
fn request_field(request: Option<&str>) -> String {
    request.map(|request| format!("request:{request}")).unwrap_or_default()
}

/// The rate from its three fields; None if there is none.
fn parse_rate(fields: &[String]) -> Option<Rate> {
    let [at, value, since] = fields else { return None };
    let time = |text: &str| DateTime::from_timestamp_millis(text.parse::<f64>().ok()? as i64);
    Some(Rate { value: value.parse().ok()?, at: time(at)?, since: time(since)? })
}

/// How long to wait before the next attempt to connect, after this many failed ones.
fn reconnect_pause(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.min(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_to_connect_follow_after_1_2_and_4_seconds_and_then_every_4_seconds() {
        let pauses: Vec<u64> = (0..6).map(|failures| reconnect_pause(failures).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 4, 4, 4]);
    }
}
