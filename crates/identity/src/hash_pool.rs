//! The hashes of passwords: Argon2id on dedicated threads.
//!
//! A hash occupies a core and much memory for tens of milliseconds, so it must not run on a thread that serves requests. It runs
//! on a [`WorkPool`], in which the networks of the clients take turns. The number of waiting hashes is bounded in total, for each
//! network, and for each account, wherever the requests for it come from: above that, requests are refused. A request that
//! verifies a password enters before it reads from the database, so that a refused one costs nothing else.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use argon2::{Algorithm, Argon2, Block, Params, Version};
use base64::prelude::{BASE64_STANDARD_NO_PAD, Engine};
use http_kit::admission::caller_id::CallerId;
use http_kit::admission::caller_share::{CallerLimit, LimitPermit};
use http_kit::client_address::ClientAddress;
use rand::RngCore;
use runtime::secret::Secret;
use runtime::work_pool::{WorkPool, WorkPoolOptions, WorkRefused};
use subtle::ConstantTimeEq;

/// The part of the queue that the requests of one network may occupy, and those for one account.
const CALLER_SHARE: usize = 8;
/// How long a request waits until another one of its network has ended. A client that repeats a refused request at once sends
/// four per second over a connection.
const ENTER_TIME_MAX: Duration = Duration::from_millis(250);
const SALT_BYTES: usize = 16;
const HASH_BYTES: usize = 32;

thread_local! {
    /// Requesting many pages from the kernel takes a good part of the time of a hash, so a thread reuses them.
    static MEMORY: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) };
}

/// Who causes a hash, as digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HashCaller {
    /// The network of the client.
    pub(crate) network: [u8; 32],
    /// The account, or whatever the request names instead of it.
    pub(crate) account: [u8; 32],
}

/// Hashes and verifies passwords. Dropping it ends its threads.
pub(crate) struct HashPool {
    pool: WorkPool<[u8; 32]>,
    accounts: Accounts,
    /// The requests that verify a password, by network.
    requests: CallerLimit,
    params: Params,
}

/// Why there is no hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HashError {
    #[error("too many sign-ins and registrations at once")]
    QueueFull,
    #[error("too many sign-ins and registrations at once from this network or for this account")]
    CallerQueueFull,
    #[error("the hash cannot be computed")]
    Failed,
}

/// The result of comparing a password with a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verified {
    pub(crate) is_correct: bool,
    /// Whether the hash was made with other parameters than the current ones.
    pub(crate) is_outdated: bool,
}

/// The hashes that wait or are computed, by account.
struct Accounts {
    hashes: Arc<Mutex<HashMap<[u8; 32], usize>>>,
    max: usize,
}

/// Counts one hash of an account until it is dropped.
struct Counted {
    hashes: Arc<Mutex<HashMap<[u8; 32], usize>>>,
    account: [u8; 32],
}

impl HashPool {
    /// Starts the threads; 0 means one for each core. Fails if a thread cannot be started.
    pub(crate) fn start(params: Params, threads: u32, queue_max: u32) -> std::io::Result<HashPool> {
        let queue_max = queue_max as usize;
        let of_caller_max = (queue_max / CALLER_SHARE).max(1);
        let pool = WorkPool::start(WorkPoolOptions {
            name: "password-hash",
            threads: threads as usize,
            queue_max,
            queue_per_key_max: of_caller_max,
            // Hashes are short: a network that is alone may use all threads, because the next turn comes soon.
            running_per_key_max: usize::MAX,
            on_idle: || MEMORY.with_borrow_mut(|memory| *memory = Vec::new()),
        })?;
        let accounts = Accounts { hashes: Arc::default(), max: of_caller_max + 1 };
        let requests = CallerLimit::new(of_caller_max + 1, queue_max + 1, ENTER_TIME_MAX);
        Ok(HashPool { pool, accounts, requests, params })
    }

    /// Waits until few requests of the network verify passwords, and counts as one of them until the permit is dropped. Fails
    /// if they are still too many after [`ENTER_TIME_MAX`].
    pub(crate) async fn enter(&self, network: Option<IpAddr>) -> Result<LimitPermit, HashError> {
        let caller = CallerId::of_network(network.map(ClientAddress));
        let entered = self.requests.enter_for(Some(caller)).await.map_err(|_| HashError::CallerQueueFull);
        entered.inspect_err(count_refused)
    }

