//! Values of options.

use uuid::Uuid;

/// Fails with the accepted form.
pub fn uuid(text: &str) -> Result<Uuid, &'static str> {
    text.parse().map_err(|_| "must be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
}

/// Fails with the accepted form.
pub fn name_and_value(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once('=').ok_or("must be NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}
