//! The invariants of the joins service, as queries on its tables and its messages.

use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

/// The invariants: each query finds the events that violate one.
const VIOLATIONS: [(&str, &str); 11] = [
    (
        "the counts differ from the registrations",
        "select e.event_id::text from pillarbox_joins.event_capacity e
         left join (select event_id, count(*) filter (where status = 'active') as active,
                           count(*) filter (where status = 'waitlisted') as waiting
                    from pillarbox_joins.joins group by event_id) j using (event_id)
         where e.active_count <> coalesce(j.active, 0) or e.waitlist_count <> coalesce(j.waiting, 0)",
    ),
    (
        "a sequence number is missing or duplicated",
        "select e.event_id::text from pillarbox_joins.event_capacity e
         left join (select event_id, count(*) as n, count(distinct seq) as d, min(seq) as lo, max(seq) as hi
                    from pillarbox_joins.history where action = 'joined' group by event_id) h using (event_id)
         where coalesce(h.n, 0) <> e.next_seq - 1 or coalesce(h.d, 0) <> e.next_seq - 1
            or coalesce(h.lo, 1) <> 1 or coalesce(h.hi, 0) <> e.next_seq - 1",
    ),
    (
        "a waitlisted registration is older than an active one",
        "select w.event_id::text from pillarbox_joins.joins w
         where w.status = 'waitlisted' and w.seq <
             (select max(a.seq) from pillarbox_joins.joins a where a.event_id = w.event_id and a.status = 'active')",
    ),
    (
        "a registration was promoted before an older one",
        "select p.event_id::text from pillarbox_joins.history p
         join pillarbox_joins.history w on w.event_id = p.event_id and w.action = 'joined'
              and w.to_status = 'waitlisted' and w.seq < p.seq and w.version < p.version
         where p.action = 'promoted' and not exists
             (select from pillarbox_joins.history x where x.event_id = p.event_id and x.seq = w.seq
              and x.version > w.version and x.version < p.version and x.from_status = 'waitlisted')",
    ),
    (
        "the history does not lead to the current status",
        "select j.event_id::text from pillarbox_joins.joins j
         left join lateral (select to_status, seq from pillarbox_joins.history h
                            where h.event_id = j.event_id and h.user_id = j.user_id order by version desc limit 1) h on true
         where h.to_status is distinct from j.status or h.seq is distinct from j.seq",
    ),
    (
        "a history entry does not start with the status of the previous one",
        "select event_id::text from
             (select event_id, from_status, lag(to_status) over (partition by event_id, user_id order by version) as before
              from pillarbox_joins.history) h
         where from_status is distinct from before",
    ),
    (
        // A recount may be assigned a version far above the previous one.
        "a version has no history entry",
        "select e.event_id::text from pillarbox_joins.event_capacity e
         left join (select event_id, max(version) as hi,
                           bool_or(action <> 'recounted' and version <> 1 + coalesce(before, 0)) as has_gap
                    from (select *, lag(version) over (partition by event_id order by version) as before
                          from pillarbox_joins.history) h
                    group by event_id) h using (event_id)
         where e.version <> coalesce(h.hi, 0) or h.has_gap",
    ),
    (
        "a later version has an earlier time",
        "select event_id::text from
             (select event_id, at, lag(at) over (partition by event_id order by version) as before
              from pillarbox_joins.history) h
         where at < before",
    ),
    (
        "a change was not posted, or posted twice",
        "select coalesce(h.event_id::text, m.key) from pillarbox_joins.history h
         full join (select key, (payload->'counts'->>'version')::bigint as version, count(*) as n
                    from pillarbox.log where source = 'joins' and topic <> 'join.counted' group by 1, 2) m
             on m.key = h.event_id::text and m.version = h.version
         where h.event_id is null or m.key is null or m.n <> 1",
    ),
    (
        "a message has other counts than the history",
        "select h.event_id::text from
             (select event_id, version,
                     sum((to_status = 'active')::int - coalesce((from_status = 'active')::int, 0)) over steps as active,
                     sum((to_status = 'waitlisted')::int - coalesce((from_status = 'waitlisted')::int, 0)) over steps as waiting
              from (select event_id, version, coalesce(to_status, 'canceled') as to_status, from_status
                    from pillarbox_joins.history) h
              window steps as (partition by event_id order by version)) h
         join pillarbox.log m on m.source = 'joins' and m.key = h.event_id::text
              and (m.payload->'counts'->>'version')::bigint = h.version
         where (m.payload->'counts'->>'active')::int <> h.active
            or (m.payload->'counts'->>'waitlisted')::int <> h.waiting",
    ),
    (
        "a message has no trace id",
        "select key from pillarbox.log where source = 'joins' and topic <> 'join.counted'
         and coalesce(length(payload->>'trace_id'), 0) <> 32",
    ),
];

/// Fails if an invariant is violated. The events in `lowered`, whose capacity was lowered, may exceed their capacity.
pub(crate) async fn check_invariants(db: &PgPool, lowered: &[Uuid]) {
    for (what, query) in VIOLATIONS {
        let found: Vec<String> = sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_all(db).await.unwrap();
        assert!(found.is_empty(), "{what}: {found:?}");
    }
    let too_full = "select event_id::text from pillarbox_joins.event_capacity
                    where capacity > 0 and active_count > capacity and event_id <> all($1)";
    let found: Vec<String> = sqlx::query_scalar(too_full).bind(lowered).fetch_all(db).await.unwrap();
    assert!(found.is_empty(), "more active registrations than the capacity: {found:?}");
}
