//! Scripts: package managers know their registries, mirrors and proxies, so a script names no host to download from.

/// Pages that a message tells a reader to open.
const PAGES: [&str; 1] = ["rustup.rs"];

/// The hosts in the URLs of a script, other than this machine.
pub(crate) fn named_hosts(script: &str) -> Vec<String> {
    let is_named = |host: &&str| !PAGES.contains(host) && *host != "127.0.0.1" && *host != "localhost";
    script.split("://").skip(1).filter_map(host).filter(is_named).map(|host| format!("names the host {host}")).collect()
}

/// The host at the beginning of the rest of a URL. None if it is computed.
fn host(rest: &str) -> Option<&str> {
    let authority = rest.split(|c: char| c.is_whitespace() || "/\"'}".contains(c)).next()?;
    let host = authority.rsplit('@').next()?.split(':').next()?;
    (!host.is_empty() && !host.contains('$')).then_some(host)
}

#[cfg(test)]
mod samples {
    use super::*;

    #[test]
    fn this_machine_computed_hosts_and_pages_are_accepted() {
        for line in [
            "api=http://$user:$password@127.0.0.1:$port",
            "curl \"http://localhost:8080/healthz\"",
            "fetch \"http://$host/x\"",
            "echo 'install Rust from https://rustup.rs and open a new shell'",
        ] {
            assert_eq!(named_hosts(line), [""; 0], "{line}");
        }
    }

    #[test]
    fn registries_are_found() {
        for line in [
            "mirror=${mirror:-https://deb.debian.org/debian}",
            "curl -O https://files.pythonhosted.org/packages/x.whl",
            "npm install --registry 'https://registry.npmjs.org'",
        ] {
            assert_eq!(named_hosts(line).len(), 1, "{line}");
        }
    }
}
