//! The templates of e-mails: built in, or from a folder.
//!
//! A template is three files, `<template>.<locale>.subject`, `.txt` and `.html`. HTML is escaped; an unknown variable is an
//! error. All templates are rendered with examples at the start, so that an invalid one stops the start and not an e-mail.
//!
//! A part is rendered within a limit on its steps and its bytes, so that no template occupies a thread or the memory.
//!
//! Invariants: a subject is one line, and no variable contains a line break, so a variable can neither add a header nor
//! pretend to be another part of the text. No error quotes a variable.

mod built_in;
mod folder;
pub(crate) mod notification;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};

use self::built_in::{BUILT_IN, TEMPLATES};
use self::notification::Reader;
use crate::domain::Content;
use crate::domain::delivery_rules::Channel;

/// The locale that every template has.
const LOCALE_DEFAULT: &str = "en";
/// The parts of a template.
const PARTS: [&str; 3] = ["subject", "txt", "html"];
/// The templates that the HTML parts extend: those of all e-mails, and those of notifications.
const LAYOUTS: [&str; 2] = ["layout.html", "notification_layout.html"];
/// The beginning of the names of templates for the notifications of one event type.
const NOTIFICATION_PREFIX: &str = "notification.";
/// The variables that exist in every template, with the values that they are checked with. Other variables exist if the
/// request has them.
const VARIABLES: [(&str, &str); 4] = [
    ("name", "Ada <Lovelace>"),
    ("token", "0123456789abcdef"),
    ("link", "https://example.org/verify?token=0123456789abcdef"),
    ("expires_in_hours", "24"),
];
/// Variables that a request may omit; they are empty then.
const OPTIONAL: [&str; 3] = ["name", "link", "expires_in_hours"];

/// The longest name of a template: an event type has up to 187 characters.
const NAME_BYTES_MAX: usize = 187;
/// The longest subject, in characters; a longer one is cut.
const SUBJECT_CHARS_MAX: usize = 200;
/// The largest text or HTML, in bytes.
const BODY_BYTES_MAX: usize = 256 * 1024;
/// The instructions that rendering a part may take: some milliseconds.
const STEPS_MAX: u64 = 50_000;

pub(crate) struct Templates {
    environment: Environment<'static>,
    /// The locales of each template.
    locales: BTreeMap<String, BTreeSet<String>>,
}

/// Why an e-mail cannot be rendered. The text contains no variable.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RenderError {
    #[error("the template does not exist")]
    UnknownTemplate,
    #[error("{file}, line {line}: {kind}")]
    Failed { file: String, line: usize, kind: String },
    #[error("the variable link is neither empty nor an address that starts with https:// or http://")]
    InvalidLink,
    #[error("{file}: the subject is empty")]
    EmptySubject { file: String },
    #[error("{file}: more than {BODY_BYTES_MAX} bytes, the limit of each part of an e-mail: show less")]
    TooLarge { file: String },
    #[error("{file}: more than {STEPS_MAX} steps, the limit of each part of an e-mail: use fewer or shorter loops")]
    TooManySteps { file: String },
}

/// The values of a template. Their texts must have been passed through [`without_control`].
pub(crate) struct PartValues {
    /// The subject is also the title in an inbox.
    pub(crate) subject: Value,
    pub(crate) body: Value,
}

