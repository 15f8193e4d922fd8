//! An HTTP client for endpoints that strangers choose, such as the receivers of webhooks.
//!
//! - It dials public addresses only, and networks that are allowed explicitly: a name is resolved once, all of its addresses
//!   are vetted, and exactly these are dialled ([`AllowedNetworks`]).
//! - A request has one deadline, from resolving the name to the last byte of the response. Headers, interim (1xx) responses
//!   and bodies of responses are bounded.
//! - A request is sent at most once: it never repeats one that the receiver may have processed. It follows no redirect.
//! - A [`Permit`] is asked immediately before the first bytes of a request are written, so that a sender whose right to send
//!   has expired while the connection was being opened sends nothing.
//! - Idle connections are pooled by origin and by client certificate. Nothing is written to one on which anything has arrived.
//! - Requests are signed by Standard Webhooks ([`signature`]); endpoints may require mutual TLS ([`ClientIdentity`]) or OAuth 2
//!   client credentials ([`TokenSource`]).
//!
//! Nothing here knows a database, a subscriber or a queue: the crate can be used alone.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use http::{HeaderMap, HeaderValue};
//! use webhook_client::signature::{SecretKind, SigningSecret, WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP, sign};
//! use webhook_client::{Client, ClientSettings, Target, WebhookRequest};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::new(ClientSettings::default())?;
//! let target = Target::parse("https://example.com/hooks", true)?;
//! let secret = SigningSecret::generate(SecretKind::Symmetric);
//!
//! let (id, now, body) = ("msg_1", 1_700_000_000, br#"{"type":"order.paid"}"#);
//! let mut headers = HeaderMap::new();
//! headers.insert(WEBHOOK_ID, HeaderValue::from_static(id));
//! headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(now));
//! headers.insert(WEBHOOK_SIGNATURE, sign([&secret], id, now, body));
//! let request = WebhookRequest {
//!     target: &target,
//!     headers,
//!     body: body.as_slice().into(),
//!     timeout: Duration::from_secs(10),
//! };
//! match client.post(request).await {
//!     Ok(response) => println!("{}: {}", response.status, response.excerpt),
//!     Err(error) => println!("{}: {error}", error.class.as_str()),
//! }
//! # Ok(())
//! # }
//! ```

#![deny(missing_docs)]

mod address;
mod client;
mod connection_pool;
mod dial;
mod error;
pub mod headers;
mod identity;
mod permit;
pub mod signature;
mod stream;
mod target;

pub use self::address::{AllowedNetworks, IpNet};
pub use self::client::{
    AccessToken, Client, ClientCredentials, ClientSettings, InvalidCredentials, TokenSource, WebhookRequest,
    WebhookResponse,
};
pub use self::dial::{InvalidProxy, Proxy, Resolve};
pub use self::error::{ClientError, ErrorClass, RequestError};
pub use self::identity::{ClientIdentity, InvalidIdentity, PEM_CHARS_MAX};
pub use self::permit::Permit;
pub use self::target::{InvalidTarget, Target};
