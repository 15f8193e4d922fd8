//! Messages of the notify service.

/// The source of these messages.
pub const SOURCE: &str = "notify";