/// A rendered part, up to its limit: rendering ends with an error there.
#[derive(Default)]
struct BoundedText {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > BODY_BYTES_MAX {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An invalid template: its file, its line if there is one, and what is wrong.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}{}: {detail}", .line.map(|line| format!(", line {line}")).unwrap_or_default())]
pub(crate) struct InvalidTemplate {
    file: String,
    line: Option<usize>,
    detail: String,
}

impl InvalidTemplate {
    fn new(file: impl Into<String>, detail: impl ToString) -> InvalidTemplate {
        InvalidTemplate { file: file.into(), line: None, detail: detail.to_string() }
    }
}

impl Templates {
    /// The built-in templates, replaced and completed by those of `folder`. Fails with the first one that is invalid.
    pub(crate) fn load(folder: Option<&Path>) -> Result<Templates, InvalidTemplate> {
        let mut files: BTreeMap<String, String> =
            BUILT_IN.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned())).collect();
        if let Some(folder) = folder {
            files.extend(folder::read(folder)?);
        }
        let mut templates = Templates { environment: environment(), locales: BTreeMap::new() };
        for (file, source) in files {
            if let Some((template, locale, _)) = parts_of(&file) {
                templates.locales.entry(template.to_owned()).or_default().insert(locale.to_owned());
            }
            let added = templates.environment.add_template_owned(file.clone(), source);
            added.map_err(|error| invalid(&file, &error))?;
        }
        templates.check()?;
        Ok(templates)
    }

    /// Renders a template in the first locale that it has: `pt-BR`, then `pt`, then `en`.
    pub(crate) fn render(
        &self,
        template: &str,
        locale: &str,
        variables: &BTreeMap<String, String>,
    ) -> Result<Content, RenderError> {
        let locale = self.locale_of(template, locale)?;
        let mut values: BTreeMap<String, String> =
            OPTIONAL.iter().map(|name| ((*name).to_owned(), String::new())).collect();
        values.extend(variables.iter().map(|(name, value)| (name.clone(), without_control(value))));
        let link = values.get("link").map(String::as_str).unwrap_or_default();
        if !link.is_empty() && !link.starts_with("https://") && !link.starts_with("http://") {
            return Err(RenderError::InvalidLink);
        }
        let values = Value::from(values);
        self.render_in(template, locale, &PartValues { subject: values.clone(), body: values })
    }

    /// Whether there is such a template.
    pub(crate) fn has(&self, template: &str) -> bool {
        self.locales.contains_key(template)
    }

    /// Renders a template with values of any kind, in the first locale that it has.
    pub(crate) fn render_values(
        &self,
        template: &str,
        locale: &str,
        values: &PartValues,
    ) -> Result<Content, RenderError> {
        let locale = self.locale_of(template, locale)?;
        self.render_in(template, locale, values)
    }

    fn locale_of(&self, template: &str, locale: &str) -> Result<String, RenderError> {
        let locales = self.locales.get(template).ok_or(RenderError::UnknownTemplate)?;
        fallbacks(locale).find(|locale| locales.contains(locale)).ok_or(RenderError::UnknownTemplate)
    }

    fn render_in(&self, template: &str, locale: String, values: &PartValues) -> Result<Content, RenderError> {
        let part = |part: &str| self.render_part(&format!("{template}.{locale}.{part}"), &values.body);
        let subject = self.render_part(&format!("{template}.{locale}.subject"), &values.subject)?;
        let subject = one_line(&subject);
        if subject.is_empty() {
            return Err(RenderError::EmptySubject { file: format!("{template}.{locale}.subject") });
        }
        Ok(Content { subject, text: part("txt")?, html: part("html")?, locale })
    }

    fn render_part(&self, file: &str, values: &Value) -> Result<String, RenderError> {
        let mut text = BoundedText::default();
        let rendered = self.environment.get_template(file);
        let rendered = rendered.and_then(|template| template.render_captured_to(values, &mut text).map(drop));
        rendered.map_err(|error| {
            match innermost(&error).kind() {
                _ if text.is_full => return RenderError::TooLarge { file: file.to_owned() },
                ErrorKind::OutOfFuel => return RenderError::TooManySteps { file: file.to_owned() },
                _ => {}
            }
            let (file, line) = origin(file, &error);
            let kind = innermost(&error).kind();
            let undefined = match kind {
                ErrorKind::UndefinedError => self.undefined_in(&file, line, values),
                _ => None,
            };
            let kind = undefined.map_or_else(|| kind.to_string(), |name| format!("{kind}: {name}"));
            RenderError::Failed { file, line: line.unwrap_or(0), kind }
        })?;
        String::from_utf8(text.bytes).map_err(|_| RenderError::TooLarge { file: file.to_owned() })
    }

    /// The first expression in this line of a template that is undefined with these values; None if there is none, such as one
    /// that uses a variable of a loop. It is a part of the template and contains no value.
    fn undefined_in(&self, file: &str, line: Option<usize>, values: &Value) -> Option<String> {
        let template = self.environment.get_template(file).ok()?;
        let text = template.source().lines().nth(line?.checked_sub(1)?)?;
        let tags = text.split("{{").skip(1).filter_map(|rest| rest.split("}}").next());
        let is_undefined = |expression: &&str| {
            let compiled = self.environment.compile_expression_owned((*expression).to_owned());
            compiled.is_ok_and(|compiled| compiled.eval(values.clone()).map_or(true, |value| value.is_undefined()))
        };
        tags.map(str::trim).find(is_undefined).map(str::to_owned)
    }

    /// Checks that every template is complete, and that those with known variables render with examples.
    fn check(&self) -> Result<(), InvalidTemplate> {
        for (template, locales) in &self.locales {
            if !locales.contains(LOCALE_DEFAULT) {
                let file = format!("{template}.{LOCALE_DEFAULT}.txt");
                return Err(InvalidTemplate::new(file, "is missing: every template needs the locale en"));
            }
            for locale in locales {
                for part in PARTS {
                    let file = format!("{template}.{locale}.{part}");
                    if self.environment.get_template(&file).is_err() {
                        let detail = format!("is missing: a template has the parts {}", PARTS.join(", "));
                        return Err(InvalidTemplate::new(file, detail));
                    }
                }
                // The variables of other templates are not known here.
                if TEMPLATES.contains(&template.as_str()) {
                    self.check_rendering(template, locale)?;
                }
                if template.starts_with(notification::DEFAULT) {
                    self.check_notification(template, locale)?;
                }
            }
        }
        Ok(())
    }

    fn check_rendering(&self, template: &str, locale: &str) -> Result<(), InvalidTemplate> {
        for omitted in [&[][..], &OPTIONAL] {
            let examples = VARIABLES.iter().filter(|(name, _)| !omitted.contains(name));
            let examples: BTreeMap<String, String> =
                examples.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            self.render(template, locale, &examples).map_err(|error| unrenderable(template, error))?;
        }
        for part in PARTS {
            self.check_variables(&format!("{template}.{locale}.{part}"), &VARIABLES.map(|(name, _)| name))?;
        }
        Ok(())
    }

    /// Checks a template of notifications. Only the built-in event types have payloads that are known here.
    fn check_notification(&self, template: &str, locale: &str) -> Result<(), InvalidTemplate> {
        let is_digest = template == notification::DIGEST;
        let known = if is_digest { &notification::DIGEST_VARIABLES[..] } else { &notification::VARIABLES[..] };
        for part in PARTS {
            self.check_variables(&format!("{template}.{locale}.{part}"), known)?;
        }
        let of_template = |event_type: &&str| notification::template_of(event_type) == template;
        let types: Vec<&str> = match template {
            notification::DEFAULT => vec!["any.other"],
            notification::DIGEST => vec![notification::BUILT_IN[0]],
            _ => notification::BUILT_IN.into_iter().filter(of_template).collect(),
        };
        for event_type in types {
            for payload in notification::EXAMPLES {
                let event = notification::example(event_type, payload);
                let reader = Reader { name: "Ada", locale, channel: Channel::Email, unsubscribe_link: "" };
                let rendered = if is_digest {
                    notification::render(self, &event, reader).and_then(|content| {
                        notification::render_digest(self, event_type, &[&content, &content], 0, reader)
                    })
                } else {
                    notification::render(self, &event, reader)
                };
                rendered.map_err(|error| unrenderable(template, error))?;
            }
        }
        Ok(())
    }

    /// Finds unknown variables in branches that no example reaches.
    fn check_variables(&self, file: &str, known: &[&str]) -> Result<(), InvalidTemplate> {
        let Ok(template) = self.environment.get_template(file) else { return Ok(()) };
        let globals: BTreeSet<&str> = self.environment.globals().map(|(name, _)| name).collect();
        let is_known = |name: &str| globals.contains(name) || known.contains(&name);
        let mut unknown: Vec<String> = template.undeclared_variables(false).into_iter().collect();
        unknown.retain(|name| !is_known(name));
        unknown.sort();
        let Some(name) = unknown.first() else { return Ok(()) };
        let line = template.source().lines().position(|line| line.contains(name.as_str())).map(|at| at + 1);
        let known = known.join(", ");
        let detail = format!("the variable {name} does not exist; the variables are {known}");
        Err(InvalidTemplate { file: file.to_owned(), line, detail })
    }
}

