//! `migrate`: applies the missing migrations.

use cli::table::{print_line, print_note};
use pillarbox::database::{self, LockHolder, LockWait};

use super::Failure;
use super::installation::{database_options, require_database};
use crate::data_dir::DataDir;
use crate::pools::check_reachable;
use crate::settings::Settings;
use crate::{list, migrations};

/// Applies the missing migrations. Fails if the database cannot be reached or a migration fails.
pub(super) async fn migrate(settings: &Settings) -> Result<(), Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    check_reachable(settings, &options).await?;
    let report = |holder: &LockHolder| print_note(&format!("waiting for the lock of migrations, held by {holder}"));
    let applied = database::migrate_reporting(&options, &migrations(), LockWait::default(), report).await?;
    print_line(&match applied.as_slice() {
        [] => "The database's schema is up to date.".to_owned(),
        applied => format!("Applied the migrations {}. The database's schema is up to date.", list(applied)),
    })?;
    Ok(())
}
