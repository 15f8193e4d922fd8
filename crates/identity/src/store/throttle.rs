//! Counts of attempts.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::domain::{Attempts, Limit};

/// A subject whose attempts are counted, and its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) kind: &'static str,
    pub(crate) digest: [u8; 32],
    pub(crate) limit: Limit,
}

pub(crate) async fn read<const COUNT: usize>(
    db: &mut PgConnection,
    subjects: &[Subject; COUNT],
    now: DateTime<Utc>,
) -> sqlx::Result<[Attempts; COUNT]> {
    let query = "select wanted.n::int as n, throttle.window_no = wanted.window_no as is_current, throttle.attempts
                 from unnest($1::text[], $2::bytea[], $3::bigint[]) with ordinality as wanted (kind, subject, window_no, n)
                 join pillarbox_identity.throttle on throttle.kind = wanted.kind and throttle.subject = wanted.subject
                     and throttle.window_no between wanted.window_no - 1 and wanted.window_no";
    let counts: Vec<CountRow> = sqlx::query_as(query)
        .bind(subjects.map(|subject| subject.kind).as_slice())
        .bind(subjects.iter().map(|subject| subject.digest.as_slice()).collect::<Vec<_>>())
        .bind(subjects.map(|subject| subject.limit.window_no(now)).as_slice())
        .fetch_all(db)
        .await?;
    let mut attempts = [Attempts::default(); COUNT];
    for row in counts {
        if let Some(of_subject) = attempts.get_mut(row.n as usize - 1) {
            let count = if row.is_current { &mut of_subject.current } else { &mut of_subject.previous };
            *count = row.attempts;
        }
    }
    Ok(attempts)
}

/// The attempts of the `n`th subject in one window, counting from 1.
#[derive(sqlx::FromRow)]
struct CountRow {
    n: i32,
    is_current: bool,
    attempts: i32,
}

/// Counts one attempt. The row is locked until the end of the transaction, so attempts of one subject are counted one after
/// the other.
pub(crate) async fn count(db: &mut PgConnection, subject: &Subject, now: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "insert into pillarbox_identity.throttle as old (kind, subject, window_no, attempts, expires_at)
                 values ($1, $2, $3, 1, $4)
                 on conflict (kind, subject, window_no) do update set attempts = old.attempts + 1";
    sqlx::query(query)
        .bind(subject.kind)
        .bind(subject.digest.as_slice())
        .bind(subject.limit.window_no(now))
        .bind(subject.limit.expires_at(now))
        .execute(db)
        .await
        .map(drop)
}

/// Deletes the counts of these kinds and subjects. The kinds are the first column of the primary key.
pub(crate) async fn delete(db: &mut PgConnection, kinds: &[&str], digests: &[[u8; 32]]) -> sqlx::Result<()> {
    let digests: Vec<&[u8]> = digests.iter().map(<[u8; 32]>::as_slice).collect();
    sqlx::query("delete from pillarbox_identity.throttle where kind = any($1) and subject = any($2)")
        .bind(kinds)
        .bind(digests)
        .execute(db)
        .await
        .map(drop)
}

/// The networks from which a user is known to sign in.
pub(crate) async fn known_networks(db: &mut PgConnection, user_id: uuid::Uuid) -> sqlx::Result<Vec<Vec<u8>>> {
    let query = "select network from pillarbox_identity.known_network where user_id = $1";
    sqlx::query_scalar(query).bind(user_id).fetch_all(db).await
}