/// For an error at the start.
fn unrenderable(template: &str, error: RenderError) -> InvalidTemplate {
    match error {
        RenderError::Failed { file, line, kind } => InvalidTemplate { file, line: Some(line), detail: kind },
        RenderError::EmptySubject { file } => InvalidTemplate::new(file, "the subject is empty"),
        RenderError::TooLarge { ref file } | RenderError::TooManySteps { ref file } => {
            let detail = error.to_string();
            InvalidTemplate::new(file, format!("with an example: {}", detail.trim_start_matches(&format!("{file}: "))))
        }
        RenderError::UnknownTemplate | RenderError::InvalidLink => InvalidTemplate::new(template, error),
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(STEPS_MAX));
    environment
        .set_auto_escape_callback(|file| if file.ends_with(".html") { AutoEscape::Html } else { AutoEscape::None });
    environment
}

/// Splits the name of a file into template, locale and part. None if it is the name of no template.
fn parts_of(file: &str) -> Option<(&str, &str, &str)> {
    let of_type = file.strip_prefix(NOTIFICATION_PREFIX).filter(|rest| rest.split('.').count() == 3);
    let mut parts = of_type.unwrap_or(file).split('.');
    let (template, locale, part) = (parts.next()?, parts.next()?, parts.next()?);
    let is_name = |text: &str, other: char| {
        let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == other;
        (1..=NAME_BYTES_MAX).contains(&text.len()) && text.chars().all(is_valid)
    };
    let is_template = is_name(template, '_') && is_name(locale, '-') && PARTS.contains(&part);
    let template = match of_type {
        Some(_) => &file[..NOTIFICATION_PREFIX.len() + template.len()],
        None => template,
    };
    (is_template && parts.next().is_none()).then_some((template, locale, part))
}

