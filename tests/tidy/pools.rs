//! A request uses connections through a `Database` only, which counts them for the share of its caller. A bare pool is for
//! background work and commands.

use crate::paths::tokens;

/// Files and folders that have pools of their own or get them from a command, a start or a worker. Nothing in them gets a pool from
/// code of a request, because that has none.
const WITH_POOLS: &[&str] = &[
    // PostgreSQL below the services, and what runs outside of the product.
    "crates/pillarbox/",
    // It reads the size of a pool, whose connections it divides.
    "crates/http-kit/src/admission/caller_share.rs",
    // One loop for the writes of all requests.
    "crates/service/src/batched_writes.rs",
    "crates/testkit/",
    "crates/bench/",
    // Workers.
    "crates/admin/src/workers.rs",
    "crates/events/src/flow/trending.rs",
    "crates/events/src/workers.rs",
    "crates/hub/src/dispatch/",
    "crates/hub/src/health/totals.rs",
    "crates/hub/src/streams/waiters.rs",
    "crates/hub/src/tenants/quota.rs",
    "crates/hub/src/workers/",
    "crates/relay/src/intake_worker.rs",
    // Commands.
    "crates/events/src/flow/reconcile.rs",
    "crates/identity/src/flow/contact.rs",
    "crates/identity/src/flow/role.rs",
    "crates/server/src/commands/",
    "crates/admin/src/operator/flow.rs",
    // One reader for all requests, whose number of connections is fixed.
    "crates/events/src/coalesced_reads.rs",
    // The start of a process, its checks and its periodic tasks. The audit trail writes the lines of all callers over one
    // connection.
    "crates/server/src/app.rs",
    "crates/admin/src/audit.rs",
    "crates/server/src/checks.rs",
    "crates/server/src/clock_check.rs",
    "crates/server/src/embedded.rs",
    "crates/server/src/embedded/tcp.rs",
    "crates/admin/src/keys/flow.rs",
    "crates/server/src/pools.rs",
    "crates/admin/src/portal_tokens/flow.rs",
    "crates/admin/src/rate_exchange.rs",
    "crates/server/src/settings/convert.rs",
    "crates/admin/src/tenants/flow.rs",
    "crates/relay/src/relay.rs",
];

/// The files with tasks that need no share of a caller.
const WITHOUT_CALLER: [&str; 8] = [
    // Redis only.
    "crates/events/src/cache.rs",
    // What all requests wait for: at most three connections.
    "crates/hub/src/event_types/cache.rs",
    // Connections to endpoints.
    "crates/webhook-client/src/connection_pool.rs",
    // Tasks of workers, which no request starts: fan-out and e-mails.
    "crates/hub/src/fanout/checks.rs",
    "crates/notify/src/flow/sending.rs",
    // One loop for all requests.
    "crates/progress/src/watch.rs",
    // The broker, which no request reaches.
    "crates/relay/src/broker.rs",
    "crates/relay/src/intake.rs",
];

/// Crates that get no connection.
const STARTS_NO_REQUEST_TASK: [&str; 2] = ["crates/http-kit/", "crates/runtime/"];

/// What may precede `.pool()` in any file: the database of the workers.
const OF_WORKERS: [&[&str]; 2] = [&["runtime", ".", "db", "(", ")"], &["maintain", "(", "db"]];

