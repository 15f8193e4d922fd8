//! The connection to the Redis with the counts: opened in the background, and never waited for by a request.
//!
//! A connection belongs to one run of Redis: it does not survive a restart. It does survive that the server becomes a replica and is
//! promoted again, with what another server had; the check finds that, and drops the connection.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, ServerErrorKind, Value};
use runtime::health::Probe;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::reconnect_pause;
use super::scripts::{ALL, Script};
use crate::error::StateError;

/// Time limit of an attempt to connect, and of a command. Redis answers within milliseconds.
const RESPONSE_TIME_MAX: Duration = Duration::from_secs(2);
/// How long the first requests of a process wait for the first attempt to connect.
const START_TIME_MAX: Duration = Duration::from_secs(2);
/// Time between two checks of a connection.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
/// How long the key of the check stays.
const PROBE_TTL: Duration = Duration::from_secs(60);
const BROKEN: LinkError = LinkError::Unusable("the connection is broken");
/// The share of the memory above which Redis is reported as nearly full.
const MEMORY_RATIO_MAX: f64 = 0.8;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Redis(#[from] redis::RedisError),
    #[error("{0}")]
    Unusable(&'static str),
}

/// A connection to one run of Redis. It is cheap to clone.
#[derive(Clone)]
pub(crate) struct Connected {
    connection: MultiplexedConnection,
    /// The process, and the history of its data: a server that is promoted begins a new one.
    pub(super) run: String,
    /// Counts the connections of this process.
    number: u64,
}

#[derive(Clone)]
enum LinkState {
    /// The first attempt to connect has not ended.
    Starting,
    Up(Box<Connected>),
    Down {
        retry_at: Instant,
    },
}

pub(crate) struct Link {
    client: redis::Client,
    /// A key that the check writes, to find out whether Redis accepts writes.
    probe_key: String,
    state: watch::Sender<LinkState>,
}

impl Link {
    /// A link that [`Link::run`] opens.
    pub(crate) fn new(client: redis::Client, prefix: &str) -> Link {
        // The id of a project is not empty, and contains no colon.
        let probe_key = format!("{prefix}smap:proj::probe");
        Link { client, probe_key, state: watch::Sender::new(LinkState::Starting) }
    }

    /// The connection. Fails at once while there is none.
    pub(super) async fn connected(&self) -> Result<Connected, StateError> {
        if let LinkState::Up(connected) = &*self.state.borrow() {
            return Ok(Connected::clone(connected));
        }
        let mut states = self.state.subscribe();
        let has_started = states.wait_for(|state| !matches!(state, LinkState::Starting));
        // Whether it has ended or not, the state decides.
        let _ = tokio::time::timeout(START_TIME_MAX, has_started).await;
        match &*self.state.borrow() {
            LinkState::Up(connected) => Ok(Connected::clone(connected)),
            LinkState::Starting => Err(StateError::Unavailable { retry_after: CHECK_PAUSE }),
            LinkState::Down { retry_at } => {
                Err(StateError::Unavailable { retry_after: retry_at.saturating_duration_since(Instant::now()) })
            }
        }
    }

    /// Runs a script. Loads it first if Redis does not know it, as after `SCRIPT FLUSH`.
    pub(super) async fn query(
        &self,
        connected: &Connected,
        script: &Script,
        command: &redis::Cmd,
    ) -> Result<Value, StateError> {
        let mut redis = connected.connection.clone();
        let outcome = match command.query_async(&mut redis).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                match load(&mut redis, script).await {
                    Ok(()) => command.query_async(&mut redis).await,
                    Err(error) => Err(error),
                }
            }
            outcome => outcome,
        };
        outcome.map_err(|error| self.failed(connected, &error))
    }

    /// Runs a command whose answer does not matter.
    pub(super) async fn execute(&self, connected: &Connected, command: &redis::Cmd) -> Result<(), StateError> {
        let answer: redis::RedisResult<Value> = command.query_async(&mut connected.connection.clone()).await;
        answer.map(drop).map_err(|error| self.failed(connected, &error))
    }

    /// Fails, and drops the connection, unless the server is still in the run of this connection.
    pub(super) async fn confirm(&self, connected: &Connected) -> Result<(), StateError> {
        let mut redis = connected.connection.clone();
        let info: redis::RedisResult<String> = redis::cmd("INFO").query_async(&mut redis).await;
        let info = info.map_err(|error| self.failed(connected, &error))?;
        if run_of(&info).is_ok_and(|run| run == connected.run) {
            return Ok(());
        }
        self.drop_connection(connected.number);
        Err(StateError::Unavailable { retry_after: reconnect_pause(0) })
    }

    /// The error of a command. A connection that no longer works is dropped, so that no other request waits for it.
    fn failed(&self, connected: &Connected, error: &redis::RedisError) -> StateError {
        match refusal(error.code(), &error.to_string()) {
            Some(Refusal::Memory) => return StateError::MemoryFull,
            Some(Refusal::Command(code)) => return StateError::Refused(code),
            Some(Refusal::Server) => {}
            None if matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse) => {}
            None if error.is_unrecoverable_error() || error.is_timeout() => {}
            None => return StateError::Script(error.to_string()),
        }
        tracing::debug!(%error, "a command failed in the Redis of progress");
        self.drop_connection(connected.number);
        StateError::Unavailable { retry_after: reconnect_pause(0) }
    }

    fn drop_connection(&self, number: u64) {
        self.state.send_if_modified(|state| match state {
            LinkState::Up(connected) if connected.number == number => {
                *state = LinkState::Down { retry_at: Instant::now() + reconnect_pause(0) };
                true
            }
            _ => false,
        });
    }

    /// Connects, checks the connection, and connects again when it is broken, until `stop`.
    pub(crate) async fn run(&self, probe: &Probe, stop: &CancellationToken) {
        let (mut failures, mut number) = (0, 0);
        while !stop.is_cancelled() {
            number += 1;
            match self.connect(number).await {
                Ok(connected) => {
                    failures = 0;
                    self.state.send_replace(LinkState::Up(Box::new(connected.clone())));
                    metrics::gauge!("pillarbox_progress_redis_up").set(1.0);
                    let error = tokio::select! {
                        error = self.watch(connected, probe) => error,
                        () = stop.cancelled() => return,
                    };
                    probe.down(&error.to_string());
                }
                Err(error) => probe.down(&error.to_string()),
            }
            metrics::gauge!("pillarbox_progress_redis_up").set(0.0);
            let pause = reconnect_pause(failures);
            failures += 1;
            self.state.send_replace(LinkState::Down { retry_at: Instant::now() + pause });
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    async fn connect(&self, number: u64) -> redis::RedisResult<Connected> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(RESPONSE_TIME_MAX))
            .set_response_timeout(Some(RESPONSE_TIME_MAX));
        let mut connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let info: String = redis::cmd("INFO").query_async(&mut connection).await?;
        let run = run_of(&info).map_err(|detail| redis::RedisError::from((ErrorKind::Client, detail)))?;
        for script in ALL {
            load(&mut connection, script).await?;
        }
        Ok(Connected { connection, run, number })
    }

    /// Checks the connection once a second, and reports what an operator has to know. Returns when it is broken.
    async fn watch(&self, mut connected: Connected, probe: &Probe) -> LinkError {
        let (mut reported, number) = (None, connected.number);
        loop {
            let concern = tokio::select! {
                concern = self.examine(&mut connected) => concern,
                () = self.is_dropped(number) => Err(BROKEN),
            };
            let concern = match concern {
                Ok(concern) => concern,
                Err(error) => {
                    self.drop_connection(number);
                    return error;
                }
            };
            match &concern {
                None => probe.up(),
                Some(concern) => probe.down(concern),
            }
            if concern != reported {
                if let Some(concern) = &concern {
                    tracing::warn!(concern, "the Redis of progress may lose state");
                }
                reported = concern;
            }
            tokio::select! {
                () = tokio::time::sleep(CHECK_PAUSE) => {}
                () = self.is_dropped(number) => return BROKEN,
            }
        }
    }

    /// Returns the concern about the server that an operator has to know. Fails if the connection cannot be used any more.
    async fn examine(&self, connected: &mut Connected) -> Result<Option<String>, LinkError> {
        let info: String = redis::cmd("INFO").query_async(&mut connected.connection).await?;
        if run_of(&info).map_err(LinkError::Unusable)? != connected.run {
            return Err(LinkError::Unusable("the server has become a primary with other data"));
        }
        let mut write = redis::cmd("SET");
        write.arg(&self.probe_key).arg(1).arg("PX").arg(PROBE_TTL.as_millis() as u64);
        let written: redis::RedisResult<()> = write.query_async(&mut connected.connection).await;
        let refused = written.err().map(|error| format!("it refuses writes: {error}"));
        let memory = Memory::parse(&info);
        metrics::gauge!("pillarbox_progress_redis_memory_ratio").set(memory.ratio());
        Ok(refused.or_else(|| concern(&memory)))
    }

    /// Waits until a request has found the connection with this number broken.
    async fn is_dropped(&self, number: u64) {
        let is_other = |state: &LinkState| !matches!(state, LinkState::Up(current) if current.number == number);
        // Fails only when the link itself is dropped.
        let _ = self.state.subscribe().wait_for(is_other).await;
    }
}

