//! The field `auth`: the credentials that an endpoint requires.

use chrono::{DateTime, Utc};
use http_kit::field::{Field, FieldChecks, FieldErrors, error, printable};
use runtime::secret::Secret;
use serde::Deserialize;
use utoipa::ToSchema;
use webhook_client::{Client, ClientIdentity, InvalidIdentity, PEM_CHARS_MAX, Target};

use super::{HIDDEN_VALUE, has_same_origin};
use crate::deliveries::domain::{AuthKind, ClientCertificate, EndpointAuth, OAuth2Credentials};
use crate::subscribers::domain::SubscriberSettings;

const CHARS_MAX: usize = 1_000;

/// Credentials for an endpoint. `oauth2` needs `token_url`, `client_id` and `client_secret`; `mtls` needs `certificate` and
/// `private_key`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SubscriberAuth, example = json!({"type": "oauth2", "token_url": "https://id.example.com/token",
    "client_id": "pillarbox", "client_secret": "secret", "scope": "webhooks"}))]
pub(crate) struct AuthFields {
    #[serde(rename = "type")]
    kind: AuthKind,
    /// The token endpoint. The rules for the `url` of a subscriber also apply to it.
    #[schema(max_length = 2000)]
    token_url: Option<String>,
    #[schema(min_length = 1, max_length = 1000)]
    client_id: Option<String>,
    /// Sent to the token endpoint only, by HTTP Basic authentication.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 1000, write_only)]
    client_secret: Option<Secret<String>>,
    #[schema(min_length = 1, max_length = 1000)]
    scope: Option<String>,
    #[schema(min_length = 1, max_length = 1000)]
    audience: Option<String>,
    /// The client's certificate and the intermediate ones, as PEM.
    #[schema(max_length = 32768)]
    certificate: Option<String>,
    /// The unencrypted private key of the certificate, as PEM.
    #[schema(value_type = Option<String>, max_length = 32768, write_only)]
    private_key: Option<Secret<String>>,
}

/// The settings on which the check of the credentials depends.
struct Context<'a> {
    /// The credentials before the change, if the request may refer to their secrets.
    reusable: Option<&'a EndpointAuth>,
    client: &'a Client,
    /// None: it is invalid.
    url: Option<&'a str>,
    has_authorization: bool,
    now: DateTime<Utc>,
}

/// Returns the new credentials. As for headers, stored secrets are not used for a URL with another origin.
pub(super) fn check_auth_field(
    checks: &mut FieldChecks<'_, SubscriberSettings>,
    field: Field<AuthFields>,
    old: Option<&SubscriberSettings>,
    url: Option<&str>,
    headers: Option<&[(String, String)]>,
    client: &Client,
    now: DateTime<Utc>,
) -> Option<Option<EndpointAuth>> {
    let (pointer, current) = ("/auth", |old: &SubscriberSettings| old.auth.clone());
    let is_same_origin = old.is_none_or(|old| url.is_none_or(|url| has_same_origin(url, &old.url)));
    let stored = old.and_then(|old| old.auth.as_ref());
    let is_header = |name: &str| headers.is_some_and(|headers| headers.iter().any(|(header, _)| header == name));
    let has_authorization = is_header("authorization");
    match field {
        Field::Absent if stored.is_some() && !is_same_origin => {
            let detail = "must be sent together with a `url` of another scheme, host or port: the stored credentials are not \
                          used for another receiver. Give them with their secrets, or null for none";
            checks.check(pointer, Field::Given(()), current, None, |()| Err(error(detail)))
        }
        Field::Absent if has_authorization && matches!(stored, Some(EndpointAuth::Oauth2(_))) => {
            checks.check(pointer, Field::Given(()), current, None, |()| Err(two_authorizations()))
        }
        field => {
            let context = Context { reusable: stored.filter(|_| is_same_origin), client, url, has_authorization, now };
            checks.check(pointer, field, current, Some(None), |given| check_auth(given, &context).map(Some))
        }
    }
}

fn check_auth(given: AuthFields, context: &Context<'_>) -> Result<EndpointAuth, FieldErrors> {
    let unexpected: &[(&str, bool)] = match given.kind {
        AuthKind::Oauth2 => {
            &[("certificate", given.certificate.is_some()), ("private_key", given.private_key.is_some())]
        }
        AuthKind::Mtls => &[
            ("token_url", given.token_url.is_some()),
            ("client_id", given.client_id.is_some()),
            ("client_secret", given.client_secret.is_some()),
            ("scope", given.scope.is_some()),
            ("audience", given.audience.is_some()),
        ],
    };
    let other = |(name, _): &(&str, bool)| (format!("/{name}"), "belongs to another `type` of credentials".to_owned());
    let mut errors: FieldErrors = unexpected.iter().filter(|(_, is_given)| *is_given).map(other).collect();
    let checked = match given.kind {
        AuthKind::Oauth2 => check_oauth2(given, context).map(EndpointAuth::Oauth2),
        AuthKind::Mtls => check_mtls(given, context).map(EndpointAuth::Mtls),
    };
    match checked {
        Ok(auth) if errors.is_empty() => Ok(auth),
        Ok(_) => Err(errors),
        Err(found) => {
            errors.extend(found);
            Err(errors)
        }
    }
}

