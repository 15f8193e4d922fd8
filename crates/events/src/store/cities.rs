//! Cities and the number of their published events.

use sqlx::PgConnection;

use crate::domain::Name;

/// Adds to the number of published events of each city. Returns whether the set of cities with events has changed.
pub(crate) async fn add_to_counts(db: &mut PgConnection, changes: &[(&Name, i64)]) -> sqlx::Result<bool> {
    let mut changes = changes.to_vec();
    // Every transaction locks cities in the same order, which prevents deadlocks.
    changes.sort_by(|(one, _), (other, _)| one.normalized.cmp(&other.normalized));
    let mut has_set_changed = false;
    for (name, change) in changes {
        let events: i64 = sqlx::query_scalar(
            "insert into pillarbox_events.city as old (city_norm, city, events) values ($1, $2, greatest($3, 0))
             on conflict (city_norm) do update
             set events = greatest(old.events + $3, 0), city = case when $3 > 0 then excluded.city else old.city end
             returning events",
        )
        .bind(&name.normalized)
        .bind(&name.spelled)
        .bind(change)
        .fetch_one(&mut *db)
        .await?;
        has_set_changed |= events == 0 || events == change;
    }
    Ok(has_set_changed)
}

/// The cities whose normalized name starts with `prefix`, those with the most events first.
pub(crate) async fn with_prefix(db: &mut PgConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<(String, i64)>> {
    let pattern = format!("{}%", prefix.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_"));
    sqlx::query_as(
        "select city, events from pillarbox_events.city
         where events > 0 and city_norm like $1 order by events desc, city_norm limit $2",
    )
    .bind(pattern)
    .bind(i64::from(limit))
    .fetch_all(db)
    .await
}