    /// Returns the PHC string of a password, with the current parameters.
    pub(crate) async fn hash(&self, caller: HashCaller, password: Secret<String>) -> Result<String, HashError> {
        let salt = random::<SALT_BYTES>();
        let hash = self.compute(caller, password, salt.to_vec(), self.params.clone()).await?;
        Ok(to_phc(&self.params, &salt, &hash))
    }

    /// Returns a PHC string that no password has, with the current parameters: comparing with it costs as much as usual.
    pub(crate) fn unusable(&self) -> String {
        unusable(&self.params)
    }

    /// Computes what [`HashPool::verify`] would for the hash of another account, and never has a result. Without one, the current
    /// parameters are used.
    pub(crate) async fn verify_nothing(
        &self,
        caller: HashCaller,
        password: Secret<String>,
        like: Option<&str>,
    ) -> Result<(), HashError> {
        let params = like.and_then(from_phc).map_or_else(|| self.params.clone(), |stored| stored.params);
        self.compute(caller, password, random::<SALT_BYTES>().to_vec(), params).await.map(drop)
    }

    /// Compares a password with a PHC string.
    pub(crate) async fn verify(
        &self,
        caller: HashCaller,
        password: Secret<String>,
        phc: &str,
    ) -> Result<Verified, HashError> {
        let stored = from_phc(phc).ok_or(HashError::Failed)?;
        let is_outdated = (stored.params.m_cost(), stored.params.t_cost(), stored.params.p_cost())
            != (self.params.m_cost(), self.params.t_cost(), self.params.p_cost());
        let hash = self.compute(caller, password, stored.salt, stored.params).await?;
        Ok(Verified { is_correct: bool::from(hash.as_slice().ct_eq(&stored.hash)), is_outdated })
    }

    async fn compute(
        &self,
        caller: HashCaller,
        password: Secret<String>,
        salt: Vec<u8>,
        params: Params,
    ) -> Result<[u8; HASH_BYTES], HashError> {
        let computed = match self.accounts.count(caller.account) {
            Ok(_counted) => self.pool.run(caller.network, move || argon2id(&password, &salt, params)).await,
            Err(refused) => Err(refused),
        };
        computed
            .unwrap_or_else(|refused| match refused {
                WorkRefused::CallerQueueFull => Err(HashError::CallerQueueFull),
                WorkRefused::QueueFull => Err(HashError::QueueFull),
                WorkRefused::Failed => Err(HashError::Failed),
            })
            .inspect_err(count_refused)
    }
}

fn count_refused(error: &HashError) {
    if *error != HashError::Failed {
        metrics::counter!("pillarbox_identity_hash_refused_total").increment(1);
    }
}

impl Accounts {
    /// Fails if too many hashes of the account wait or are computed.
    fn count(&self, account: [u8; 32]) -> Result<Counted, WorkRefused> {
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let count = hashes.entry(account).or_default();
        if *count >= self.max {
            return Err(WorkRefused::CallerQueueFull);
        }
        *count += 1;
        Ok(Counted { hashes: self.hashes.clone(), account })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = hashes.get_mut(&self.account) {
            *count -= 1;
            if *count == 0 {
                hashes.remove(&self.account);
            }
        }
    }
}

fn argon2id(password: &Secret<String>, salt: &[u8], params: Params) -> Result<[u8; HASH_BYTES], HashError> {
    MEMORY.with_borrow_mut(|memory| {
        memory.resize(memory.len().max(params.block_count()), Block::default());
        let mut hash = [0; HASH_BYTES];
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        let password = password.reveal().as_bytes();
        let done = argon2.hash_password_into_with_memory(password, salt, &mut hash, memory);
        done.map(|()| hash).map_err(|_| HashError::Failed)
    })
}

fn random<const BYTES: usize>() -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    rand::rng().fill_bytes(&mut bytes);
    bytes
}

/// A stored hash.
struct StoredHash {
    params: Params,
    salt: Vec<u8>,
    hash: Vec<u8>,
}