async fn load(redis: &mut MultiplexedConnection, script: &Script) -> redis::RedisResult<()> {
    redis::cmd("SCRIPT").arg("LOAD").arg(script.code()).query_async(redis).await
}

/// The run of a server, from `INFO`. Fails if the server must not have counts: what a replica has may be old, and disappears when it
/// is synchronized.
fn run_of(info: &str) -> Result<String, &'static str> {
    match field(info, "role") {
        Some("master") => {}
        Some(_) => return Err("the server is a replica: progress needs the primary"),
        None => return Err("INFO has no role: use a server that has one"),
    }
    // Without both, counts that lack something could not be detected.
    let ids = field(info, "run_id").zip(field(info, "master_replid"));
    let (process, history) = ids.ok_or("INFO has no run_id or no master_replid: use a server that has both")?;
    Ok(format!("{process}:{history}"))
}

/// Why a server refuses a command that is correct.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    Memory,
    /// This command: the server answers others.
    Command(&'static str),
    /// Everything at present, or it is a replica by now: the connection is opened again.
    Server,
}

/// The refusal that an error of Redis means; None for other errors. Before version 7, an error inside a script has its code in the
/// text only.
fn refusal(code: Option<&str>, text: &str) -> Option<Refusal> {
    let is = |name: &str| code == Some(name) || text.contains(&format!("-{name} "));
    if is("OOM") || text.contains("OOM command not allowed") {
        return Some(Refusal::Memory);
    }
    if ["READONLY", "MASTERDOWN", "LOADING", "BUSY", "NOAUTH"].into_iter().any(is) {
        return Some(Refusal::Server);
    }
    ["MISCONF", "NOREPLICAS", "NOPERM"].into_iter().find(|name| is(name)).map(Refusal::Command)
}

