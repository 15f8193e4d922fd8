//! Makes of a stored subscriber what the dispatcher sends to.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;
use webhook_client::signature::SigningSecret;
use webhook_client::{ClientCredentials, ClientIdentity, InvalidIdentity, Target, TokenSource};

use crate::deliveries::domain::{Batch, EndpointAuth};
use crate::deliveries::recipient::{Recipient, RecipientBatch, RecipientLimits, RecipientRetry};
use crate::subscribers::domain::Subscriber;

/// Fails with the reason if the stored URL or headers are no longer valid.
pub(crate) fn recipient_of(
    subscriber: Subscriber,
    secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
) -> Result<Recipient, String> {
    let snapshot = subscriber.snapshot();
    let settings = subscriber.settings;
    // The URL was checked when it was stored. If the setting `https_only` became stricter since then, sending fails.
    let target = Target::parse(&settings.url, false).map_err(|error| format!("{}: url {error}", subscriber.id))?;
    let (target, token_source) = with_auth(subscriber.id, target, settings.auth.as_ref())
        .map_err(|error| format!("{}: auth: {error}", subscriber.id))?;
    let headers = webhook_client::headers::check(&settings.headers.into_iter().collect())
        .map_err(|refused| format!("{}: {} of its headers are not allowed", subscriber.id, refused.len()))?;
    Ok(Recipient {
        id: subscriber.id,
        tenant: subscriber.tenant.as_str().into(),
        version: subscriber.version,
        is_enabled: settings.is_active && subscriber.paused_at.is_none() && subscriber.unverified_since.is_none(),
        target,
        headers,
        token_source,
        secrets,
        format: settings.format,
        timeout: Duration::from_millis(settings.timeout_ms.into()),
        batch: settings.batch.map(|Batch { max, wait_ms }| RecipientBatch {
            max: max as usize,
            wait: Duration::from_millis(wait_ms.into()),
        }),
        limits: RecipientLimits {
            max_in_flight: settings.max_in_flight as usize,
            rate: settings.rate_limit_per_second,
        },
        retry: RecipientRetry {
            backoff: settings.retry_backoff_seconds,
            rules: settings.retry_rules,
            on_exhausted: settings.on_exhausted,
        },
        snapshot,
    })
}

/// The target and the source of access tokens that an endpoint requires. Fails with the reason if the stored credentials are no
/// longer valid. A certificate that has expired since it was stored is valid here: its endpoint decides.
fn with_auth(
    subscriber: Uuid,
    target: Target,
    auth: Option<&EndpointAuth>,
) -> Result<(Target, Option<TokenSource>), String> {
    match auth {
        None => Ok((target, None)),
        Some(EndpointAuth::Oauth2(credentials)) => {
            let credentials = ClientCredentials {
                token_url: &credentials.token_url,
                client_id: &credentials.client_id,
                client_secret: credentials.client_secret.reveal(),
                scope: credentials.scope.as_deref(),
                audience: credentials.audience.as_deref(),
            };
            Ok((
                target,
                Some(TokenSource::new(&subscriber.to_string(), &credentials).map_err(|error| error.to_string())?),
            ))
        }
        Some(EndpointAuth::Mtls(pair)) => {
            let owner = subscriber.to_string();
            let identity = ClientIdentity::from_pem(&owner, &pair.certificate, pair.private_key.reveal());
            let (InvalidIdentity::Certificate(detail) | InvalidIdentity::PrivateKey(detail)) = match identity {
                Ok(identity) => return Ok((target.with_identity(Arc::new(identity)), None)),
                Err(invalid) => invalid,
            };
            Err(detail.to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine};
    use rcgen::{CertificateParams, KeyPair};
    use runtime::secret::Secret;

    use super::*;
    use crate::deliveries::domain::{ClientCertificate, Format, OAuth2Credentials, OnExhausted, RetryRules};
    use crate::subscribers::domain::SubscriberSettings;

    /// A self-signed certificate that is valid from one year to another, and its key, as PEM.
    fn pair(years: (i32, i32)) -> (String, String) {
        let mut params = CertificateParams::new(vec!["client.example".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let key = KeyPair::generate().unwrap();
        let pem = |label: &str, der: &[u8]| {
            format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64_STANDARD.encode(der))
        };
        (pem("CERTIFICATE", params.self_signed(&key).unwrap().der()), pem("PRIVATE KEY", &key.serialize_der()))
    }

    fn recipient_with(auth: Option<EndpointAuth>) -> Result<Recipient, String> {
        let now = DateTime::UNIX_EPOCH;
        let settings = SubscriberSettings {
            name: "a".to_owned(),
            url: "https://example.com/hook".to_owned(),
            event_types: Vec::new(),
            filter: None,
            ordering_key: None,
            retry_backoff_seconds: Vec::new(),
            retry_rules: RetryRules::default(),
            on_exhausted: OnExhausted::Skip,
            timeout_ms: 1_000,
            max_in_flight: 1,
            rate_limit_per_second: None,
            headers: Vec::new(),
            auth,
            format: Format::Raw,
            batch: None,
            verify_endpoint: false,
            is_active: true,
        };
        let subscriber = Subscriber {
            id: Uuid::now_v7(),
            tenant: "main".parse().unwrap(),
            version: 1,
            settings,
            paused_at: None,
            unverified_since: None,
            inactive_reason: None,
            created_at: now,
            updated_at: now,
        };
        recipient_of(subscriber, Vec::new())
    }

    #[test]
    fn requests_have_the_credentials_of_their_subscriber() {
        let plain = recipient_with(None).unwrap();
        assert!(plain.token_source.is_none() && plain.target.identity().is_none());
        let oauth2 = EndpointAuth::Oauth2(OAuth2Credentials {
            token_url: "https://id.example/".to_owned(),
            client_id: "a".to_owned(),
            client_secret: Secret::new("b".to_owned()),
            scope: None,
            audience: None,
        });
        assert!(recipient_with(Some(oauth2)).unwrap().token_source.is_some());
        // Expired: the endpoint decides about it.
        let (certificate, private_key) = pair((2000, 2001));
        let pair = ClientCertificate { certificate, private_key: Secret::new(private_key) };
        let of = || recipient_with(Some(EndpointAuth::Mtls(pair.clone()))).unwrap().target;
        let (one, other) = (of(), of());
        assert!(one.identity().is_some() && one.connection_key() != other.connection_key());
        assert!(one.connection_key() != plain.target.connection_key() && one.origin() == plain.target.origin());
        let damaged = ClientCertificate { certificate: String::new(), ..pair };
        assert!(recipient_with(Some(EndpointAuth::Mtls(damaged))).unwrap_err().contains("auth"));
    }
}
