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
    if !page.exists() {
        return Ok(());
    }
    let built_at = modified_at(page)?;
    for source in sources.iter().filter(|source| !source.ends_with(GENERATED)) {
        if modified_at(source)? > built_at {
            let name = source.strip_prefix("../..").unwrap_or(source).display();
            println!("cargo::warning=console/dist is older than {name}: build it with `scripts/console build`");
            break;
        }
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
