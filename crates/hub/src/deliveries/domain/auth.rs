//! The credentials that an endpoint requires besides the signature.

use runtime::secret::Secret;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How the hub authenticates itself to an endpoint. Stored encrypted, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum EndpointAuth {
    /// An access token, which the hub gets by OAuth 2 client credentials (RFC 6749, section 4.4).
    Oauth2(OAuth2Credentials),
    /// A client certificate (mutual TLS).
    Mtls(ClientCertificate),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OAuth2Credentials {
    pub(crate) token_url: String,
    pub(crate) client_id: String,
    pub(crate) client_secret: Secret<String>,
    pub(crate) scope: Option<String>,
    pub(crate) audience: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientCertificate {
    /// The certificate and the intermediate ones, as PEM.
    pub(crate) certificate: String,
    /// The private key, as PEM.
    pub(crate) private_key: Secret<String>,
}

/// The kind of credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AuthKind {
    /// An access token by OAuth 2 client credentials.
    Oauth2,
    /// A client certificate (mutual TLS).
    Mtls,
}

impl EndpointAuth {
    pub(crate) fn kind(&self) -> AuthKind {
        match self {
            EndpointAuth::Oauth2(_) => AuthKind::Oauth2,
            EndpointAuth::Mtls(_) => AuthKind::Mtls,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_stored_but_not_printed() {
        let oauth2 = r#"{"type":"oauth2","token_url":"https://a/","client_id":"b","client_secret":"hunter2","scope":null,"audience":null}"#;
        let mtls = r#"{"type":"mtls","certificate":"c","private_key":"hunter2"}"#;
        for text in [oauth2, mtls] {
            let auth: EndpointAuth = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&auth).unwrap(), text);
            assert!(!format!("{auth:?}").contains("hunter2"));
        }
    }
}
