//! Only the library wakes the readers of the log: a commit of its `Database` does it, so no caller has to remember it.

use crate::paths::tokens;

/// The violations in a crate other than `pillarbox` and `runtime`.
pub(crate) fn wakes_readers(text: &str) -> Vec<String> {
    let tokens = tokens(text);
    let has_call = |names: &[&str]| {
        tokens.windows(names.len()).any(|window| window.iter().map(String::as_str).eq(names.iter().copied()))
    };
    let mut violations = Vec::new();
    if tokens.iter().any(|token| token == "Watcher") {
        violations.push("the watcher belongs to `pillarbox`: use its `Database`".to_owned());
    }
    // Other workers may be woken: the readers of the log have these names.
    if has_call(&["watcher", ".", "wake", "("]) || has_call(&["readers", ".", "wake", "("]) {
        violations.push("a commit wakes the readers of the log: no other code does".to_owned());
    }
    if has_call(&[".", "pool", "(", ")", ".", "begin", "("]) {
        violations
            .push("`pool().begin()` returns a transaction that wakes no reader: use `Database::begin`".to_owned());
    }
    violations
}

mod samples {
    use super::*;

    #[test]
    fn a_commit_without_a_wake_up_passes() {
        for good in [
            "async fn f(db: &Database) { let tx = db.begin().await?; tx.commit().await }",
            "// watcher.wake() and Watcher\nfn wake() {}",
            "fn f() { queue.next_wake(now); list(app.db.pool()) }",
            "fn f() { self.wakes.mails.wake(); }",
        ] {
            assert_eq!(wakes_readers(good), [""; 0], "{good}");
        }
    }

    #[test]
    fn a_wake_up_and_a_bare_transaction_are_found() {
        for bad in [
            "use pillarbox::log::Watcher;",
            "struct Service { watcher: pillarbox::log::Watcher }",
            "fn f() { self.watcher.wake(); }",
            "fn f() { service\n    .watcher\n    .wake(); }",
            "async fn f() { let tx = service.db.pool().begin().await?; }",
        ] {
            assert!(!wakes_readers(bad).is_empty(), "{bad}");
        }
    }
}
