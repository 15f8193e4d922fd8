//! Lists of the HTTP API on standard output, page by page.

use serde_json::Value;

use crate::api::Api;
use crate::{Failure, table};

/// Rows that a request loads at most.
const PAGE: u32 = 100;

/// What `list` prints.
#[derive(clap::Args)]
pub struct ListArgs {
    /// The number of rows at most
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Print lines of JSON
    #[arg(long)]
    json: bool,
}

/// The columns of a table.
pub struct Columns<const N: usize> {
    pub heads: [&'static str; N],
    pub row: fn(&Value) -> [String; N],
}

/// Prints the items of a list, newest first: lines of JSON, or one table.
pub async fn print<const N: usize>(
    api: &Api,
    path: &str,
    query: &[(&str, Option<String>)],
    list: &ListArgs,
    columns: Columns<N>,
) -> Result<(), Failure> {
    let filters = filters(query);
    let (mut rows, mut printed, mut cursor) = (Vec::new(), 0, String::new());
    while printed < list.limit {
        let limit = PAGE.min(list.limit - printed);
        let page = api.get(&format!("{path}?limit={limit}{filters}{cursor}")).await?;
        for item in page["items"].as_array().into_iter().flatten() {
            printed += 1;
            if list.json {
                table::print_json(item)?;
            } else {
                rows.push((columns.row)(item));
            }
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={}", encoded(next)),
            None => break,
        }
    }
    if list.json { Ok(()) } else { Ok(table::print(columns.heads, &rows)?) }
}

/// As [`print`], for a list that is printed as a whole. `if_empty` replaces a table without rows.
pub(crate) async fn print_all<const N: usize>(
    api: &Api,
    path: &str,
    query: &[(&str, Option<String>)],
    json: bool,
    columns: Columns<N>,
    if_empty: &str,
) -> Result<(), Failure> {
    let items = all(api, path, &filters(query)).await?;
    if json {
        return Ok(items.iter().try_for_each(table::print_json)?);
    }
    if items.is_empty() {
        return Ok(table::print_line(if_empty)?);
    }
    let rows: Vec<_> = items.iter().map(columns.row).collect();
    Ok(table::print(columns.heads, &rows)?)
}

/// The given filters as parameters of a query that follow others.
fn filters(query: &[(&str, Option<String>)]) -> String {
    let given = query.iter().filter_map(|(name, value)| value.as_ref().map(|value| (name, value)));
    given.map(|(name, value)| format!("&{name}={}", encoded(value))).collect()
}

/// All items of a list. `query` has the filters, such as `&q=text`.
pub async fn all(api: &Api, path: &str, query: &str) -> Result<Vec<Value>, Failure> {
    let (mut items, mut cursor) = (Vec::new(), String::new());
    loop {
        let mut page = api.get(&format!("{path}?limit={PAGE}{query}{cursor}")).await?;
        if let Value::Array(found) = page["items"].take() {
            items.extend(found);
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={}", encoded(next)),
            None => return Ok(items),
        }
    }
}

/// A field of an item as text; `-` if it is absent.
pub fn text(item: &Value, field: &str) -> String {
    match &item[field] {
        Value::Null => "-".to_owned(),
        Value::String(text) => table::shorten(text),
        other => other.to_string(),
    }
}

/// A field that is a time.
pub fn time(item: &Value, field: &str) -> String {
    let parsed = item[field].as_str().and_then(|text| text.parse().ok());
    parsed.map_or_else(|| "-".to_owned(), table::format_time)
}

/// A text as the value of a parameter in a query.
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_cannot_add_a_parameter() {
        assert_eq!(encoded("order.paid"), "order.paid");
        assert_eq!(encoded("a&limit=1 +ü"), "a%26limit%3D1%20%2B%C3%BC");
    }
}
