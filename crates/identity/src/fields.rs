//! The fields of requests: they are normalised and checked, and every invalid field is reported.

use http_kit::field::{FieldErrors, error};
use http_kit::problem::FieldError;
use http_kit::shown_text::check_name;
use pillarbox::log::Tenant;
use runtime::secret::Secret;
use unicode_normalization::UnicodeNormalization;

use crate::common_passwords::is_common;

const NAME_CHARS_MAX: usize = 100;
const EMAIL_CHARS_MAX: usize = 254;
const LOCAL_PART_CHARS_MAX: usize = 64;
const PASSWORD_CHARS: std::ops::RangeInclusive<usize> = 8..=128;
/// A shorter local part is found in too many passwords by accident.
const LOCAL_PART_CHARS_MIN: usize = 4;
/// The longest text that is normalised: a larger one has too many characters in any case.
const PASSWORD_BYTES_MAX: usize = 4 * 1024;
const PLAN_CHARS_MAX: usize = 63;

/// The language of a user who names none.
pub(crate) const LOCALE_DEFAULT: &str = "en";

/// Collects the errors of all fields of a request.
#[derive(Default)]
pub(crate) struct Checks(Vec<FieldError>);

impl Checks {
    /// Returns the checked value; None if it is invalid.
    pub(crate) fn check<T>(&mut self, pointer: &str, checked: Result<T, FieldErrors>) -> Option<T> {
        let at = |(_, detail): (String, String)| FieldError::body(pointer, detail);
        checked.map_err(|errors| self.0.extend(errors.into_iter().map(at))).ok()
    }

    /// Fails with the errors, if there are any.
    pub(crate) fn finish<T>(self, value: Option<T>) -> Result<T, Vec<FieldError>> {
        value.filter(|_| self.0.is_empty()).ok_or(self.0)
    }
}

