//! Finds the binaries of PostgreSQL.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Account, EmbeddedError};

/// The folder with the binaries of one version.
#[derive(Debug, Clone)]
pub(super) struct Install {
    bin: PathBuf,
    pub(super) major: String,
}

/// The version that created the cluster. For a new cluster: the first on PATH, else the newest that the distribution installed.
/// Fails if there is none.
pub(super) fn find(cluster: &Path) -> Result<Install, EmbeddedError> {
    choose(candidate_dirs().into_iter().filter_map(Install::at).collect(), cluster)
}

fn choose(candidates: Vec<Install>, cluster: &Path) -> Result<Install, EmbeddedError> {
    if candidates.is_empty() {
        return Err(EmbeddedError::NotInstalled);
    }
    let Ok(wanted) = fs::read_to_string(cluster.join("PG_VERSION")) else {
        return Ok(candidates[0].clone());
    };
    let wanted = wanted.trim();
    candidates.iter().find(|install| install.major == wanted).cloned().ok_or_else(|| {
        let mut found: Vec<&str> = candidates.iter().map(|install| install.major.as_str()).collect();
        found.dedup();
        EmbeddedError::OtherVersion { folder: cluster.to_owned(), wanted: wanted.to_owned(), found: found.join(", ") }
    })
}

impl Install {
    /// `None` if the folder lacks a binary, or the server does not print its version.
    fn at(bin: PathBuf) -> Option<Install> {
        // PATH may contain a link to a single binary; the folder of its target has the others.
        let bin = fs::canonicalize(bin.join("postgres")).ok()?.parent()?.to_owned();
        if !bin.join("initdb").is_file() {
            return None;
        }
        let output = Command::new(bin.join("postgres")).arg("--version").output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        // "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"
        let version = text.split_whitespace().nth(2)?;
        let major = version.split(['.', 'b', 'r']).next()?.to_owned();
        Some(Install { bin, major })
    }

    pub(super) fn command(&self, tool: &str, account: Option<&Account>) -> Command {
        let mut command = Command::new(self.bin.join(tool));
        // Our environment contains secrets, and perhaps the PGDATA of another server.
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LANG", "C.UTF-8").current_dir("/");
        // A separate process group: Ctrl-C reaches only this process, which stops PostgreSQL after draining its requests.
        command.process_group(0);
        if let Some(account) = account {
            command.uid(account.uid.as_raw()).gid(account.gid.as_raw());
        }
        command
    }
}

fn candidate_dirs() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let mut versioned = Vec::new();
    for (parent, prefix) in [("/usr/lib/postgresql", ""), ("/usr", "pgsql-")] {
        let names = fs::read_dir(parent).into_iter().flatten().flatten().map(|entry| entry.file_name());
        for name in names {
            if let Some(version) = name.to_str().and_then(|name| name.strip_prefix(prefix)?.parse::<u32>().ok()) {
                versioned.push((version, Path::new(parent).join(name).join("bin")));
            }
        }
    }
    versioned.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    dirs.extend(versioned.into_iter().map(|(_, dir)| dir));
    dirs.retain(|dir| dir.as_os_str() != OsStr::new("") && dir.join("postgres").exists());
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_without_postgresql_says_what_to_install() {
        let error = choose(Vec::new(), Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.contains("apt-get install postgresql") && error.contains("PILLARBOX_DATABASE_URL"), "{error}");
    }

    #[test]
    fn a_cluster_runs_on_the_version_that_created_it() {
        let install = |major: &str| Install { bin: PathBuf::from(major), major: major.to_owned() };
        let cluster = std::env::temp_dir().join(format!("pillarbox-cluster-{}", uuid::Uuid::new_v4()));
        fs::create_dir(&cluster).unwrap();
        fs::write(cluster.join("PG_VERSION"), "15\n").unwrap();
        assert_eq!(choose(vec![install("17"), install("15")], &cluster).unwrap().major, "15");
        let error = choose(vec![install("17"), install("16")], &cluster).unwrap_err().to_string();
        assert!(error.contains("PostgreSQL 15") && error.contains("17, 16"), "{error}");
        fs::remove_dir_all(&cluster).unwrap();
        assert_eq!(choose(vec![install("17"), install("15")], &cluster).unwrap().major, "17");
    }
}
