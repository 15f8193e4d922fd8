//! Reads the templates of a folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::{InvalidTemplate, LAYOUTS, PARTS, parts_of};

const FILES_MAX: usize = 1_000;
const FILE_BYTES_MAX: u64 = 256 * 1024;

/// Returns the names and contents of the templates in the folder. Fails if the folder cannot be read, or if a file in it is
/// no template: a misspelled name would otherwise be ignored.
pub(super) fn read(folder: &Path) -> Result<BTreeMap<String, String>, InvalidTemplate> {
    let unreadable = |error: std::io::Error| InvalidTemplate::new(folder.display().to_string(), error);
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let file = entry.file_name().to_string_lossy().into_owned();
        // Hidden entries: editors and mounted volumes have their own.
        if file.starts_with('.') {
            continue;
        }
        let failed = |error: std::io::Error| InvalidTemplate::new(file.clone(), error);
        let metadata = fs::metadata(entry.path()).map_err(failed)?;
        if !metadata.is_file() || (!LAYOUTS.contains(&file.as_str()) && parts_of(&file).is_none()) {
            let detail = format!(
                "is not a template: the names are {}, <template>.<locale>.{{{}}}, such as verification.pt-br.html, and \
                 notification.<event type, dots as _>.<locale>.{{{}}}, in lower case",
                LAYOUTS.join(", "),
                PARTS.join(","),
                PARTS.join(",")
            );
            return Err(InvalidTemplate::new(file, detail));
        }
        if metadata.len() > FILE_BYTES_MAX {
            return Err(InvalidTemplate::new(file, format!("has more than {FILE_BYTES_MAX} bytes")));
        }
        let source = fs::read_to_string(entry.path()).map_err(failed)?;
        files.insert(file, source);
        if files.len() > FILES_MAX {
            let detail = format!("has more than {FILES_MAX} files");
            return Err(InvalidTemplate::new(folder.display().to_string(), detail));
        }
    }
    Ok(files)
}
