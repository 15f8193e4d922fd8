//! The data folder: its lock, which admits one server at a time, and its secret key.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use runtime::secret::MasterKey;

const SECRET_KEY: &str = "secret.key";
const LOCK: &str = "lock";
/// Attempts to get the lock, and the time between them.
const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    #[error("data folder {0}: {1}; choose another with --data-dir")]
    Io(PathBuf, #[source] io::Error),
    #[error("data folder {0} is in use by {1}; stop it, or choose another with --data-dir")]
    InUse(PathBuf, String),
    #[error(
        "data folder {0} must belong to the user that runs pillarbox, and no other user may write into it; \
         choose another with --data-dir"
    )]
    NotOurs(PathBuf),
    #[error("others can read {0}: run `chmod 600` on it, and replace the key if they may have read it")]
    SecretKeyOpen(PathBuf),
    #[error("{0} is damaged: {1}; restore it from a backup, or set PILLARBOX_SECRET_KEY")]
    SecretKey(PathBuf, runtime::secret::InvalidKey),
    #[error(
        "there is no secret key: set PILLARBOX_SECRET_KEY, or start `pillarbox up` once with the same --data-dir ({0})"
    )]
    NoSecretKey(PathBuf),
    #[error(
        "{0} is missing, and a new key could not read what this installation has encrypted: restore the file from a backup, \
         or set PILLARBOX_SECRET_KEY to its content"
    )]
    LostSecretKey(PathBuf),
    #[error(
        "the database belongs to an installation that has a secret key, and {0} does not exist: set PILLARBOX_SECRET_KEY to the \
         key, which is in the file secret.key of the data folder of the first process, or name that folder with --data-dir"
    )]
    SecretKeyElsewhere(PathBuf),
}

#[derive(Debug, Clone)]
pub struct DataDir(PathBuf);

/// The lock on a data folder. The kernel releases it when the process ends, even after a crash.
pub struct DataDirLock(Flock<File>);

impl DataDir {
    /// Resolves the path. Does not access the folder.
    pub fn at(path: &Path) -> Result<DataDir, DataDirError> {
        std::path::absolute(path).map(DataDir).map_err(|error| DataDirError::Io(path.to_owned(), error))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates the folder if necessary and locks it for this process. Fails if another process has locked it.
    pub fn lock(&self) -> Result<DataDirLock, DataDirError> {
        self.create()?;
        let path = self.0.join(LOCK);
        // Private mode: another user who could open the file could lock it and block the start.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = file.map_err(|error| self.failed(error))?;
        // Several attempts: a command that reads the holder locks the file for a moment.
        for _ in 0..LOCK_ATTEMPTS {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(DataDirLock(lock)),
                Err((unlocked, _)) => file = unlocked,
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let holder = read_description(&mut file).unwrap_or_else(|| "another process".to_owned());
        Err(DataDirError::InUse(self.0.clone(), holder))
    }

    /// The description of the server that has locked the folder; `None` if it is not locked.
    pub fn holder(&self) -> Option<String> {
        let file = File::open(self.0.join(LOCK)).ok()?;
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(_) => None,
            Err((mut file, _)) => Some(read_description(&mut file).unwrap_or_default()),
        }
    }

    /// The secret key of the folder. Fails if it does not exist, is damaged, or is readable by others.
    pub fn secret_key(&self) -> Result<MasterKey, DataDirError> {
        let path = self.secret_key_path();
        if fs::metadata(&path).is_ok_and(|file| file.mode() & 0o077 != 0) {
            return Err(DataDirError::SecretKeyOpen(path));
        }
        match fs::read(&path) {
            Ok(content) => {
                String::from_utf8_lossy(&content).parse().map_err(|error| DataDirError::SecretKey(path, error))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(DataDirError::NoSecretKey(self.0.clone())),
            Err(error) => Err(DataDirError::Io(path, error)),
        }
    }

    /// The path of the secret key, which may not exist.
    pub fn secret_key_path(&self) -> PathBuf {
        self.0.join(SECRET_KEY)
    }

    /// Creates the secret key, and the folder if necessary. Returns the key of another process that has created one first.
    pub fn new_secret_key(&self) -> Result<MasterKey, DataDirError> {
        self.create()?;
        let key = MasterKey::generate();
        let write = || {
            // Write a temporary file and link it: a crash leaves no partial key, and of two concurrent creators one wins.
            let temporary = self.0.join(format!("{SECRET_KEY}.{}", std::process::id()));
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            writeln!(file, "{}", key.to_base64())?;
            file.sync_all()?;
            let linked = fs::hard_link(&temporary, self.secret_key_path());
            fs::remove_file(&temporary)?;
            linked
        };
        match write() {
            Ok(()) => Ok(key),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.secret_key(),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Creates the folder. An existing folder must belong to this user alone: a user who can write into it could replace the
    /// secret key.
    fn create(&self) -> Result<(), DataDirError> {
        // As root: the user `postgres` must be able to reach its folder inside, but not to list this one.
        let mode = if geteuid().is_root() { 0o711 } else { 0o700 };
        if let Some(parent) = self.0.parent() {
            fs::create_dir_all(parent).map_err(|error| self.failed(error))?;
        }
        match fs::DirBuilder::new().mode(mode).create(&self.0) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(self.failed(error)),
        }
        let found = fs::metadata(&self.0).map_err(|error| self.failed(error))?;
        if !found.is_dir() || found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
            return Err(DataDirError::NotOurs(self.0.clone()));
        }
        // Change the mode of an empty folder only, such as one from `mktemp -d`: another may contain private files.
        let empty = fs::read_dir(&self.0).map_err(|error| self.failed(error))?.next().is_none();
        if empty {
            fs::set_permissions(&self.0, fs::Permissions::from_mode(mode)).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    fn failed(&self, error: io::Error) -> DataDirError {
        DataDirError::Io(self.0.clone(), error)
    }
}

/// The description in the lock file; `None` if it is empty.
fn read_description(file: &mut File) -> Option<String> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

impl DataDirLock {
    /// Writes a description of this server into the lock file, for the error message of other processes.
    pub fn write_description(&mut self, description: &str) -> io::Result<()> {
        let file: &mut File = &mut self.0;
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{description}")
    }
}
