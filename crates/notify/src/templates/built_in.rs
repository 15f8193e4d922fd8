//! The built-in templates.

/// The templates that Pillarbox itself uses.
pub(super) const TEMPLATES: [&str; 4] = ["verification", "password_reset", "password_changed", "account_exists"];

/// Lists the three files of each template.
macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[
            $(
                (concat!($name, ".subject"), include_str!(concat!("../../templates/", $name, ".subject"))),
                (concat!($name, ".txt"), include_str!(concat!("../../templates/", $name, ".txt"))),
                (concat!($name, ".html"), include_str!(concat!("../../templates/", $name, ".html"))),
            )*
            (super::LAYOUT, include_str!("../../templates/layout.html")),
        ]
    };
}

/// The names of the files and their contents.
pub(super) const BUILT_IN: &[(&str, &str)] = files![
    "verification.en",
    "verification.de",
    "password_reset.en",
    "password_reset.de",
    "password_changed.en",
    "password_changed.de",
    "account_exists.en",
    "account_exists.de",
];
