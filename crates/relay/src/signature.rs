//! Signatures of messages on RabbitMQ. Every program that can publish to the broker can set any header, so a header
//! proves nothing: a message is a service's own only if it was signed with a key of this installation.

use std::fmt;
use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine};
use hmac::{Hmac, Mac};
use runtime::secret::MasterKey;
use sha2::Sha256;

/// The prefix of a signature: the version of the signed fields and of the algorithm.
const VERSION: &str = "v1,";

/// Signs the messages of an installation, and verifies them. All databases of the installation have the same secret key,
/// so each can verify what another has signed.
#[derive(Clone)]
pub struct MessageSigner {
    /// The current key first, then the previous ones.
    keys: Arc<[Hmac<Sha256>]>,
}

/// Everything that a reader of a signed message trusts. The routing key is not among it, because RabbitMQ changes it
/// when it dead-letters a message, and the trace, which has no effect.
pub(crate) struct SignedFields<'a> {
    pub(crate) message_id: &'a str,
    pub(crate) source: &'a str,
    pub(crate) tenant: &'a str,
    /// AMQP's property `type`.
    pub(crate) kind: &'a str,
    pub(crate) key: Option<&'a str>,
    pub(crate) body: &'a [u8],
}

impl MessageSigner {
    /// Signs with a key derived from the first of the secret keys, and accepts the signatures of all.
    pub fn new(master_keys: &[MasterKey]) -> MessageSigner {
        let key = |master: &MasterKey| {
            // HMAC accepts a key of any length.
            Hmac::new_from_slice(&master.derive("broker message")).ok()
        };
        MessageSigner { keys: master_keys.iter().filter_map(key).collect() }
    }

    /// Returns the value of the header.
    pub(crate) fn sign(&self, fields: &SignedFields<'_>) -> Option<String> {
        let tag = fields.authenticate(self.keys.first()?).finalize().into_bytes();
        Some(format!("{VERSION}{}", BASE64_STANDARD.encode(tag)))
    }

    /// Returns true if one of the keys has signed exactly these fields. The comparison takes the same time for every
    /// wrong signature.
    pub(crate) fn verify(&self, fields: &SignedFields<'_>, signature: &str) -> bool {
        let Some(tag) = signature.strip_prefix(VERSION) else { return false };
        let Ok(tag) = BASE64_STANDARD.decode(tag) else { return false };
        self.keys.iter().any(|key| fields.authenticate(key).verify_slice(&tag).is_ok())
    }
}

impl fmt::Debug for MessageSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MessageSigner(***)")
    }
}

impl SignedFields<'_> {
    /// Each field is preceded by its length, so that different fields never result in the same text.
    fn authenticate(&self, key: &Hmac<Sha256>) -> Hmac<Sha256> {
        let mut mac = key.clone();
        let SignedFields { message_id, source, tenant, kind, key, body } = self;
        for field in [Some(*message_id), Some(*source), Some(*tenant), Some(*kind), *key] {
            mac.update(&field.map_or(u64::MAX, |text| text.len() as u64).to_be_bytes());
            mac.update(field.unwrap_or_default().as_bytes());
        }
        mac.update(body);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields() -> SignedFields<'static> {
        SignedFields { message_id: "m", source: "events", tenant: "main", kind: "a.b", key: Some("k"), body: b"{}" }
    }

    #[test]
    fn a_signature_is_valid_only_for_the_same_fields() {
        let signer = MessageSigner::new(&[MasterKey::generate()]);
        let signature = signer.sign(&fields()).unwrap();
        assert!(signer.verify(&fields(), &signature));
        let changed = [
            ("id", SignedFields { message_id: "n", ..fields() }),
            ("source", SignedFields { source: "joins", ..fields() }),
            ("tenant", SignedFields { tenant: "acme", ..fields() }),
            ("type", SignedFields { kind: "a.c", ..fields() }),
            ("key", SignedFields { key: Some("l"), ..fields() }),
            ("no key", SignedFields { key: None, ..fields() }),
            ("empty key", SignedFields { key: Some(""), ..fields() }),
            ("body", SignedFields { body: b"[]", ..fields() }),
            ("text moved to the next field", SignedFields { source: "event", tenant: "smain", ..fields() }),
            ("text moved to the body", SignedFields { key: Some(""), body: b"k{}", ..fields() }),
        ];
        for (what, fields) in changed {
            assert!(!signer.verify(&fields, &signature), "{what}");
        }
        let without_version = signature.strip_prefix(VERSION).unwrap();
        for invalid in ["", VERSION, "v1,not base64", without_version, &format!("v2,{without_version}")] {
            assert!(!signer.verify(&fields(), invalid), "{invalid}");
        }
    }

    #[test]
    fn previous_keys_verify_and_other_keys_do_not() {
        let (old, new) = (MasterKey::generate(), MasterKey::generate());
        let before = MessageSigner::new(std::slice::from_ref(&old)).sign(&fields()).unwrap();
        let after = MessageSigner::new(&[new.clone(), old]);
        assert!(after.verify(&fields(), &before));
        assert!(after.verify(&fields(), &after.sign(&fields()).unwrap()));
        assert!(!MessageSigner::new(&[new]).verify(&fields(), &before));
        assert!(!MessageSigner::new(&[]).verify(&fields(), &before));
        assert_eq!(format!("{after:?}"), "MessageSigner(***)");
    }
}