/// Normalises an address: without surrounding spaces, in lower case. Fails if it is not an address. The patterns of the
/// OpenAPI document agree with it.
pub(crate) fn email(text: &str) -> Result<String, FieldErrors> {
    let text: String = text.trim().chars().take(EMAIL_CHARS_MAX + 1).nfc().flat_map(char::to_lowercase).collect();
    let (local, domain) = text
        .rsplit_once('@')
        .ok_or_else(|| error("must be an e-mail address, such as ada@example.org: it has no @"))?;
    if text.chars().count() > EMAIL_CHARS_MAX || local.len() > LOCAL_PART_CHARS_MAX {
        let detail = format!(
            "must have at most {EMAIL_CHARS_MAX} characters, of which at most {LOCAL_PART_CHARS_MAX} before the @"
        );
        return Err(error(detail));
    }
    let is_local = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+/=?^_`{|}~-".contains(&byte);
    if !local.split('.').all(|part| !part.is_empty() && part.bytes().all(is_local)) {
        let detail = "must have letters and digits of ASCII, and signs such as . _ + -, before the @, and no dot at the \
                      beginning, at the end or after another dot";
        return Err(error(detail));
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let labels: Vec<&str> = domain.split('.').collect();
    let is_top = |label: &str| label.len() >= 2 && label.starts_with(|letter: char| letter.is_ascii_alphabetic());
    if labels.len() < 2 || !labels.iter().all(|label| is_label(label)) || !is_top(labels[labels.len() - 1]) {
        let detail = "must have the name of a domain after the @, such as example.org; write the name of an \
                      internationalised domain in its ASCII form (xn--...)";
        return Err(error(detail));
    }
    Ok(text)
}

/// Normalises a password, so that the same characters typed on another keyboard are the same password. It has no other
/// rules than its length here: they apply to new passwords ([`new_password`]).
pub(crate) fn password(text: &Secret<String>) -> Result<Secret<String>, FieldErrors> {
    let too_long = || error(format!("must have at most {} characters", PASSWORD_CHARS.end()));
    if text.reveal().len() > PASSWORD_BYTES_MAX {
        return Err(too_long());
    }
    let normalised: String = text.reveal().nfkc().collect();
    match normalised.chars().count() {
        0 => Err(error("must not be empty")),
        count if count > *PASSWORD_CHARS.end() => Err(too_long()),
        _ => Ok(Secret::new(normalised)),
    }
}

/// Normalises and checks a new password: its length, and that it is not one of the first that an attacker tries. There are
/// no rules about kinds of characters (NIST SP 800-63B).
pub(crate) fn new_password(text: &Secret<String>, email: &str, name: &str) -> Result<Secret<String>, FieldErrors> {
    let password = password(text)?;
    if password.reveal().chars().count() < *PASSWORD_CHARS.start() {
        let (min, max) = (PASSWORD_CHARS.start(), PASSWORD_CHARS.end());
        return Err(error(format!("must have {min} to {max} characters")));
    }
    let lower = password.reveal().to_lowercase();
    if is_common(&lower) {
        return Err(error("is one of the most common passwords: choose another one, such as four random words"));
    }
    let local = email.split('@').next().unwrap_or_default();
    let contains_local = local.chars().count() >= LOCAL_PART_CHARS_MIN && lower.contains(local);
    let name: String = name.nfkc().flat_map(char::to_lowercase).collect();
    if contains_local || lower == email || lower == name.trim() {
        return Err(error("must not contain your e-mail address or be your name"));
    }
    Ok(password)
}

/// Normalises and checks a name. It is part of e-mails, also of those to addresses that another user has registered, so it must not
/// be a link, nor change how the rest of the text looks.
pub(crate) fn name(text: &str) -> Result<String, FieldErrors> {
    check_name(text, NAME_CHARS_MAX).map_err(error)?;
    Ok(text.trim().nfc().collect())
}

pub(crate) fn locale(text: String) -> Result<String, FieldErrors> {
    let mut parts = text.split('-');
    let language = parts.next().unwrap_or_default();
    let is_language = (2..=3).contains(&language.len()) && language.bytes().all(|byte| byte.is_ascii_alphabetic());
    let is_part = |part: &str| (2..=8).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_language && parts.clone().count() <= 3 && parts.all(is_part) {
        Ok(text)
    } else {
        Err(error("must be the tag of a language, such as en or pt-BR"))
    }
}

/// A plan has the same kind of name as a tenant.
pub(crate) fn plan(text: String) -> Result<String, FieldErrors> {
    match Tenant::try_from(text.clone()) {
        Ok(_) => Ok(text),
        Err(_) => Err(error(format!(
            "must have 1 to {PLAN_CHARS_MAX} characters of a-z, 0-9, - and _, and start with a letter or digit"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_an_address_are_one_account() {
        for text in ["ada@example.org", " Ada@Example.ORG ", "\tADA@EXAMPLE.ORG"] {
            assert_eq!(email(text).unwrap(), "ada@example.org");
        }
        for valid in ["a.b+c@sub.example.co", "o'hara_1@xn--bcher-kva.example", "x@a-b.io"] {
            assert_eq!(email(valid).unwrap(), valid);
        }
        let long = format!("{}@example.org", "a".repeat(65));
        for invalid in [
            "",
            "ada",
            "@example.org",
            "ada@",
            "ada@localhost",
            "ada@example",
            "ada@exa mple.org",
            "a da@example.org",
            "ada@@example.org",
            "ada@.org",
            "ada@example..org",
            "ada@-example.org",
            "ada@example.o",
            "ada@127.0.0.1",
            ".ada@example.org",
            "ada.@example.org",
            "a..da@example.org",
            "ada@bücher.example",
            "ada\n@example.org",
            "ada@example.org\0x",
            "\"ada\"@example.org",
            &long,
        ] {
            assert!(email(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn a_new_password_is_long_enough_and_not_guessable() {
        let check =
            |text: &str| new_password(&Secret::new(text.to_owned()), "lovelace@example.org", "Ada Lovelace").is_ok();
        for good in ["correct horse", "ปลาว่ายน้ำในทะเล", "        x", "Tr0ub4dor&3", &"éa".repeat(64)]
        {
            assert!(check(good), "{good}");
        }
        for bad in [
            "",
            "short",
            "1234567",
            "password",
            "PassWord123",
            "qwertyuiop",
            "zzzzzzzzzz",
            "my lovelace 1815",
            "lovelace@example.org",
            "ada lovelace",
            &"x".repeat(129),
            &"x".repeat(5_000),
        ] {
            assert!(!check(bad), "{bad}");
        }
        // Characters are counted after normalisation: this is seven letters with combining marks.
        assert!(!check(&"e\u{301}".repeat(7)));
    }

    #[test]
    fn the_same_characters_are_the_same_password() {
        let normalised = |text: &str| password(&Secret::new(text.to_owned())).unwrap().reveal().clone();
        assert_eq!(normalised("cafe\u{301} \u{ff11}\u{ff12}"), normalised("caf\u{e9} 12"));
        assert_ne!(normalised("Password"), normalised("password"));
    }

    #[test]
    fn a_name_is_one_line_without_a_link() {
        assert_eq!(name(" Ada King: Countess / Lovelace ").unwrap(), "Ada King: Countess / Lovelace");
        let links = ["https://example.org", "Ada, see ftp://example", "Ada, see www.evil.example"];
        let hidden = ["", " ", "Ada\r\nBcc: x", "Ada\u{1b}[2J", "Ada \u{202e}adA", "Ada\u{2028}Bob", "\u{200b}"];
        for bad in links.into_iter().chain(hidden) {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_locale_is_a_language_tag() {
        for good in ["en", "pt-BR", "zh-Hant-TW", "gsw"] {
            assert!(locale(good.to_owned()).is_ok(), "{good}");
        }
        for bad in ["", "e", "english", "en_US", "en-", "12", "en-a-b", "../../etc"] {
            assert!(locale(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
