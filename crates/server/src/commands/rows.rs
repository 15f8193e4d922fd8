//! Lists that a command reads from the database, page by page.

use cli::table;
use serde::Serialize;

use super::Failure;

/// Rows that a paginated list loads at a time.
const PAGE_ROWS: i64 = 100;

/// Prints a list, page by page: lines of JSON, or one table. `load` returns up to the given number of rows after the given id;
/// `if_empty` replaces a table without rows.
pub(super) async fn print_list<T: Serialize, const N: usize>(
    json: bool,
    heads: [&str; N],
    if_empty: Option<&str>,
    id_and_row: fn(&T) -> (i64, [String; N]),
    mut load: impl AsyncFnMut(Option<i64>, i64) -> sqlx::Result<Vec<T>>,
) -> Result<(), Failure> {
    let (mut rows, mut last_id) = (Vec::new(), None);
    loop {
        let page = load(last_id, PAGE_ROWS).await?;
        for item in &page {
            let (id, row) = id_and_row(item);
            last_id = Some(id);
            match json {
                true => table::print_json(item)?,
                false => rows.push(row),
            }
        }
        if page.len() < PAGE_ROWS as usize {
            break;
        }
    }
    match (json, if_empty) {
        (true, _) => {}
        (false, Some(text)) if rows.is_empty() => table::print_line(text)?,
        (false, _) => table::print(heads, &rows)?,
    }
    Ok(())
}
