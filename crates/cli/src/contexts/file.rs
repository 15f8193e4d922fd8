//! The file of contexts: where it is, and how it is read and replaced.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use runtime::secret::Secret;
use serde::{Deserialize, Serialize};

use crate::Failure;

/// The variable that names another file.
pub(super) const FILE_VARIABLE: &str = "PILLARBOX_CONTEXTS";

/// The content of the file.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    /// The context that commands use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selected: Option<String>,
    #[serde(default)]
    pub contexts: BTreeMap<String, Context>,
}

/// A named target. It contains no secret.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_dir: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
}

impl Contexts {
    /// The context with this name. Fails with the known names.
    pub fn get(&self, name: &str, file: &ContextsFile) -> Result<&Context, Failure> {
        self.contexts.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let next = if known.is_empty() {
                format!("has no contexts: add it with `pillarbox context add {name}`")
            } else {
                format!("has {}: choose one of them with `pillarbox context use NAME`", known.join(", "))
            };
            Failure::Other(format!(
                "there is no context {name}; {file} {next}, or use none with `pillarbox context use --none`"
            ))
        })
    }
}

impl Context {
    /// Whether the context names the database and the secret key of an installation.
    pub fn has_installation(&self) -> bool {
        self.data_dir.is_some() || self.config.is_some()
    }

    /// Reads the API key; `None` if the context has none. Fails if the file cannot be read, is empty, or is readable by
    /// others.
    pub fn api_key(&self, name: &str) -> Result<Option<Secret<String>>, Failure> {
        let Some(path) = &self.api_key_file else { return Ok(None) };
        let failed =
            |detail: String| Failure::Other(format!("context {name}: the API key file {} {detail}", path.display()));
        let metadata = fs::metadata(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
        if metadata.mode() & 0o077 != 0 {
            let detail = "can be read by others: run `chmod 600` on it, and replace the key if they may have read it";
            return Err(failed(detail.to_owned()));
        }
        let text = fs::read_to_string(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
        match text.trim() {
            "" => Err(failed("is empty: write the output of `pillarbox key create` to it".to_owned())),
            key => Ok(Some(Secret::new(key.to_owned()))),
        }
    }
}

/// The path of the file, which may not exist yet.
pub struct ContextsFile(PathBuf);

impl fmt::Display for ContextsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl ContextsFile {
    pub fn at(path: &Path) -> ContextsFile {
        ContextsFile(path.to_owned())
    }

    /// The file of the user who runs the command. `variable` returns an environment variable. Fails if none says where the
    /// config folder is.
    pub fn of_user(variable: impl Fn(&str) -> Option<String>) -> Result<ContextsFile, Failure> {
        ContextsFile::find(variable).ok_or_else(|| {
            Failure::Other(format!(
                "there is no config folder for contexts: set HOME, or name a file in {FILE_VARIABLE}"
            ))
        })
    }

    /// As [`ContextsFile::of_user`]; `None` if the user has no config folder.
    pub fn find(variable: impl Fn(&str) -> Option<String>) -> Option<ContextsFile> {
        let folder = || {
            // The specification of XDG says that a relative path is invalid, and ignored.
            let config = variable("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
            config.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".config")))
        };
        let given = variable(FILE_VARIABLE).map(PathBuf::from);
        given.or_else(|| Some(folder()?.join("pillarbox/contexts.toml"))).map(ContextsFile)
    }

    /// Reads the contexts; none if the file does not exist. Fails if it cannot be read, if others can change it, or if it is
    /// invalid.
    pub fn read(&self) -> Result<Contexts, Failure> {
        let text = match fs::read_to_string(&self.0) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Contexts::default()),
            Err(error) => return Err(self.unreadable(&error)),
        };
        // A user who can change the file could send the API key of a context to another server.
        if fs::metadata(&self.0).map_err(|error| self.unreadable(&error))?.mode() & 0o022 != 0 {
            return Err(Failure::Other(format!(
                "others can change the contexts in {self}: check its content, and run `chmod 600` on it"
            )));
        }
        toml::from_str(&text).map_err(|error| self.invalid(&text, &error))
    }

    /// Reads the contexts, changes them and replaces the file. Concurrent changes wait for each other. Nothing is written if
    /// `change` fails.
    pub fn change(&self, change: impl FnOnce(&mut Contexts) -> Result<(), Failure>) -> Result<(), Failure> {
        let path = std::path::absolute(&self.0).map_err(|error| self.unwritable(&error))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| self.unwritable(&error))?;
        let opened = File::open(folder).map_err(|error| self.unwritable(&error))?;
        // The lock is on the folder: the file itself is replaced.
        let lock = Flock::lock(opened, FlockArg::LockExclusive).map_err(|(_, error)| self.unwritable(&error.into()))?;
        let mut contexts = self.read()?;
        change(&mut contexts)?;
        let text = toml::to_string(&contexts).map_err(|error| Failure::Other(format!("{self}: {error}")))?;
        let temporary = path.with_extension(format!("toml.{}", std::process::id()));
        let replaced = write_new(&temporary, &text).and_then(|()| fs::rename(&temporary, &path));
        if replaced.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        replaced.and_then(|()| lock.sync_all()).map_err(|error| self.unwritable(&error))
    }

    fn unreadable(&self, error: &io::Error) -> Failure {
        Failure::Other(format!(
            "the contexts in {self} cannot be read: {error}; correct the file, or name another one in {FILE_VARIABLE}"
        ))
    }

    fn unwritable(&self, error: &io::Error) -> Failure {
        Failure::Other(format!(
            "the contexts cannot be written to {self}: {error}; correct its folder, or name another file in {FILE_VARIABLE}"
        ))
    }

    /// The error has the position and not the text of the parser, which may quote a secret that does not belong there.
    fn invalid(&self, text: &str, error: &toml::de::Error) -> Failure {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        Failure::Other(format!(
            "the contexts in {self} are invalid at line {line}: the file has `selected = \"NAME\"` and tables \
             [contexts.NAME] with the texts data_dir, config, server and api_key_file; correct the line, or delete the file"
        ))
    }
}

/// Writes a file that only its owner may read. A file of an earlier process with the same id is replaced.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
