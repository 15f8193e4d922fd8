//! Invariants that must hold after every run, in plain SQL.

use sqlx::PgPool;

use crate::Outcome;

const VIOLATIONS: [(&str, &str); 5] = [
    (
        "more active than there are seats",
        "select count(*) from pillarbox_joins.event_capacity where capacity > 0 and active_count > capacity",
    ),
    (
        "the counters differ from the rows",
        "select count(*) from pillarbox_joins.event_capacity e
         left join (select event_id, count(*) filter (where status = 'active') as active,
                           count(*) filter (where status = 'waitlisted') as waiting
                    from pillarbox_joins.joins group by event_id) j using (event_id)
         where e.active_count <> coalesce(j.active, 0) or e.waitlist_count <> coalesce(j.waiting, 0)",
    ),
    (
        "a seq is missing or duplicate",
        "select count(*) from pillarbox_joins.event_capacity e
         left join (select event_id, count(*) as n, count(distinct seq) as d, max(seq) as hi
                    from pillarbox_joins.history group by event_id) h using (event_id)
         where (e.next_seq - 1, e.next_seq - 1, e.next_seq - 1) <> (coalesce(h.n, 0), coalesce(h.d, 0), coalesce(h.hi, 0))",
    ),
    (
        "a waitlisted user is ahead of an active one, or waits despite a free seat",
        "select count(*) from pillarbox_joins.event_capacity e
         join (select event_id, max(seq) filter (where status = 'active') as last,
                      min(seq) filter (where status = 'waitlisted') as first
               from pillarbox_joins.joins group by event_id) j using (event_id)
         where j.first < j.last or (e.waitlist_count > 0 and e.active_count < e.capacity)",
    ),
    (
        "a join without a message, or a message without a join",
        "select abs((select count(*) from pillarbox_joins.history)
                  - (select count(*) from pillarbox.log where source = 'joins'))",
    ),
];

pub(super) async fn check(db: &PgPool) -> Outcome<()> {
    for (what, query) in VIOLATIONS {
        let found: i64 = sqlx::query_scalar(query).fetch_one(db).await?;
        if found > 0 {
            return Err(format!("{what}: {found}").into());
        }
    }
    Ok(())
}
