//! Writes the list of the migrations, with their texts, for `src/database/migrations.rs`.
//!
//! `sqlx::migrate!` does the same. But it needs the macros of sqlx, for which the PostgreSQL driver and all that it uses would be
//! built a second time, for the compiler.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=../../migrations");
    let folder = fs::canonicalize("../../migrations")?;
    let mut names = fs::read_dir(&folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<String>>>()?;
    names.retain(|name| name.ends_with(".sql"));
    names.sort_unstable();
    let (mut list, mut versions) = (String::from("["), HashMap::new());
    for name in &names {
        let invalid = || io::Error::other(format!("migrations/{name}: name it NUMBER_description.sql"));
        let (version, description) = name.trim_end_matches(".sql").split_once('_').ok_or_else(invalid)?;
        let version: i64 = version.parse().map_err(|_| invalid())?;
        // sqlx would apply only one of them.
        if let Some(other) = versions.insert(version, name) {
            return Err(io::Error::other(format!(
                "migrations/{name}: {other} has the same number; choose the next one"
            )));
        }
        let (description, path) = (description.replace('_', " "), folder.join(name));
        let entry = format!("({version}, {description:?}, include_str!({path:?})),");
        list.write_str(&entry).map_err(io::Error::other)?;
    }
    list.push(']');
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("cargo sets OUT_DIR"))?;
    fs::write(Path::new(&out).join("migrations.rs"), list)
}
