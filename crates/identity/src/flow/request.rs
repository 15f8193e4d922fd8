//! Requests for an address whose answer must not reveal whether the address has an account: registration, and requests for
//! e-mails with a token.
//!
//! A request does the same for every address: it counts against the limits and stores what was requested. The next step is
//! decided after the answer, by a task that the request spawns, or by the worker of any process if that one has ended.

use std::sync::Arc;

use chrono::{DateTime, TimeDelta, Utc};
use http_kit::admission::caller_share::request_caller;
use pillarbox::database::Database;
use runtime::secret::Secret;
use runtime::worker::Round;
use sqlx::PgConnection;
use uuid::Uuid;

use super::contact::announce;
use super::email::{Notice, send_notice, send_token};
use super::throttle::{check, count_if_allowed, email_subjects};
use super::{ClientInfo, Tx};
use crate::Identity;
use crate::domain::{Account, Role, TokenKind};
use crate::error::Error;
use crate::hash_pool::HashCaller;
use crate::store::accepted_request::{self, AcceptedRequest, Requested};
use crate::store::throttle::Subject;
use crate::store::{account as store, one_time_token};

/// The pause before a request that failed is processed again, and the number that is processed at once.
const RETRY_PAUSE: TimeDelta = TimeDelta::seconds(10);
const BATCH: i64 = 50;

/// The checked fields of a registration.
pub(crate) struct NewUser {
    pub(crate) email: String,
    pub(crate) name: String,
    pub(crate) locale: String,
    pub(crate) password: Secret<String>,
}

/// A request for an address, to be accepted in the transaction that follows.
pub(crate) struct ReceivedRequest {
    pub(crate) id: Uuid,
    email: String,
    /// The error if a limit is reached. A repeat of a request that was accepted does not get it.
    requested: Result<Requested, Error>,
    client: ClientInfo,
}

impl ReceivedRequest {
    pub(crate) fn new(email: String, requested: Requested, client: ClientInfo) -> ReceivedRequest {
        ReceivedRequest { id: Uuid::now_v7(), email, requested: Ok(requested), client }
    }

    /// Hashes the password of a registration.
    pub(crate) async fn registration(
        identity: &Identity,
        new: NewUser,
        client: ClientInfo,
    ) -> Result<ReceivedRequest, Error> {
        let NewUser { email, name, locale, password } = new;
        let mut db = identity.db.acquire().await?;
        let subjects = subjects(identity, &mut db, &email, &client).await?;
        let allowed = check(&mut db, &subjects, identity.clock.now()).await;
        drop(db);
        // Above the limits no hash is computed, because any client could occupy the threads. Below them always, and before
        // anything is known about the address.
        let requested = match allowed {
            Ok(()) => {
                let [account, network] = subjects.map(|subject| subject.digest);
                let password_hash = identity.hashes.hash(HashCaller { network, account }, password).await?;
                Ok(Requested::Registration { name, locale, password_hash })
            }
            Err(limited) => Err(limited),
        };
        Ok(ReceivedRequest { id: Uuid::now_v7(), email, requested, client })
    }
}

/// Accepts a request. Fails if a limit is reached.
pub(crate) async fn accept(
    identity: &Identity,
    tx: &mut Tx<'_>,
    received: ReceivedRequest,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let ReceivedRequest { id, email, requested, client } = received;
    let requested = requested?;
    let subjects = subjects(identity, tx, &email, &client).await?;
    count_if_allowed(tx, &subjects, now).await?;
    Ok(accepted_request::insert(tx, id, &email, &requested, now).await?)
}

/// Spawns a task that processes an accepted request.
pub(crate) fn spawn_processing(identity: &Arc<Identity>, id: Uuid) {
    let (identity, caller) = (identity.clone(), request_caller());
    identity.tasks.clone().spawn(caller.run(async move {
        if let Err(error) = process(&identity, &identity.db, id).await {
            tracing::warn!(%error, "an accepted request could not be processed yet");
        }
    }));
}

/// The subjects that a request counts against. The same statement runs whether the address has an account or not.
async fn subjects(
    identity: &Identity,
    db: &mut PgConnection,
    email: &str,
    client: &ClientInfo,
) -> Result<[Subject; 2], Error> {
    let network = identity.digests.of_network(client.network);
    let is_known = store::knows_network(db, email, &network).await?;
    Ok(email_subjects(identity, email, &network, is_known))
}

