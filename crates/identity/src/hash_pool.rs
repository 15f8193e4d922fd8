//! The hashes of passwords: Argon2id on threads of their own.
//!
//! A hash occupies a core and much memory for tens of milliseconds, so it must not run on a thread that serves requests. The
//! pool has a fixed number of threads and a bounded queue: above it, requests are refused at once. Its threads have the
//! lowest priority, so other work runs first on a machine that is busy with sign-ins.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use argon2::{Algorithm, Argon2, Block, Params, Version};
use base64::prelude::{BASE64_STANDARD_NO_PAD, Engine};
use kit::secret::Secret;
use rand::RngCore;
use subtle::ConstantTimeEq;
use tokio::sync::oneshot;

/// The nice value of the threads: the lowest priority.
const NICE: i32 = 19;
/// After this time without work a thread releases its memory.
const IDLE_MAX: Duration = Duration::from_secs(5);
const SALT_BYTES: usize = 16;
const HASH_BYTES: usize = 32;

/// Hashes and verifies passwords. Dropping it ends its threads.
pub(crate) struct HashPool {
    queue: Arc<Queue>,
    params: Params,
}

/// Why there is no hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HashError {
    #[error("too many sign-ins and registrations at once")]
    QueueFull,
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

struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    jobs_max: usize,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

/// One computation of Argon2id.
struct Job {
    password: Secret<String>,
    salt: Vec<u8>,
    params: Params,
    answer: oneshot::Sender<Result<[u8; HASH_BYTES], HashError>>,
}

impl HashPool {
    /// Starts the threads; 0 means one for each core. Fails if a thread cannot be started.
    pub(crate) fn start(params: Params, threads: u32, queue_max: u32) -> std::io::Result<HashPool> {
        let queue = Arc::new(Queue { state: Mutex::default(), ready: Condvar::new(), jobs_max: queue_max as usize });
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            count => count as usize,
        };
        for _ in 0..threads {
            let queue = queue.clone();
            std::thread::Builder::new().name("password-hash".to_owned()).spawn(move || queue.work())?;
        }
        Ok(HashPool { queue, params })
    }

    /// Returns the PHC string of a password, with the current parameters.
    pub(crate) async fn hash(&self, password: Secret<String>) -> Result<String, HashError> {
        let salt = random::<SALT_BYTES>();
        let hash = self.compute(password, salt.to_vec(), self.params.clone()).await?;
        Ok(to_phc(&self.params, &salt, &hash))
    }

    /// Returns a PHC string that no password has, with the current parameters: comparing with it costs as much as usual.
    pub(crate) fn unusable(&self) -> String {
        unusable(&self.params)
    }

    /// Computes what [`HashPool::verify`] would for the hash of another account, and never has a result. Without one, the current
    /// parameters are used.
    pub(crate) async fn verify_nothing(&self, password: Secret<String>, like: Option<&str>) -> Result<(), HashError> {
        let params = like.and_then(from_phc).map_or_else(|| self.params.clone(), |stored| stored.params);
        self.compute(password, random::<SALT_BYTES>().to_vec(), params).await.map(drop)
    }

    /// Compares a password with a PHC string.
    pub(crate) async fn verify(&self, password: Secret<String>, phc: &str) -> Result<Verified, HashError> {
        let stored = from_phc(phc).ok_or(HashError::Failed)?;
        let is_outdated = (stored.params.m_cost(), stored.params.t_cost(), stored.params.p_cost())
            != (self.params.m_cost(), self.params.t_cost(), self.params.p_cost());
        let hash = self.compute(password, stored.salt, stored.params).await?;
        Ok(Verified { is_correct: bool::from(hash.as_slice().ct_eq(&stored.hash)), is_outdated })
    }

    async fn compute(
        &self,
        password: Secret<String>,
        salt: Vec<u8>,
        params: Params,
    ) -> Result<[u8; HASH_BYTES], HashError> {
        let (answer, answered) = oneshot::channel();
        self.queue.push(Job { password, salt, params, answer })?;
        answered.await.unwrap_or(Err(HashError::Failed))
    }
}

