//! The lock file: no crate that `deny.toml` bans, and one registry.

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The banned crates and the foreign sources in the lock file.
pub(crate) fn violations(lock: &str, deny: &str) -> Vec<String> {
    let banned: Vec<&str> = deny.lines().filter_map(|line| value(line.trim(), "{ name = ")).collect();
    let names = lock.lines().filter_map(|line| value(line, "name = "));
    let sources = lock.lines().filter_map(|line| value(line, "source = "));
    let mut violations: Vec<String> =
        names.filter(|name| banned.contains(name)).map(|name| format!("{name} is banned in deny.toml")).collect();
    violations.extend(sources.filter(|source| *source != REGISTRY).map(|source| format!("unknown source {source}")));
    if banned.is_empty() {
        violations.push("deny.toml bans no crate".to_owned());
    }
    violations
}

/// The text in quotes after a prefix.
fn value<'l>(line: &'l str, prefix: &str) -> Option<&'l str> {
    line.strip_prefix(prefix)?.strip_prefix('"')?.split('"').next()
}

#[cfg(test)]
mod samples {
    use super::*;

    const DENY: &str = "deny = [\n    { name = \"rsa\" }, # why\n]";

    #[test]
    fn an_allowed_crate_of_the_registry_is_accepted() {
        let lock = format!("[[package]]\nname = \"ring\"\nversion = \"1\"\nsource = \"{REGISTRY}\"\n");
        assert_eq!(violations(&lock, DENY), [""; 0]);
    }

    #[test]
    fn a_banned_crate_and_a_foreign_source_are_found() {
        let lock = "[[package]]\nname = \"rsa\"\nsource = \"git+https://example.com/rsa\"\n";
        assert_eq!(violations(lock, DENY).len(), 2);
        assert_eq!(violations("", "").len(), 1);
    }
}
