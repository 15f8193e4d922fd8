//! `completions` and `man`: the command line described for shells and for `man`.

use std::path::Path;

use clap_complete::Shell;

use super::{Failure, options};

/// Prints the completions of a shell.
pub(super) fn print_completions(shell: Shell) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut options::command(), "pillarbox", &mut text);
    Ok(std::io::Write::write_all(&mut std::io::stdout(), &text)?)
}

/// Writes `pillarbox.1` and a page for each command, such as `pillarbox-key-create.1`. Fails if the folder cannot be written to.
pub(super) fn write_pages(folder: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::Other(format!("cannot write manual pages to {}: {error}; choose another folder", folder.display()))
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(options::command(), folder).map_err(failed)?;
    cli::table::print_line(&format!(
        "Wrote the manual pages to {0}. Read one with: man {0}/pillarbox.1",
        folder.display()
    ))?;
    Ok(())
}
