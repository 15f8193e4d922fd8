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
            (super::LAYOUTS[0], include_str!("../../templates/layout.html")),
            (super::LAYOUTS[1], include_str!("../../templates/notification_layout.html")),
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
    "notification.join_confirmed.en",
    "notification.join_confirmed.de",
    "notification.join_canceled.en",
    "notification.join_canceled.de",
    "notification.join_waitlisted.en",
    "notification.join_waitlisted.de",
    "notification.join_promoted.en",
    "notification.join_promoted.de",
    "notification.join_expired.en",
    "notification.join_expired.de",
    "notification.mod_kicked.en",
    "notification.mod_kicked.de",
    "notification.mod_banned.en",
    "notification.mod_banned.de",
    "notification.event_canceled.en",
    "notification.event_canceled.de",
    "notification.event_updated.en",
    "notification.event_updated.de",
    "notification.en",
    "notification.de",
    "notification_digest.en",
    "notification_digest.de",
];
