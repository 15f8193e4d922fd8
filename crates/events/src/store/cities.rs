use sqlx::{PgConnection, Row};

use crate::domain::Name;

/// One more or fewer published event of each of these cities. True if a city came or went.
pub(crate) async fn count(db: &mut PgConnection, changes: &[(&Name, i64)]) -> sqlx::Result<bool> {
    let mut changes = changes.to_vec();
    // In one order everywhere, so that two transactions wait for each other in one direction only.
    changes.sort_by(|(one, _), (other, _)| one.folded.cmp(&other.folded));
    let mut came_or_went = false;
    for (name, change) in changes {
        let events: i64 = sqlx::query_scalar(
            "insert into pillarbox_events.city as old (city_norm, city, events) values ($1, $2, greatest($3, 0))
             on conflict (city_norm) do update
             set events = greatest(old.events + $3, 0), city = case when $3 > 0 then excluded.city else old.city end
             returning events",
        )
        .bind(&name.folded)
        .bind(&name.spelled)
        .bind(change)
        .fetch_one(&mut *db)
        .await?;
        came_or_went |= events == 0 || events == change;
    }
    Ok(came_or_went)
}

/// Those that begin so, the most used first.
pub(crate) async fn beginning_with(
    db: &mut PgConnection,
    prefix: &str,
    limit: u32,
) -> sqlx::Result<Vec<(String, i64)>> {
    let pattern = format!("{}%", prefix.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_"));
    let rows = sqlx::query(
        "select city, events from pillarbox_events.city
         where events > 0 and city_norm like $1 order by events desc, city_norm limit $2",
    )
    .bind(pattern)
    .bind(i64::from(limit))
    .fetch_all(db)
    .await?;
    rows.iter().map(|row| Ok((row.try_get("city")?, row.try_get("events")?))).collect()
}
