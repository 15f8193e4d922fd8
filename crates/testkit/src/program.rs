//! The program `pillarbox` that cargo has built for these tests.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::SystemTime;

/// The path of the program, in the profile of the tests.
///
/// # Panics
/// If the program has not been built, or if one of its source files has changed since.
pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
        let test = std::env::current_exe().expect("the path of the test executable");
        // Test executables are in target/PROFILE/deps.
        let profile = test.ancestors().nth(2).expect("cargo has built the test");
        current(profile)
    });
    PROGRAM.as_deref().unwrap_or_else(|reason| panic!("{reason}"))
}

/// Returns the program in the folder of a profile. Fails if it is missing or older than one of its source files, which cargo
/// lists in the file `pillarbox.d`.
fn current(profile: &Path) -> Result<PathBuf, String> {
    let program = profile.join("pillarbox");
    let name = program.display();
    let release = if profile.ends_with("release") { " --release" } else { "" };
    let advice = format!("run `cargo build --package pillarbox-server{release}`, as `make test` and `make soak` do");
    let built_at = modified_at(&program).ok_or_else(|| format!("{name} is missing: {advice}"))?;
    let list =
        std::fs::read_to_string(profile.join("pillarbox.d")).map_err(|error| format!("{name}.d: {error}: {advice}"))?;
    match sources(&list).into_iter().find(|source| modified_at(source).is_some_and(|changed_at| changed_at > built_at))
    {
        Some(newer) => Err(format!("{name} is older than {}: {advice}", newer.display())),
        None => Ok(program),
    }
}

/// The files in a list of cargo: `TARGET: FILE FILE ...`, where a backslash precedes a space in a name.
fn sources(list: &str) -> Vec<PathBuf> {
    let (_, files) = list.split_once(": ").unwrap_or_default();
    let escaped = files.trim_end().replace("\\ ", "\0");
    escaped.split(' ').map(|file| PathBuf::from(file.replace('\0', " "))).collect()
}

/// `None` for what is not a file: cargo also lists folders.
fn modified_at(file: &Path) -> Option<SystemTime> {
    let found = std::fs::metadata(file).ok().filter(std::fs::Metadata::is_file)?;
    found.modified().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_program_that_is_missing_or_older_than_a_source_is_refused() {
        let folder = std::env::temp_dir().join(crate::unique_name());
        std::fs::create_dir_all(folder.join("a folder")).unwrap();
        assert!(current(&folder).unwrap_err().contains("pillarbox is missing: run `cargo build"), "no program");

        let (program, source) = (folder.join("pillarbox"), folder.join("a folder/lib.rs"));
        std::fs::write(&program, "").unwrap();
        std::fs::write(&source, "").unwrap();
        let name = |path: &Path| path.display().to_string().replace(' ', "\\ ");
        let list = format!("{}: {} {}\n", name(&program), name(&folder.join("a folder")), name(&source));
        std::fs::write(folder.join("pillarbox.d"), list).unwrap();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        let change =
            |at: SystemTime| std::fs::File::options().write(true).open(&source).unwrap().set_modified(at).unwrap();

        change(now - hour);
        assert_eq!(current(&folder).unwrap(), program);
        change(now + hour);
        assert!(current(&folder).unwrap_err().contains("is older than "), "a source has changed");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
