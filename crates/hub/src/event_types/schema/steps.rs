//! What work on a schema may cost.
//!
//! Work whose cost a tenant chooses counts its steps where they are made, and ends when there are none left. So its time is
//! bounded whatever it was given, and the same input always has the same verdict.

/// About 10 ns in a release build.
#[derive(Debug, Clone)]
pub(crate) struct Steps {
    left: u64,
}

/// No steps are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the work would need too many steps")]
pub(crate) struct Exhausted;

impl Steps {
    pub(crate) fn new(max: u64) -> Steps {
        Steps { left: max }
    }

    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Fails if there are fewer left; then there are none.
    pub(crate) fn spend(&mut self, steps: u64) -> Result<(), Exhausted> {
        match self.left.checked_sub(steps) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.left = 0;
                Err(Exhausted)
            }
        }
    }
}
