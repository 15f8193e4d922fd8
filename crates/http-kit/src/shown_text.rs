//! Texts of callers that are shown to others: what they may contain, so that they neither mislead nor become links.

use crate::field::{NotPrintable, printable};

/// A name that must not be shown to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error(transparent)]
    NotPrintable(#[from] NotPrintable),
    #[error("must not contain characters that are not visible")]
    Invisible,
    #[error(
        "must not mix Latin with Cyrillic or Greek letters in one word, because some of them look the same: write each word with \
         the letters of one script"
    )]
    MixedScripts,
    #[error("must not contain the address of a website: write a space after a dot, and no ://")]
    WebAddress,
}

/// Checks a name that is shown to others than the one who chose it. Fails like [`printable`], and for characters that are not
/// visible or that change the direction of other text, for words that imitate others with letters of another script, and for
/// addresses of the web, which programs for e-mails turn into links. `openapi::schemas` has the same rules as a pattern.
pub fn check_name(text: &str, chars_max: usize) -> Result<(), NameError> {
    printable(text, chars_max)?;
    let first = text.chars().find(|c| !is_space(*c));
    if text.chars().any(is_invisible) || first.is_none_or(is_joiner) {
        return Err(NameError::Invisible);
    }
    if mixes_scripts(text) {
        return Err(NameError::MixedScripts);
    }
    if text.contains("://") || has_domain(text) {
        return Err(NameError::WebAddress);
    }
    Ok(())
}

/// Returns one line of text that follows the rules of [`check_name`] as far as it can: for a title that has other rules where it
/// is entered, and is shown in a place such as the subject of an e-mail. Characters that are not visible are left out, control
/// characters become blanks, and a blank breaks what programs for e-mails turn into links, and words between letters of different
/// scripts. Numbers such as `2.0` stay as they are.
pub fn inert(text: &str) -> String {
    let visible = text.chars().filter(|c| !is_invisible(*c)).map(|c| if c.is_control() { ' ' } else { c });
    let visible: Vec<char> = visible.skip_while(|c| is_space(*c) || is_joiner(*c)).collect();
    let (mut inert, mut word) = (String::with_capacity(text.len()), Word::default());
    for (at, c) in visible.iter().copied().enumerate() {
        if word.changes_script(c) {
            inert.push(' ');
        }
        inert.push(c);
        let rest = &visible[at + 1..];
        let begins_address = c == ':' && rest.starts_with(&['/', '/']);
        if begins_address || (is_dot(c) && ends_label(&visible[..at]) && (begins_name(rest) || is_in_ip(&visible, at)))
        {
            inert.push(' ');
        }
    }
    inert
}

/// Whether a word has Latin letters, and Cyrillic or Greek ones: `pаypal` with a Cyrillic `а` looks like another name.
fn mixes_scripts(text: &str) -> bool {
    let mut word = Word::default();
    text.chars().any(|c| word.changes_script(c))
}

/// A word while it is read: up to a space, a dot or a separator. Everything else, such as a digit or a joiner, belongs to it.
#[derive(Default)]
struct Word {
    /// Of its last letter.
    script: Option<Script>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Script {
    Latin,
    /// Cyrillic and Greek, which share letters with Latin. They are rarely mixed with each other.
    CyrillicOrGreek,
}

impl Word {
    /// Reads the next character. Returns whether it is a letter of another script than the letter before it in the same word.
    fn changes_script(&mut self, c: char) -> bool {
        if is_space(c) || is_dot(c) || is_separator(c) || c.is_control() {
            self.script = None;
            return false;
        }
        let Some(script) = Script::of(c) else { return false };
        self.script.replace(script).is_some_and(|before| before != script)
    }
}

impl Script {
    /// The script of a letter; None for other characters, and for other scripts. `openapi::schemas` has the same ranges.
    fn of(c: char) -> Option<Script> {
        match c {
            'a'..='z'
            | 'A'..='Z'
            | '\u{aa}'
            | '\u{ba}'
            | '\u{c0}'..='\u{d6}'
            | '\u{d8}'..='\u{f6}'
            | '\u{f8}'..='\u{2af}'
            | '\u{1e00}'..='\u{1eff}'
            | '\u{2c60}'..='\u{2c7f}'
            | '\u{a722}'..='\u{a787}'
            | '\u{a78b}'..='\u{a7ff}'
            | '\u{fb00}'..='\u{fb06}'
            | '\u{ff21}'..='\u{ff3a}'
            | '\u{ff41}'..='\u{ff5a}' => Some(Script::Latin),
            '\u{370}'..='\u{373}'
            | '\u{376}'..='\u{37d}'
            | '\u{37f}'
            | '\u{386}'
            | '\u{388}'..='\u{52f}'
            | '\u{1c80}'..='\u{1c8f}'
            | '\u{1f00}'..='\u{1fff}'
            | '\u{2de0}'..='\u{2dff}'
            | '\u{a640}'..='\u{a69f}' => Some(Script::CyrillicOrGreek),
            _ => None,
        }
    }
}

/// Whether there is a part of a domain before a dot.
fn ends_label(before: &[char]) -> bool {
    before.last().is_some_and(|c| !is_dot(*c) && !is_separator(*c))
}

/// Whether there is a part of a domain after a dot that is not a number.
fn begins_name(after: &[char]) -> bool {
    let is_part = |c: &char| !is_dot(*c) && !is_separator(*c);
    matches!(after, [first, second, ..] if is_part(first) && is_part(second) && !first.is_ascii_digit())
}

/// Whether the dot is before a number and belongs to four of them.
fn is_in_ip(text: &[char], dot: usize) -> bool {
    let is_part = |c: &&char| c.is_ascii_digit() || is_dot(**c);
    let before = text[..dot].iter().rev().take_while(is_part).filter(|c| is_dot(**c)).count();
    let after = text[dot..].iter().take_while(is_part).filter(|c| is_dot(**c)).count();
    text.get(dot + 1).is_some_and(char::is_ascii_digit) && before + after >= 3
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\u{a0}' | '\u{1680}' | '\u{2000}'..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{3000}')
}

