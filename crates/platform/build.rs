//! Writes the list of the files of the web console, for `src/console/files.rs`.
//!
//! `npm run build` in `console/` creates them in `console/dist`. Without them the server is built without a console, and its
//! page says how to get it.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

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
