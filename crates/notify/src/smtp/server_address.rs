//! The parts of the mail server's address: credentials, whether it is this machine, and how its certificate is verified.

use std::net::IpAddr;
use std::path::Path;

use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::client::{Certificate, TlsParameters};
use runtime::config::InvalidSetting;
use url::{Host, Url};

pub(super) fn tls_parameters(host: &str, ca_file: Option<&Path>) -> Result<TlsParameters, InvalidSetting> {
    let mut tls = TlsParameters::builder(host.to_owned());
    if let Some(file) = ca_file {
        let invalid = |error: &dyn std::fmt::Display| {
            InvalidSetting::new("mail.ca_file", format!("must be a PEM file with certificates: {error}"))
        };
        let pem = std::fs::read(file).map_err(|error| invalid(&error))?;
        if !String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----") {
            return Err(invalid(&"it contains no certificate"));
        }
        tls = tls.add_root_certificate(Certificate::from_pem(&pem).map_err(|error| invalid(&error))?);
    }
    tls.build_rustls().map_err(|error| InvalidSetting::new("smtp_url", format!("TLS cannot be used: {error}")))
}

/// The credentials in the address; inner None if there are none, outer None if they are invalid.
pub(super) fn credentials(url: &Url) -> Option<Option<Credentials>> {
    if url.username().is_empty() && url.password().is_none() {
        return Some(None);
    }
    let user = percent_decoded(url.username())?;
    let password = percent_decoded(url.password().unwrap_or_default())?;
    Some(Some(Credentials::new(user, password)))
}

fn percent_decoded(text: &str) -> Option<String> {
    // A query decodes in the same way, except that `+` is a blank there.
    let query = format!("v={}", text.replace('+', "%2B").replace('&', "%26"));
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    pairs.next().map(|(_, value)| value.into_owned()).filter(|value| !value.contains('\u{fffd}'))
}

pub(super) fn is_loopback(host: &Host<String>) -> bool {
    match host {
        Host::Domain(name) => name == "localhost",
        Host::Ipv4(address) => IpAddr::from(*address).is_loopback(),
        Host::Ipv6(address) => IpAddr::from(*address).is_loopback(),
    }
}