/// Processes requests that are due: those of processes that have ended, and those that failed.
pub(crate) async fn process_due(identity: &Identity, db: &Database) -> Result<Round, Error> {
    let now = identity.clock.now();
    let again_at = now + RETRY_PAUSE;
    // The task of a new request is probably at work.
    let due = accepted_request::due(&mut *db.acquire().await?, now - TimeDelta::seconds(2), again_at, BATCH).await?;
    for id in &due {
        if let Err(error) = process(identity, db, *id).await {
            tracing::warn!(%error, "an accepted request could not be processed yet");
        }
    }
    Ok(if due.is_empty() { Round::Idle } else { Round::Busy })
}

/// Processes one request, unless it has been.
async fn process(identity: &Identity, db: &Database, id: Uuid) -> Result<(), Error> {
    let mut tx = db.begin().await?;
    let Some(AcceptedRequest { email, requested }) = accepted_request::claim(&mut tx, id).await? else { return Ok(()) };
    let now = identity.clock.now();
    let found = store::lock_by_email(&mut tx, &email).await?;
    match (requested, found) {
        (Requested::Registration { name, locale, password_hash }, found) => {
            let new = new_account(email, name, locale, password_hash, now);
            register(identity, &mut tx, new, found).await?;
        }
        (Requested::Verification, Some(account)) if account.verified_at.is_none() => {
            send_token(identity, &mut tx, &account, TokenKind::Verification, now).await?;
        }
        (Requested::PasswordReset, Some(account)) => {
            send_token(identity, &mut tx, &account, TokenKind::PasswordReset, now).await?;
        }
        (Requested::Verification | Requested::PasswordReset, _) => {}
    }
    tx.commit().await?;
    Ok(())
}

/// Creates the account; tells the owner of an existing one. If the address is registered again before it is verified, it is
/// not known which registration is the owner's, so none of them decides the password: the owner sets one after the verification.
async fn register(identity: &Identity, tx: &mut Tx<'_>, new: Account, mut found: Option<Account>) -> Result<(), Error> {
    let now = new.created_at;
    if found.is_none() && !store::insert(tx, &new).await? {
        // Another registration has just been committed.
        found = store::lock_by_email(tx, &new.email).await?;
    }
    match found {
        None => send_token(identity, tx, &new, TokenKind::Verification, now).await,
        Some(account) if account.verified_at.is_some() => send_notice(tx, &account, Notice::AccountExists, now).await,
        Some(account) => {
            let contested = Account {
                password_hash: identity.hashes.unusable(),
                needs_password: true,
                // The new token must not outlive the account.
                created_at: now,
                updated_at: now,
                version: account.version + 1,
                ..account
            };
            store::update(tx, &contested).await?;
            send_token(identity, tx, &contested, TokenKind::Verification, now).await
        }
    }
}

fn new_account(email: String, name: String, locale: String, password_hash: String, now: DateTime<Utc>) -> Account {
    Account {
        id: Uuid::now_v7(),
        email,
        name,
        locale,
        role: Role::User,
        password_hash,
        needs_password: false,
        verified_at: None,
        created_at: now,
        updated_at: now,
        version: 1,
    }
}

/// Verifies the address of the token's account. Returns whether the user must set a password, for which an e-mail is
/// requested. Fails if the token is not valid.
pub(crate) async fn verify(
    identity: &Identity,
    tx: &mut Tx<'_>,
    digest: Option<[u8; 32]>,
    now: DateTime<Utc>,
) -> Result<bool, Error> {
    let digest = digest.ok_or(Error::TokenNotFound)?;
    let kind = TokenKind::Verification;
    let user = one_time_token::find(tx, kind, &digest, now).await?.ok_or(Error::TokenNotFound)?;
    // The account first, as everywhere: two transactions that lock in another order can deadlock.
    let account = store::lock(tx, user).await?.ok_or(Error::TokenNotFound)?;
    one_time_token::consume(tx, kind, &digest, now).await?.ok_or(Error::TokenNotFound)?;
    let version = account.version + 1;
    let verified = Account { verified_at: Some(now), updated_at: now, version, ..account };
    store::update(tx, &verified).await?;
    announce(tx, &[&verified], now).await?;
    if verified.needs_password {
        send_token(identity, tx, &verified, TokenKind::PasswordReset, now).await?;
    }
    Ok(verified.needs_password)
}
