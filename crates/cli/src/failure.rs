//! Why a command fails.

use crate::https::TlsError;

/// Prints as one line, which says what is wrong and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Standard output. Every other I/O error gets a text that names what failed.
    #[error("cannot print: {0}")]
    Print(#[from] std::io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Other(String),
}