pub(crate) fn bare_pools(path: &str, text: &str) -> Vec<String> {
    if path.contains("/tests/") || WITH_POOLS.iter().any(|allowed| path.starts_with(allowed)) {
        return Vec::new();
    }
    let tokens = tokens(text);
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let mut violations = Vec::new();
    let is_pool = |token: &&str| token.starts_with("PgPool") || *token == "PgConnectOptions" || *token == "PgListener";
    let has = |names: &[&str]| tokens.windows(names.len()).any(|window| window == names);
    if tokens.iter().any(is_pool) || has(&["sqlx", "::", "Pool"]) || has(&["Database", "::", "pool"]) {
        violations.push("a request must not have a pool: take a `pillarbox::database::Database`".to_owned());
    }
    for at in 0..tokens.len() {
        let is_call = tokens[at..].starts_with(&[".", "pool", "(", ")"]);
        if is_call && !OF_WORKERS.iter().any(|before| tokens[..at].ends_with(before)) {
            violations.push(
                "`.pool()` is for workers (`runtime.db().pool()`): a request uses `Database::acquire` or `begin`"
                    .to_owned(),
            );
        }
    }
    if has(&[".", "dedicated_connection", "("]) || has(&["PgConnection", "::", "connect"]) || has(&["connect_with"]) {
        violations.push(
            "a connection of its own is for loops and coalesced reads: a request uses `Database::acquire`".to_owned(),
        );
    }
    // The caller of a request does not follow a task that it starts. Some crates get no connection, and elsewhere than in a use case
    // `spawn` alone may be the one of a process, which starts loops.
    let is_of_request = ["/flow/", "/flow.rs", "/http/", "/http.rs"].iter().any(|part| path.contains(part));
    let starts_task = (is_of_request && has(&["spawn", "("]))
        || (!STARTS_NO_REQUEST_TASK.iter().any(|within| path.starts_with(within))
            && (has(&["tokio", "::", "spawn"]) || has(&["task", "::", "spawn"])));
    if starts_task && !tokens.contains(&"request_caller") && !WITHOUT_CALLER.contains(&path) {
        violations.push(
            "a task that a request starts runs in `http_kit::admission::caller_share::request_caller().run(..)`"
                .to_owned(),
        );
    }
    violations
}

mod samples {
    use super::*;

    const REQUEST: &str = "crates/events/src/flow/feed.rs";

    #[test]
    fn a_database_and_the_pool_of_workers_pass() {
        for good in [
            "async fn f(db: &Database) { db.acquire().await?; db.begin().await? }",
            "fn f(runtime: &Runtime) { let db = runtime.db().pool().clone(); }",
            "fn f() { worker.run(|| maintain(db.pool(), sweep(&db))) }",
            "// PgPool and db.pool()\nfn pool() {}",
            "fn f() { tokio::spawn(request_caller().run(async move { db.acquire().await })) }",
        ] {
            assert_eq!(bare_pools(REQUEST, good), [""; 0], "{good}");
        }
        assert_eq!(bare_pools("crates/server/src/commands/status.rs", "fn f(db: &PgPool) {}"), [""; 0]);
    }

    #[test]
    fn a_bare_pool_is_found() {
        for bad in [
            "use sqlx::PgPool;",
            "struct Events { feed_db: sqlx::PgPool }",
            "fn f() { PgPoolOptions::new() }",
            "fn build() { EventReader { db: db.pool().clone() } }",
            "fn f() { list(events\n    .db\n    .pool()) }",
            "struct Events { feed_db: sqlx::Pool<Postgres> }",
            "fn f() { Database::pool(&db) }",
            "fn f() { db.dedicated_connection() }",
            "async fn f() { PgConnection::connect_with(&options).await }",
            "fn f() { tokio::spawn(async move { db.acquire().await }) }",
        ] {
            assert!(!bare_pools(REQUEST, bad).is_empty(), "{bad}");
        }
    }

    #[test]
    fn a_task_without_a_caller_is_found_wherever_it_is() {
        let path = "crates/hub/src/event_types/compiled.rs";
        for bad in [
            "async fn for_all<T>(work: impl Future<Output = T>) { tokio::spawn(work).await }",
            "fn f() { tokio::task::spawn(async move { db.acquire().await }) }",
            "use tokio::spawn;",
        ] {
            assert!(!bare_pools(path, bad).is_empty(), "{bad}");
            assert_eq!(bare_pools("crates/hub/src/event_types/cache.rs", bad), [""; 0]);
            assert_eq!(bare_pools("crates/http-kit/src/serve.rs", bad), [""; 0]);
        }
        for good in ["fn f() { tokio::spawn(request_caller().run(g())) }", "fn f() { context.spawn(ingest_loop) }"] {
            assert_eq!(bare_pools(path, good), [""; 0], "{good}");
        }
    }
}