/// Joiners, which some scripts need between letters.
fn is_joiner(c: char) -> bool {
    matches!(c, '\u{200c}' | '\u{200d}')
}

/// Characters without a visible shape, other than spaces and joiners.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// A dot, or a character that the names of domains treat as a dot.
fn is_dot(c: char) -> bool {
    matches!(c, '.' | '\u{3002}' | '\u{ff0e}' | '\u{ff61}')
}

fn is_separator(c: char) -> bool {
    is_space(c) || matches!(c, ',' | ';' | ':' | '!' | '?' | '\'' | '"' | '(' | ')' | '/' | '&' | '-')
}

/// Whether the text contains something like a domain or an IP address: after a dot a digit, or two characters that are neither
/// dots nor separators. So `J.R.R. Tolkien` is none.
fn has_domain(text: &str) -> bool {
    // The characters since the last dot, up to a separator.
    let mut since_dot = None;
    text.chars().any(|c| {
        since_dot = match (c, since_dot) {
            (c, _) if is_dot(c) => Some(0),
            (_, Some(_)) if is_separator(c) => None,
            (_, Some(0)) if !c.is_ascii_digit() => Some(1),
            (_, Some(_)) => Some(2),
            (_, None) => None,
        };
        since_dot == Some(2)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_visible_characters_and_no_address() {
        for good in [
            "Ada",
            " Ada Lovelace ",
            "J.R.R. Tolkien",
            "J. R. R.",
            "Dr. Who",
            "Jean-Luc O'Neill, Jr.",
            "علی\u{200c}رضا",
            "山田 太郎",
            "Ada...",
            "Ada (b. 1815)",
            "Анна Kowalska",
            "Ivan-Иван",
            "Łukasz Ωνάσης",
            "Zoë Ångström",
            "Р2Д2",
        ] {
            assert_eq!(check_name(good, 100), Ok(()), "{good}");
        }
        for bad in [
            "",
            " ",
            "\u{200b}",
            "\u{200d}",
            " \u{200c} ",
            "\u{3000}",
            "Ada\u{202e}evil",
            "Ada\u{2028}Bob",
            "Ada\u{ad}",
            "\u{2800}",
            "Ada\u{e0041}",
            "Ada\n",
            "www.evil.example",
            "see evil.com",
            "EVIL.COM/now",
            "evil\u{3002}com",
            "evil\u{ff0e}com",
            "ada@evil.org",
            "10.0.0.1",
            "x://y",
            "No.1",
            "P\u{430}ypal",
            "P2\u{430}",
            "p\u{200d}\u{430}ypal",
            "Pa\u{301}\u{443}pal",
            "my \u{391}da",
            "\u{ff21}\u{434}",
        ] {
            assert!(check_name(bad, 100).is_err(), "{bad:?}");
        }
        assert!(check_name("P\u{430}ypal", 100).unwrap_err() == NameError::MixedScripts);
    }

    #[test]
    fn an_inert_title_is_readable_and_has_no_link_and_nothing_invisible() {
        for same in ["Rust 2.0 at 18.30", "Dr. Who, J.R.R. Tolkien", ".NET...", "山田 太郎", "3.5 km on 2026.11.18"]
        {
            assert_eq!(inert(same), same);
        }
        for (title, expected) in [
            ("see https://evil.example/now", "see https: //evil. example/now"),
            ("www.evil.com", "www. evil. com"),
            ("ada@evil\u{3002}org", "ada@evil\u{3002} org"),
            ("10.0.0.1", "10. 0. 0. 1"),
            ("Chess\u{202e}sseh\u{200b}C\u{ad}", "ChessssehC"),
            ("\u{200d} a\r\nb", "a  b"),
            ("P\u{430}yp\u{430}l: Αθήνα, Москва, 5 km", "P \u{430} yp \u{430} l: Αθήνα, Москва, 5 km"),
            ("p\u{200d}\u{430}y", "p\u{200d} \u{430} y"),
        ] {
            assert_eq!(inert(title), expected, "{title:?}");
        }
        for title in ["evil\u{200b}.com", "evil.\u{200b}com", "htt\u{ad}ps://x", "EVIL.COM"] {
            let inert = inert(title);
            assert!(!inert.contains("://") && !has_domain(&inert), "{inert}");
        }
    }
}
