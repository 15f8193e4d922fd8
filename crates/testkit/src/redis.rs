//! A key prefix per test.

use crate::{servers, unique_name};

/// A share of Redis: a prefix for the test's keys.
///
/// Redis counts its databases at start, and a test run would use them up, so all tests share one and keep apart by
/// prefix. Hence no test may call `flushall`, `flushdb` or count the keys of the server. Keys that a test leaves
/// behind go with the server at the end of the run.
pub struct TestRedis {
    prefix: String,
}

impl TestRedis {
    #[expect(clippy::new_without_default, reason = "every call takes a new prefix; a default would suggest one value")]
    pub fn new() -> TestRedis {
        TestRedis { prefix: format!("{}:", unique_name()) }
    }

    pub fn url(&self) -> String {
        servers::redis_url()
    }

    /// What the keys of this test begin with, separator included.
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
    async fn two_tests_may_use_the_same_name() {
        let [mine, theirs] = [TestRedis::new(), TestRedis::new()];
        let client = redis::Client::open(mine.url()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();

        let () = connection.set(mine.key("done"), 7).await.unwrap();

        assert_eq!(connection.get::<_, Option<u64>>(mine.key("done")).await.unwrap(), Some(7));
        assert_eq!(connection.get::<_, Option<u64>>(theirs.key("done")).await.unwrap(), None);
    }
}
