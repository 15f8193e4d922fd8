//! The scripts that run in Redis. Each is one atomic operation.
//!
//! Keys: the hash, the set of ids, the rate. The first arguments are the token, the time, and how long final counts stay. A script
//! returns an outcome (`ok`, `lost`, `conflict` or `full`), the status, the numbers `total, done, errors, counted, ended, known`, and
//! the fields of the rate.

use std::sync::LazyLock;

pub(super) struct Script {
    code: &'static [&'static str],
    script: LazyLock<redis::Script>,
}

impl Script {
    pub(super) fn hash(&self) -> &str {
        self.script.get_hash()
    }

    /// The code, for `SCRIPT LOAD`.
    pub(super) fn code(&self) -> String {
        self.code.concat()
    }
}

macro_rules! script {
    ($name:ident, $file:literal) => {
        pub(super) static $name: Script = Script {
            code: &[include_str!("scripts/state.lua"), include_str!($file)],
            script: LazyLock::new(|| {
                redis::Script::new(&[include_str!("scripts/state.lua"), include_str!($file)].concat())
            }),
        };
    };
}

script!(INITIALISE, "scripts/initialise.lua");
script!(MARK, "scripts/mark.lua");
script!(REPLACE, "scripts/replace.lua");
script!(READ, "scripts/read.lua");

/// All scripts, which are loaded when a connection is opened.
pub(super) static ALL: [&Script; 4] = [&INITIALISE, &MARK, &REPLACE, &READ];
