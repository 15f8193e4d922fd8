//! Scripts and lists of packages: package managers know their registries, mirrors and proxies, so these name no host to download
//! from.

/// Pages that a message tells a reader to open.
const PAGES: [&str; 1] = ["rustup.rs"];

/// The hosts in the URLs of a script, other than this machine.
pub(crate) fn named_hosts(script: &str) -> Vec<String> {
    let is_named = |host: &&str| !PAGES.contains(host) && *host != "127.0.0.1" && *host != "localhost";
    script.split("://").skip(1).filter_map(host).filter(is_named).map(|host| format!("names the host {host}")).collect()
}

/// The lines of a list of packages, of npm or pip, that say where a package is downloaded from.
pub(crate) fn named_registries(list: &str) -> Vec<String> {
    let registries = ["\"resolved\":", "--index-url", "--extra-index-url", "--find-links", "--trusted-host", "@ http"];
    // In a comment, pip-compile repeats its options, of which `--no-emit-index-url` leaves the registry out.
    let is_comment = |line: &&str| line.starts_with('#');
    let lines = list.lines().map(str::trim).filter(|line| !is_comment(line));
    lines.filter(|line| registries.iter().any(|name| line.contains(name))).map(str::to_owned).collect()
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

    #[test]
    fn a_list_with_checksums_only_is_accepted() {
        for line in ["#    pip-compile --no-emit-index-url", "pika==1.3.2 \\", "    \"integrity\": \"sha512-x\","] {
            assert_eq!(named_registries(line), [""; 0], "{line}");
        }
    }

    #[test]
    fn a_list_with_a_registry_is_found() {
        for line in [
            "      \"resolved\": \"https://npm.example.com/pg-8.0.0.tgz\",",
            "--index-url https://pypi.example.com/simple",
            "pika @ https://pypi.example.com/x.whl",
        ] {
            assert_eq!(named_registries(line).len(), 1, "{line}");
        }
    }
}