fn to_phc(params: &Params, salt: &[u8], hash: &[u8; HASH_BYTES]) -> String {
    let (memory, iterations, parallelism) = (params.m_cost(), params.t_cost(), params.p_cost());
    let [salt, hash] = [salt, hash].map(|bytes| BASE64_STANDARD_NO_PAD.encode(bytes));
    format!("$argon2id$v=19$m={memory},t={iterations},p={parallelism}${salt}${hash}")
}

fn unusable(params: &Params) -> String {
    to_phc(params, &random::<SALT_BYTES>(), &random())
}

/// Parses a PHC string of Argon2id, version 19. None if it is something else.
fn from_phc(phc: &str) -> Option<StoredHash> {
    let mut parts = phc.strip_prefix("$argon2id$v=19$")?.split('$');
    let mut costs = [0; 3];
    let mut given = parts.next()?.split(',');
    for (cost, name) in costs.iter_mut().zip(["m=", "t=", "p="]) {
        *cost = given.next()?.strip_prefix(name)?.parse().ok()?;
    }
    let [memory, iterations, parallelism] = costs;
    let [salt, hash] = [parts.next()?, parts.next()?].map(|part| BASE64_STANDARD_NO_PAD.decode(part).ok());
    let params = Params::new(memory, iterations, parallelism, None).ok()?;
    let (salt, hash) = (salt?, hash.filter(|hash| hash.len() == HASH_BYTES)?);
    parts.next().is_none().then_some(StoredHash { params, salt, hash })
}

#[cfg(test)]
mod tests {
    use super::*;
    use argon2::{PasswordHash, PasswordVerifier};

    fn params(iterations: u32) -> Params {
        Params::new(32, iterations, 1, None).unwrap()
    }

    fn caller(network: u8, account: u8) -> HashCaller {
        HashCaller { network: [network; 32], account: [account; 32] }
    }

    fn secret(text: &str) -> Secret<String> {
        Secret::new(text.to_owned())
    }

    #[tokio::test]
    async fn a_hash_is_a_phc_string_that_other_programs_can_verify() {
        let pool = HashPool::start(params(1), 1, 10).unwrap();
        let phc = pool.hash(caller(0, 0), secret("correct horse")).await.unwrap();
        assert!(phc.starts_with("$argon2id$v=19$m=32,t=1,p=1$"), "{phc}");
        let parsed = PasswordHash::new(&phc).unwrap();
        assert!(Argon2::default().verify_password(b"correct horse", &parsed).is_ok());
        let verify = async |text: &str| pool.verify(caller(0, 0), secret(text), &phc).await.unwrap();
        assert_eq!(verify("correct horse").await, Verified { is_correct: true, is_outdated: false });
        assert!(!verify("correct house").await.is_correct);
        assert_ne!(pool.hash(caller(0, 0), secret("correct horse")).await.unwrap(), phc, "each hash has its own salt");
    }

    #[tokio::test]
    async fn a_hash_with_other_parameters_is_outdated_but_valid() {
        let old = HashPool::start(Params::new(64, 2, 1, None).unwrap(), 1, 10).unwrap();
        let phc = old.hash(caller(0, 0), secret("correct horse")).await.unwrap();
        let pool = HashPool::start(params(1), 1, 10).unwrap();
        let verified = pool.verify(caller(0, 0), secret("correct horse"), &phc).await.unwrap();
        assert_eq!(verified, Verified { is_correct: true, is_outdated: true });
        for invalid in ["", "x", "$argon2i$v=19$m=32,t=1,p=1$AAAAAAAAAAA$AAAA", "$argon2id$v=19$m=32,t=1$AAAA$AAAA"] {
            assert_eq!(pool.verify(caller(0, 0), secret("x"), invalid).await, Err(HashError::Failed), "{invalid}");
        }
    }

    #[tokio::test]
    async fn a_full_queue_is_refused_at_once_and_a_disconnected_client_costs_no_hash() {
        let pool = HashPool::start(Params::new(64 * 1024, 2, 1, None).unwrap(), 1, 2).unwrap();
        let of_another = |number| caller(number, number);
        let running = (0..10).map(|number| Box::pin(pool.hash(of_another(number), secret("correct horse"))));
        let mut results = futures(running.collect()).await;
        results.sort_by_key(|result| result.is_ok());
        let refused = results.iter().filter(|result| **result == Err(HashError::QueueFull)).count();
        assert!((7..=8).contains(&refused), "{refused}");
        assert!(results.iter().any(|result| result.is_ok()));
    }

