//! Default routes of earlier versions: their cursors remain, and the log is retained for them.

use std::time::Duration;

use kit::worker::Round;
use mailbox::consumers::Runtime;
use mailbox::operations::status;

use crate::route::Route;

/// The routes that earlier versions had by default.
const FORMER: [&str; 1] = ["notification-topics"];

/// The pause between two reports.
const PAUSE: Duration = Duration::from_secs(3_600);

/// Starts a worker that reports the cursors of former default routes. An operator decides about them: a route with this name may
/// be configured in another process.
pub(crate) fn start(runtime: &Runtime, routes: &[Route]) {
    let former: Vec<String> = consumers(routes);
    let worker = runtime.worker("former routes".to_owned(), PAUSE);
    let db = runtime.db().clone();
    runtime.spawn(async move {
        worker
            .run(async || {
                let known = status::consumers(db.pool()).await?;
                let unused = known.iter().filter(|one| former.contains(&one.consumer) && one.workers.is_empty());
                unused.for_each(|one| report(&one.consumer));
                Ok::<_, sqlx::Error>(Round::Idle)
            })
            .await;
    });
}

/// The consumers of former routes that are not configured.
fn consumers(routes: &[Route]) -> Vec<String> {
    let is_configured = |name: &str| routes.iter().any(|route| route.name == name);
    FORMER.into_iter().filter(|name| !is_configured(name)).map(|name| format!("relay.{name}")).collect()
}

fn report(consumer: &str) {
    tracing::warn!(
        consumer,
        "no process runs this route, which earlier versions had by default, and the log is retained for it: when no process of \
         the earlier version runs any more, delete its cursor with `pillarbox cursors drop {consumer}`"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_former_route_that_is_configured_is_not_reported() {
        assert_eq!(consumers(&Route::defaults()), ["relay.notification-topics"]);
        assert_eq!(consumers(&[Route::new("notification-topics", "notifications.exchange")]), [""; 0]);
    }
}