/// The memory of Redis, as `INFO` reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Memory {
    used: u64,
    /// 0: no limit.
    max: u64,
    policy: String,
}

impl Memory {
    fn parse(info: &str) -> Memory {
        let number = |name| field(info, name).and_then(|value| value.parse().ok()).unwrap_or_default();
        let policy = field(info, "maxmemory_policy").unwrap_or_default().to_owned();
        Memory { used: number("used_memory"), max: number("maxmemory"), policy }
    }

    /// The used share of the limit; 0 without a limit.
    fn ratio(&self) -> f64 {
        if self.max == 0 { 0.0 } else { self.used as f64 / self.max as f64 }
    }
}

/// The concern about the memory that an operator has to know; None if all is well.
fn concern(memory: &Memory) -> Option<String> {
    let ratio = memory.ratio();
    // Without a limit, nothing is evicted. All our keys have a TTL, so the `volatile` policies also evict them.
    if memory.max > 0 && memory.policy != "noeviction" {
        return Some(format!(
            "maxmemory-policy is {}, which evicts the state of unfinished projects when the memory is full: set it to noeviction, \
             and use a Redis that no cache shares",
            memory.policy
        ));
    }
    (ratio > MEMORY_RATIO_MAX).then(|| {
        let percent = ratio * 100.0;
        format!("{percent:.0} % of maxmemory are used; when it is full, no item can be marked: raise maxmemory")
    })
}

/// The value of a field of `INFO`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_evicts_and_a_nearly_full_memory_are_reported() {
        let memory = |used, max, policy: &str| Memory { used, max, policy: policy.to_owned() };
        for policy in ["allkeys-lru", "volatile-ttl", "volatile-lru", "allkeys-random"] {
            assert!(concern(&memory(1, 100, policy)).is_some_and(|text| text.contains(policy)));
            assert_eq!(concern(&memory(1, 0, policy)), None, "there is no limit");
        }
        assert_eq!(concern(&memory(80, 100, "noeviction")), None);
        assert!(concern(&memory(81, 100, "noeviction")).is_some_and(|text| text.contains("81 %")));
    }

    #[test]
    fn the_used_share_of_the_memory_is_measured_against_its_limit() {
        let memory = |used, max| Memory { used, max, policy: String::new() };
        assert_eq!([memory(25, 100).ratio(), memory(25, 0).ratio()], [0.25, 0.0]);
    }

    #[test]
    fn a_replica_has_no_run_and_a_promotion_begins_another() {
        let info = |role: &str, history: &str| format!("run_id:a\r\nrole:{role}\r\nmaster_replid:{history}\r\n");
        assert_eq!(run_of(&info("master", "x")), Ok("a:x".to_owned()));
        assert_ne!(run_of(&info("master", "x")), run_of(&info("master", "y")));
        assert!(run_of(&info("slave", "x")).unwrap_err().contains("replica"));
        assert!(run_of("run_id:a\r\nrole:master\r\n").is_err());
    }

    #[test]
    fn a_refusal_is_recognised_by_its_code_and_inside_a_script() {
        for code in ["READONLY", "MASTERDOWN", "LOADING", "BUSY", "NOAUTH"] {
            assert_eq!(refusal(Some(code), ""), Some(Refusal::Server), "{code}");
        }
        for code in ["MISCONF", "NOREPLICAS", "NOPERM"] {
            assert_eq!(refusal(Some(code), ""), Some(Refusal::Command(code)));
        }
        let inside = "Error running script (call to f_1): @user_script:9: @user_script: 9: -READONLY You can't write against a replica";
        assert_eq!(refusal(Some("ERR"), inside), Some(Refusal::Server));
        assert_eq!(refusal(Some("OOM"), ""), Some(Refusal::Memory));
        assert_eq!(refusal(Some("ERR"), "attempt to compare nil with number"), None);
    }

    #[test]
    fn the_fields_of_info_are_found() {
        let info =
            "# Memory\r\nused_memory:100\r\nused_memory_human:1K\r\nmaxmemory:200\r\nmaxmemory_policy:noeviction\r\n";
        assert_eq!(Memory::parse(info), Memory { used: 100, max: 200, policy: "noeviction".to_owned() });
        assert_eq!(field(info, "run_id"), None);
    }
}
