//! Finding PostgreSQL's binaries.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Account, EmbeddedError};

/// The binaries of one version.
#[derive(Debug, Clone)]
pub(super) struct Install {
    bin: PathBuf,
    pub(super) major: String,
}

/// The version that the cluster needs; for a new cluster the first found: PATH, then the distribution's places with the
/// newest first.
pub(super) fn find(cluster: &Path) -> Result<Install, EmbeddedError> {
    let candidates: Vec<Install> = candidate_dirs().into_iter().filter_map(Install::at).collect();
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
    /// A folder counts when it has what we start, and the server says its version.
    fn at(bin: PathBuf) -> Option<Install> {
        // PATH may hold a link to one binary alone; its folder has the others.
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
        // PGDATA, PGHOST and the like of the caller's shell are about another server.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PG")) {
            command.env_remove(name);
        }
        command.current_dir("/");
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
    for (parent, prefix) in [("/usr/lib/postgresql", ""), ("/usr", "pgsql-"), ("/opt/homebrew/opt", "postgresql@")] {
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