fn check_oauth2(given: AuthFields, context: &Context<'_>) -> Result<OAuth2Credentials, FieldErrors> {
    let mut errors = FieldErrors::new();
    let token_url = required(&mut errors, "token_url", given.token_url, |url| {
        let target = Target::parse(url, false).map_err(|error| error.to_string())?;
        context.client.vet_target(&target).map_err(|refused| refused.to_string())
    });
    let is_text = |text: &str| printable(text, CHARS_MAX).map_err(|error| error.to_string());
    let client_id = required(&mut errors, "client_id", given.client_id, is_text);
    // A secret must not be sent to another token endpoint.
    let stored = match context.reusable {
        Some(EndpointAuth::Oauth2(old)) if Some(&old.token_url) == token_url.as_ref() => Some(&old.client_secret),
        Some(EndpointAuth::Oauth2(_) | EndpointAuth::Mtls(_)) | None => None,
    };
    let client_secret = given.client_secret.map(|secret| secret.reveal().clone());
    let client_secret = secret(&mut errors, "client_secret", client_secret, stored, is_text);
    for (name, value) in [("scope", &given.scope), ("audience", &given.audience)] {
        let checked = value.as_deref().map_or(Ok(()), is_text);
        errors.extend(checked.err().map(|detail| (format!("/{name}"), detail)));
    }
    if context.has_authorization {
        errors.extend(two_authorizations());
    }
    match (token_url, client_id, client_secret) {
        (Some(token_url), Some(client_id), Some(client_secret)) if errors.is_empty() => {
            Ok(OAuth2Credentials { token_url, client_id, client_secret, scope: given.scope, audience: given.audience })
        }
        _ => Err(errors),
    }
}

fn check_mtls(given: AuthFields, context: &Context<'_>) -> Result<ClientCertificate, FieldErrors> {
    let mut errors = FieldErrors::new();
    let stored = match context.reusable {
        Some(EndpointAuth::Mtls(old)) => Some(&old.private_key),
        Some(EndpointAuth::Oauth2(_)) | None => None,
    };
    let fits = |text: &str| {
        if text.len() <= PEM_CHARS_MAX { Ok(()) } else { Err(format!("must have at most {PEM_CHARS_MAX} characters")) }
    };
    // The response that shows a subscriber contains it.
    let has_only_certificates = |text: &str| match text.matches("-----BEGIN ").count() {
        blocks if blocks == text.matches("-----BEGIN CERTIFICATE-----").count() => fits(text),
        _ => Err("must have certificates only: send a private key in `private_key`".to_owned()),
    };
    let certificate = required(&mut errors, "certificate", given.certificate, has_only_certificates);
    let private_key = given.private_key.map(|key| key.reveal().clone());
    let private_key = secret(&mut errors, "private_key", private_key, stored, fits);
    if context.url.is_some_and(|url| Target::parse(url, false).is_ok_and(|target| !target.is_https())) {
        errors.extend(error("needs a `url` with https: a client certificate is part of TLS"));
    }
    let (Some(certificate), Some(private_key)) = (certificate, private_key) else { return Err(errors) };
    let identity = ClientIdentity::from_pem("", &certificate, private_key.reveal());
    match identity.and_then(|identity| identity.check_time(context.now)) {
        Ok(()) if errors.is_empty() => Ok(ClientCertificate { certificate, private_key }),
        Ok(()) => Err(errors),
        Err(InvalidIdentity::Certificate(detail)) => Err(with(errors, "certificate", detail)),
        Err(InvalidIdentity::PrivateKey(detail)) => Err(with(errors, "private_key", detail)),
    }
}

/// The value of a required field, if it passes the check.
fn required<E: ToString>(
    errors: &mut FieldErrors,
    name: &str,
    value: Option<String>,
    check: impl Fn(&str) -> Result<(), E>,
) -> Option<String> {
    let checked = value.ok_or_else(|| "is required".to_owned());
    let checked = checked.and_then(|value| check(&value).map(|()| value).map_err(|error| error.to_string()));
    checked.map_err(|detail| errors.push((format!("/{name}"), detail))).ok()
}

/// Like [`required`], of a secret. [`HIDDEN_VALUE`] means the stored one.
fn secret<E: ToString>(
    errors: &mut FieldErrors,
    name: &str,
    value: Option<String>,
    stored: Option<&Secret<String>>,
    check: impl Fn(&str) -> Result<(), E>,
) -> Option<Secret<String>> {
    if value.as_deref() != Some(HIDDEN_VALUE) {
        return required(errors, name, value, check).map(Secret::new);
    }
    if stored.is_none() {
        let detail = format!(
            "`{HIDDEN_VALUE}` leaves a stored secret unchanged, but none is stored for this receiver and these credentials: \
             give the secret"
        );
        errors.push((format!("/{name}"), detail));
    }
    stored.cloned()
}

fn with(mut errors: FieldErrors, name: &str, detail: &str) -> FieldErrors {
    errors.push((format!("/{name}"), detail.to_owned()));
    errors
}

fn two_authorizations() -> FieldErrors {
    error("sends an `authorization` itself: remove that header from `headers`")
}
