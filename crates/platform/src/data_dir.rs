//! The data folder: one instance at a time, and the secret key that outlives it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kit::secret::MasterKey;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

const SECRET_KEY: &str = "secret.key";
const LOCK: &str = "lock";
const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    #[error("data folder {0}: {1}; choose another with --data-dir")]
    Io(PathBuf, #[source] io::Error),
    #[error("data folder {0} is in use by {1}; stop it, or choose another with --data-dir")]
    InUse(PathBuf, String),
    #[error(
        "data folder {0} must belong to the user that runs this, and nobody else may write into it; \
         choose another with --data-dir"
    )]
    NotOurs(PathBuf),
    #[error("others can read {0}: `chmod 600` it, and consider the key known if that was so for long")]
    SecretKeyOpen(PathBuf),
    #[error("{0} is damaged: {1}; restore it from a backup, or set PILLARBOX_SECRET_KEY")]
    SecretKey(PathBuf, kit::secret::NotAKey),
    #[error(
        "there is no secret key: set PILLARBOX_SECRET_KEY, or start `pillarbox up` once with the same --data-dir ({0})"
    )]
    NoSecretKey(PathBuf),
}

#[derive(Debug, Clone)]
pub struct DataDir(PathBuf);

/// Held as long as this process serves from the folder. The kernel lets go of it when the process ends, however it ends.
pub struct Locked(Flock<File>);

impl DataDir {
    /// Names the folder without touching it.
    pub fn at(path: &Path) -> Result<DataDir, DataDirError> {
        std::path::absolute(path).map(DataDir).map_err(|error| DataDirError::Io(path.to_owned(), error))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes the folder if need be, and takes it for this process alone.
    pub fn lock(&self) -> Result<Locked, DataDirError> {
        self.create()?;
        let path = self.0.join(LOCK);
        // Nobody else may open it: a stranger's lock would keep us from starting.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = file.map_err(|error| self.failed(error))?;
        // Again for a moment: a command that looks who holds it holds it meanwhile itself.
        for _ in 0..LOCK_ATTEMPTS {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Locked(lock)),
                Err((unlocked, _)) => file = unlocked,
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let holder = description(&mut file).unwrap_or_else(|| "another process".to_owned());
        Err(DataDirError::InUse(self.0.clone(), holder))
    }

    /// Who serves from the folder now, as it described itself.
    pub fn holder(&self) -> Option<String> {
        let file = File::open(self.0.join(LOCK)).ok()?;
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(_) => None,
            Err((mut file, _)) => Some(description(&mut file).unwrap_or_default()),
        }
    }

    /// The folder's secret key; made at the first start.
    pub fn secret_key_or_new(&self) -> Result<MasterKey, DataDirError> {
        match self.secret_key() {
            Err(DataDirError::NoSecretKey(_)) => self.new_secret_key(),
            found => found,
        }
    }

    pub fn secret_key(&self) -> Result<MasterKey, DataDirError> {
        let path = self.0.join(SECRET_KEY);
        if fs::metadata(&path).is_ok_and(|file| file.mode() & 0o077 != 0) {
            return Err(DataDirError::SecretKeyOpen(path));
        }
        match fs::read_to_string(&path) {
            Ok(text) => text.parse().map_err(|error| DataDirError::SecretKey(path, error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(DataDirError::NoSecretKey(self.0.clone())),
            Err(error) => Err(DataDirError::Io(path, error)),
        }
    }

    fn new_secret_key(&self) -> Result<MasterKey, DataDirError> {
        self.create()?;
        let key = MasterKey::generate();
        let write = || {
            // Written aside and linked into place: a crash leaves no half key, and of two racing makers one wins.
            let aside = self.0.join(format!("{SECRET_KEY}.{}", std::process::id()));
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
            writeln!(file, "{}", key.to_base64())?;
            file.sync_all()?;
            let linked = fs::hard_link(&aside, self.0.join(SECRET_KEY));
            fs::remove_file(&aside)?;
            linked
        };
        match write() {
            Ok(()) => Ok(key),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.secret_key(),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Makes the folder. One that is there must be ours alone: who can write into it could plant a secret key.
    fn create(&self) -> Result<(), DataDirError> {
        // As root, PostgreSQL's user passes through to its own folder; it cannot list this one.
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
        // Only an empty folder, such as `mktemp -d` makes, is opened up: any other may hold what is not ours to show.
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

/// What the holder left word of; None when it did not.
fn description(file: &mut File) -> Option<String> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

impl Locked {
    /// Leaves word for whoever finds the folder taken.
    pub fn describe(&mut self, holder: &str) -> io::Result<()> {
        let file: &mut File = &mut self.0;
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{holder}")
    }
}