/// The locales to try, in this order: `pt-br`, `pt`, `en`. An invalid locale leads to `en`.
fn fallbacks(locale: &str) -> impl Iterator<Item = String> {
    let locale = locale.replace('_', "-").to_ascii_lowercase();
    let mut tries = vec![locale.clone()];
    tries.extend(locale.rmatch_indices('-').map(|(at, _)| locale[..at].to_owned()));
    tries.push(LOCALE_DEFAULT.to_owned());
    tries.into_iter()
}

/// Replaces line breaks, other control characters, and characters that change the direction of the text, with blanks.
pub(crate) fn without_control(value: &str) -> String {
    let is_control = |c: char| {
        c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    value.chars().map(|c| if is_control(c) { ' ' } else { c }).collect()
}

/// The subject as one line. `=?` begins an encoded word, which a mailbox would decode, also into line breaks.
fn one_line(text: &str) -> String {
    let is_blank = |c: char| c.is_whitespace() || c.is_control();
    let words: Vec<&str> = text.split(is_blank).filter(|word| !word.is_empty()).collect();
    words.join(" ").replace("=?", "= ?").chars().take(SUBJECT_CHARS_MAX).collect()
}

/// The cause of an error in a block or an included file.
fn innermost(error: &minijinja::Error) -> &minijinja::Error {
    let mut innermost = error;
    while matches!(innermost.kind(), ErrorKind::EvalBlock | ErrorKind::BadInclude)
        && let Some(cause) = std::error::Error::source(innermost).and_then(|cause| cause.downcast_ref())
    {
        innermost = cause;
    }
    innermost
}

/// The file and the line of an error.
fn origin(file: &str, error: &minijinja::Error) -> (String, Option<usize>) {
    let error = innermost(error);
    (error.name().unwrap_or(file).to_owned(), error.line())
}

/// For an error at the start. Its detail quotes the template only: there are no variables yet.
fn invalid(file: &str, error: &minijinja::Error) -> InvalidTemplate {
    let (file, line) = origin(file, error);
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    InvalidTemplate { file, line, detail: format!("{}{detail}", error.kind()) }
}

#[cfg(test)]
mod tests;
