//! Writes the list of the files of the web console, for `src/console/files.rs`.
//!
//! `npm run build` in `console/` creates them in `console/dist`. Without them the server is built without a console, and its
//! page says how to get it.

use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{env, fs, io};

/// What the console is built from. Settings of the build are not among them: they change rarely.
const SOURCES: [&str; 3] = ["../../console/src", "../../console/public", "../../console/index.html"];
/// `npm run dev` writes it, too. It says nothing about the age of the build.
const GENERATED: &str = "schema.d.ts";

fn main() -> io::Result<()> {
    let folder = Path::new("../../console/dist");
    println!("cargo:rerun-if-changed=../../console/dist");
    // Cargo would run this script with every build while the folder does not exist. A source folder that cannot be written
    // to only costs that time.
    let _ = fs::create_dir_all(folder);
    let mut files = Vec::new();
    if folder.is_dir() {
        collect(&fs::canonicalize(folder)?, &mut files)?;
    }
    warn_if_older_than_sources(&folder.join("index.html"))?;
    files.sort_unstable();
    let mut list = String::from("&[\n");
    for path in &files {
        let name = path.strip_prefix(fs::canonicalize(folder)?).map_err(io::Error::other)?;
        list += &format!("    ({:?}, include_bytes!({path:?})),\n", name.to_string_lossy());
    }
    list.push(']');
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("cargo sets OUT_DIR"))?;
    fs::write(Path::new(&out).join("console_files.rs"), list)
}

/// A build that is out of date is embedded as it is, which is hard to notice later.
fn warn_if_older_than_sources(page: &Path) -> io::Result<()> {
    let mut sources = Vec::new();
    // Cargo would run this script with every build for a path that does not exist.
    for source in SOURCES.map(Path::new).into_iter().filter(|source| source.exists()) {
        println!("cargo:rerun-if-changed={}", source.display());
        if source.is_dir() {
            collect(source, &mut sources)?;
        } else {
            sources.push(source.to_owned());
        }
    }
    let Ok(built_at) = modified_at(page) else { return Ok(()) };
    // Files of editors come and go, and their names begin with a dot.
    let is_hidden = |path: &Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let is_newer = |path: &Path| modified_at(path).is_ok_and(|changed_at| changed_at > built_at);
    let newer = sources.iter().find(|path| !path.ends_with(GENERATED) && !is_hidden(path) && is_newer(path));
    if let Some(newer) = newer {
        let name = newer.strip_prefix("../..").unwrap_or(newer).display();
        println!("cargo::warning=console/dist is older than {name}: build it with `scripts/console build`");
    }
    Ok(())
}

fn modified_at(path: &Path) -> io::Result<SystemTime> {
    fs::metadata(path)?.modified()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
