//! A key prefix per test.

use crate::{servers, unique_name, watchdog};

/// A prefix for the Redis keys of one test.
///
/// Redis has a fixed number of databases, fewer than there are tests, so all tests share one database and separate
/// their keys by prefix. Hence no test may call `flushall` or `flushdb`, or count the keys of the server. Keys that a
/// test leaves behind are deleted with the server at the end of the run.
pub struct TestRedis {
    prefix: String,
}

impl TestRedis {
    #[expect(
        clippy::new_without_default,
        reason = "every call creates a new prefix; a default would suggest one value"
    )]
    pub fn new() -> TestRedis {
        watchdog::register_test();
        TestRedis { prefix: format!("{}:", unique_name()) }
    }

    pub fn url(&self) -> String {
        servers::redis_url()
    }

    /// The prefix of this test's keys, including the separator.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use redis::AsyncCommands;

    use super::*;

    #[tokio::test]
    async fn two_tests_may_use_the_same_key() {
        let [mine, theirs] = [TestRedis::new(), TestRedis::new()];
        let client = redis::Client::open(mine.url()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();

        let () = connection.set(mine.key("done"), 7).await.unwrap();

        assert_eq!(connection.get::<_, Option<u64>>(mine.key("done")).await.unwrap(), Some(7));
        assert_eq!(connection.get::<_, Option<u64>>(theirs.key("done")).await.unwrap(), None);
    }
}
