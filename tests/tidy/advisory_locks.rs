//! Every login of the database can hold an advisory lock, producers included: it stops the work, and nothing shows it.

/// The files that use one, and why.
const EXEMPT: [&str; 2] = [
    // There is no table yet. The wait is limited, and the holder is named.
    "crates/pillarbox/src/database/migrations.rs",
    // One for each caller and Idempotency-Key. Its holder makes that request wait for 2 s and fail with 409, and affects
    // no other; the primary key of the response excludes a second effect.
    "crates/service/src/idempotency.rs",
];

pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.contains("pg_") && line.contains("advisory_"));
    let lines = lines.filter(|_| !EXEMPT.contains(&path));
    lines.map(|line| format!("{path}: use `pillarbox::database::work_lock` instead of `{}`", line.trim())).collect()
}

mod samples {
    use super::*;

    #[test]
    fn an_advisory_lock_is_found_outside_of_the_exempt_files() {
        for bad in
            ["select pg_advisory_xact_lock(1)", "pg_try_advisory_lock($1)", "pg_try_advisory_xact_lock_shared(7)"]
        {
            assert_eq!(violations("crates/hub/src/store.rs", bad).len(), 1, "{bad}");
            assert_eq!(violations(EXEMPT[0], bad), [""; 0]);
        }
        assert_eq!(violations("crates/hub/src/store.rs", "work_lock(tx, name)"), [""; 0]);
    }
}