impl Drop for HashPool {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.ready.notify_all();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) -> Result<(), HashError> {
        let mut state = self.lock();
        if state.jobs.len() >= self.jobs_max {
            metrics::counter!("pillarbox_identity_hash_refused_total").increment(1);
            return Err(HashError::QueueFull);
        }
        state.jobs.push_back(job);
        self.ready.notify_one();
        Ok(())
    }

    /// Returns the next job; None if there was none for some time. Fails if the pool was dropped.
    fn next(&self) -> Result<Option<Job>, Closed> {
        let mut state = self.lock();
        let is_idle = |state: &mut State| state.jobs.is_empty() && !state.is_closed;
        let waited = self.ready.wait_timeout_while(state, IDLE_MAX, is_idle);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match state.jobs.pop_front() {
            None if state.is_closed => Err(Closed),
            job => Ok(job),
        }
    }

    /// The loop of a thread. It reuses its memory, because requesting many pages from the kernel takes a good part of the
    /// time of a hash.
    fn work(&self) {
        lower_priority();
        let mut memory: Vec<Block> = Vec::new();
        while let Ok(next) = self.next() {
            let Some(job) = next else {
                memory = Vec::new();
                continue;
            };
            // Nobody waits for the result: the client has disconnected.
            if job.answer.is_closed() {
                continue;
            }
            memory.resize(memory.len().max(job.params.block_count()), Block::default());
            let mut hash = [0; HASH_BYTES];
            let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, job.params);
            let password = job.password.reveal().as_bytes();
            let done = argon2.hash_password_into_with_memory(password, &job.salt, &mut hash, &mut memory);
            // Fails if the client has disconnected meanwhile.
            let _ = job.answer.send(done.map(|()| hash).map_err(|_| HashError::Failed));
        }
    }
}

/// The pool was dropped.
struct Closed;

/// Gives this thread the lowest priority. On Linux a nice value belongs to a thread.
fn lower_priority() {
    if let Err(error) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE) {
        tracing::warn!(%error, "the threads for password hashes have the usual priority");
    }
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

    fn secret(text: &str) -> Secret<String> {
        Secret::new(text.to_owned())
    }

    #[tokio::test]
    async fn a_hash_is_a_phc_string_that_other_programs_can_verify() {
        let pool = HashPool::start(params(1), 1, 10).unwrap();
        let phc = pool.hash(secret("correct horse")).await.unwrap();
        assert!(phc.starts_with("$argon2id$v=19$m=32,t=1,p=1$"), "{phc}");
        let parsed = PasswordHash::new(&phc).unwrap();
        assert!(Argon2::default().verify_password(b"correct horse", &parsed).is_ok());
        let verify = async |text: &str| pool.verify(secret(text), &phc).await.unwrap();
        assert_eq!(verify("correct horse").await, Verified { is_correct: true, is_outdated: false });
        assert!(!verify("correct house").await.is_correct);
        assert_ne!(pool.hash(secret("correct horse")).await.unwrap(), phc, "each hash has its own salt");
    }

    #[tokio::test]
    async fn a_hash_with_other_parameters_is_outdated_but_valid() {
        let old = HashPool::start(Params::new(64, 2, 1, None).unwrap(), 1, 10).unwrap();
        let phc = old.hash(secret("correct horse")).await.unwrap();
        let pool = HashPool::start(params(1), 1, 10).unwrap();
        let verified = pool.verify(secret("correct horse"), &phc).await.unwrap();
        assert_eq!(verified, Verified { is_correct: true, is_outdated: true });
        for invalid in ["", "x", "$argon2i$v=19$m=32,t=1,p=1$AAAAAAAAAAA$AAAA", "$argon2id$v=19$m=32,t=1$AAAA$AAAA"] {
            assert_eq!(pool.verify(secret("x"), invalid).await, Err(HashError::Failed), "{invalid}");
        }
    }

    #[tokio::test]
    async fn a_full_queue_is_refused_at_once_and_a_disconnected_client_costs_no_hash() {
        let pool = HashPool::start(Params::new(64 * 1024, 2, 1, None).unwrap(), 1, 2).unwrap();
        let running: Vec<_> = (0..10).map(|_| Box::pin(pool.hash(secret("correct horse")))).collect();
        let mut results = futures(running).await;
        results.sort_by_key(|result| result.is_ok());
        let refused = results.iter().filter(|result| **result == Err(HashError::QueueFull)).count();
        assert!((7..=8).contains(&refused), "{refused}");
        assert!(results.iter().any(|result| result.is_ok()));
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
            match all.is_empty() {
                true => std::task::Poll::Ready(std::mem::take(&mut done)),
                false => std::task::Poll::Pending,
            }
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
        pool.hash(secret("correct horse")).await.unwrap();
        // Other tests of this process start pools, too, whose threads may not have set theirs yet.
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            let values = nice_values();
            assert!(!values.is_empty());
            if values.iter().all(|value| value == "19") {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{values:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