    /// Computes hashes of these callers one after the other on one thread. Returns who got one, in this order.
    async fn order(callers: Vec<HashCaller>) -> Vec<(HashCaller, Result<(), HashError>)> {
        let pool = HashPool::start(Params::new(8 * 1024, 2, 1, None).unwrap(), 1, 80).unwrap();
        let one = async |caller| (caller, pool.hash(caller, secret("correct horse")).await.map(drop));
        futures(callers.into_iter().map(|caller| Box::pin(one(caller))).collect()).await
    }

    #[tokio::test]
    async fn many_hashes_of_one_network_delay_those_of_others_by_one_and_are_refused_above_their_share() {
        let many = std::iter::repeat_with(|| caller(1, rand::random())).take(40);
        let others = (2..7).map(|number| caller(number, number));
        let done = order(many.chain(others).collect()).await;
        let refused: Vec<_> = done.iter().filter(|(_, result)| *result == Err(HashError::CallerQueueFull)).collect();
        assert!((25..=30).contains(&refused.len()) && refused.iter().all(|(by, _)| by.network == [1; 32]), "{done:?}");
        let computed: Vec<_> = done.iter().filter(|(_, result)| result.is_ok()).map(|(by, _)| by.network[0]).collect();
        let last = computed.iter().rposition(|network| *network > 1).unwrap();
        assert!(last <= 8, "the others wait for two of the network: {computed:?}");
    }

    #[tokio::test]
    async fn a_request_waits_for_those_of_its_network_but_not_for_long() {
        let pool = HashPool::start(params(1), 1, 16).unwrap();
        let network = |last: u8| Some(IpAddr::from([192, 0, 2, last]));
        let mut entered = Vec::new();
        for _ in 0..3 {
            entered.push(pool.enter(network(1)).await.unwrap());
        }
        assert_eq!(
            pool.enter(network(1)).await.map(drop),
            Err(HashError::CallerQueueFull),
            "one and an eighth of the queue"
        );
        assert!(pool.enter(network(2)).await.is_ok(), "another network does not wait");
        let waiting = pool.enter(network(1));
        let (waited, ()) = tokio::join!(waiting, async { drop(entered.pop()) });
        assert!(waited.is_ok(), "it enters when another request of the network ends");
    }

    #[tokio::test]
    async fn hashes_of_one_account_are_bounded_wherever_they_come_from() {
        let many = (0..40).map(|number| caller(number, 1));
        let done = order(many.chain([caller(50, 2)]).collect()).await;
        let refused = done.iter().filter(|(by, result)| by.account == [1; 32] && result.is_err()).count();
        assert!((25..=29).contains(&refused), "ten wait, and one is computed: {refused}");
        assert!(done.contains(&(caller(50, 2), Ok(()))));
    }

    /// Polls all of them at once.
    async fn futures<F: Future<Output = T> + Unpin, T>(mut all: Vec<F>) -> Vec<T> {
        let mut done = Vec::new();
        std::future::poll_fn(move |context| {
            all.retain_mut(|one| match std::pin::Pin::new(one).poll(context) {
                std::task::Poll::Ready(value) => {
                    done.push(value);
                    false
                }
                std::task::Poll::Pending => true,
            });
            if all.is_empty() { std::task::Poll::Ready(std::mem::take(&mut done)) } else { std::task::Poll::Pending }
        })
        .await
    }

    /// The nice values of all threads that hash in this process.
    #[cfg(target_os = "linux")]
    fn nice_values() -> Vec<String> {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
        let hashing = stats.filter(|stat| stat.contains("(password-hash)"));
        // The 17th field after the name is the nice value.
        hashing.map(|stat| stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().to_owned()).collect()
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn its_threads_have_the_lowest_priority() {
        let pool = HashPool::start(params(1), 1, 10).unwrap();
        pool.hash(caller(0, 0), secret("correct horse")).await.unwrap();
        // Other tests of this process also start pools, whose threads may not have set theirs yet.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            let values = nice_values();
            assert!(!values.is_empty());
            if values.iter().all(|value| value == "19") {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{values:?}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
}
