//! The links with which the recipient of an e-mail mutes its event type, without a login (RFC 8058).
//!
//! A token contains the id of the user, the event type and the channel, and is signed. It does not expire: e-mails are
//! retained for years, and the link can do nothing but mute.

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use strum::VariantArray;
use uuid::Uuid;

use crate::domain::delivery_rules::Channel;

/// The path of the route.
pub(crate) const PATH: &str = "/notify/v1/unsubscribe";
/// The version of the token's format.
const VERSION: u8 = 1;
const MAC_BYTES: usize = 16;
/// Version, channel, user.
const HEAD_BYTES: usize = 1 + 1 + 16;

/// Makes and verifies the links.
pub(crate) struct UnsubscribeLinks {
    key: [u8; 32],
    /// The address of the installation, without a slash at the end. None: e-mails have no links.
    public_url: Option<String>,
}

/// The notifications that the holder of a link may mute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unsubscription {
    pub(crate) user_id: Uuid,
    pub(crate) event_type: String,
    pub(crate) channel: Channel,
}

impl UnsubscribeLinks {
    pub(crate) fn new(key: [u8; 32], public_url: Option<String>) -> UnsubscribeLinks {
        UnsubscribeLinks { key, public_url }
    }

    /// Returns the link, if the address of the installation is known.
    pub(crate) fn link(&self, muted: &Unsubscription) -> Option<String> {
        self.public_url.as_ref().map(|url| format!("{url}{PATH}?token={}", self.token(muted)))
    }

    pub(crate) fn token(&self, muted: &Unsubscription) -> String {
        let channel = Channel::VARIANTS.iter().position(|channel| *channel == muted.channel).unwrap_or(0);
        let mut signed = vec![VERSION, u8::try_from(channel).unwrap_or(0)];
        signed.extend(muted.user_id.as_bytes());
        signed.extend(muted.event_type.as_bytes());
        let mac = self.mac(&signed).finalize().into_bytes();
        signed.extend(&mac[..MAC_BYTES]);
        BASE64_URL_SAFE_NO_PAD.encode(signed)
    }

    /// Returns what a token mutes; None if it was not made here.
    pub(crate) fn verify(&self, token: &str) -> Option<Unsubscription> {
        let signed = BASE64_URL_SAFE_NO_PAD.decode(token).ok()?;
        let (content, mac) = signed.split_at_checked(signed.len().checked_sub(MAC_BYTES)?)?;
        self.mac(content).verify_truncated_left(mac).ok()?;
        let (head, event_type) = content.split_at_checked(HEAD_BYTES)?;
        let [VERSION, channel, user @ ..] = head else { return None };
        Some(Unsubscription {
            user_id: Uuid::from_slice(user).ok()?,
            event_type: String::from_utf8(event_type.to_vec()).ok()?,
            channel: *Channel::VARIANTS.get(usize::from(*channel))?,
        })
    }

    fn mac(&self, content: &[u8]) -> Hmac<Sha256> {
        #[expect(clippy::expect_used, reason = "a key of HMAC may have any length")]
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("any length");
        mac.update(content);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_signed_token_is_valid_and_it_contains_exactly_what_was_signed() {
        let links = UnsubscribeLinks::new([7; 32], Some("https://example.org".to_owned()));
        let muted = Unsubscription {
            user_id: Uuid::from_u128(5),
            event_type: "join.promoted".to_owned(),
            channel: Channel::Webhook,
        };
        let token = links.token(&muted);
        assert_eq!(links.verify(&token), Some(muted.clone()));
        assert_eq!(links.link(&muted).unwrap(), format!("https://example.org/notify/v1/unsubscribe?token={token}"));
        assert_eq!(UnsubscribeLinks::new([8; 32], None).verify(&token), None);
        assert_eq!(UnsubscribeLinks::new([7; 32], None).link(&muted), None);
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(&token).unwrap();
        for at in 0..bytes.len() {
            let mut forged = bytes.clone();
            forged[at] ^= 1;
            assert_eq!(links.verify(&BASE64_URL_SAFE_NO_PAD.encode(forged)), None, "{at}");
        }
        for invalid in ["", "x", "AAAA", &token[1..], &format!("{token}A")] {
            assert_eq!(links.verify(invalid), None, "{invalid}");
        }
    }
}
