//! The texts of notifications: a template for an event type, or a default that shows the type and the fields of the payload.
//!
//! The files are next to those of e-mails: `notification.<event type, dots as _>.<locale>.subject`, `.txt` and `.html`. The
//! default is `notification`, and `notification_digest` puts many notifications into one e-mail. In-app, the subject is the
//! title, and the plain text the text.
//!
//! Invariant: no value contains a line break or another control character, and HTML is escaped, as in every e-mail.

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use http_kit::shown_text::inert;
use minijinja::value::Serde;
use minijinja::{Value, context};
use serde::Serialize;
use serde_json::Value as Json;
use serde_json::value::RawValue;

use super::{PartValues, RenderError, Templates, without_control};
use crate::domain::Content;
use crate::domain::business_event::{BusinessEvent, Subject};
use crate::domain::delivery_rules::Channel;

/// The template of event types that have none.
pub(crate) const DEFAULT: &str = "notification";
/// The template of many notifications in one e-mail.
pub(crate) const DIGEST: &str = "notification_digest";
/// The variables of all templates of notifications.
pub(crate) const VARIABLES: [&str; 15] = [
    "name",
    "event_type",
    "words",
    "title",
    "when",
    "city",
    "reason",
    "fields",
    "payload",
    "channel",
    "unsubscribe_link",
    "aggregate_type",
    "aggregate_id",
    "subject_type",
    "subject_id",
];
/// The variables of a digest.
pub(crate) const DIGEST_VARIABLES: [&str; 7] =
    ["name", "event_type", "words", "items", "count", "more", "unsubscribe_link"];
/// The default template shows so many fields, and so much of each.
const FIELDS_MAX: usize = 50;
const FIELD_CHARS_MAX: usize = 500;
/// A digest shows so many notifications; of the others it says how many there are.
pub(crate) const DIGEST_ITEMS_MAX: usize = 100;
/// A digest shows notifications while their HTML has so many bytes: half of what an e-mail may have, because the template adds
/// some to each of them.
const DIGEST_BYTES_MAX: usize = 128 * 1024;

/// Who reads the text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) name: &'a str,
    pub(crate) locale: &'a str,
    pub(crate) channel: Channel,
    /// Empty: none.
    pub(crate) unsubscribe_link: &'a str,
}

#[derive(Debug, Serialize)]
struct Field {
    name: String,
    value: String,
}

#[derive(Debug, Serialize)]
struct Item<'a> {
    title: &'a str,
    text: &'a str,
}

/// Returns the name of the template of an event type, such as `notification.join_confirmed`.
pub(crate) fn template_of(event_type: &str) -> String {
    format!("{DEFAULT}.{}", event_type.replace('.', "_").to_ascii_lowercase())
}

/// Renders the text of an event. Fails if its template does not accept the payload.
pub(crate) fn render(templates: &Templates, event: &BusinessEvent, reader: Reader<'_>) -> Result<Content, RenderError> {
    let own = template_of(&event.event_type);
    let template = if templates.has(&own) { own.as_str() } else { DEFAULT };
    templates.render_values(template, reader.locale, &values(event, reader))
}

/// Renders the text of an event for the inbox. If its template fails, the default one is used: the inbox stays readable.
pub(crate) fn render_in_app(
    templates: &Templates,
    event: &BusinessEvent,
    name: &str,
    locale: &str,
) -> (String, String) {
    let reader = Reader { name, locale, channel: Channel::InApp, unsubscribe_link: "" };
    let rendered =
        render(templates, event, reader).or_else(|_| templates.render_values(DEFAULT, locale, &values(event, reader)));
    match rendered {
        Ok(content) => (content.subject, content.text.trim().to_owned()),
        // Only a faulty default template of the operator leads here.
        Err(_) => (words(&event.event_type), String::new()),
    }
}

/// How many of these texts a digest shows: as many as fit.
fn fitting(contents: &[&Content]) -> usize {
    let mut bytes = 0;
    let fits = |content: &&&Content| {
        bytes += html_bytes(&content.subject) + html_bytes(&content.text);
        bytes <= DIGEST_BYTES_MAX
    };
    contents.iter().take(DIGEST_ITEMS_MAX).take_while(fits).count()
}

/// The size of a text in HTML, where some characters are written as `&#x27;` and the like.
fn html_bytes(text: &str) -> usize {
    text.bytes().map(|byte| if matches!(byte, b'<' | b'>' | b'&' | b'"' | b'\'' | b'/') { 6 } else { 1 }).sum()
}

/// Renders one e-mail of many texts of one event type, and of `not_shown` more that are not shown. Fails if not even the first
/// text fits.
pub(crate) fn render_digest(
    templates: &Templates,
    event_type: &str,
    contents: &[&Content],
    not_shown: usize,
    reader: Reader<'_>,
) -> Result<Content, RenderError> {
    let count = contents.len() + not_shown;
    let fitting = fitting(contents);
    if fitting == 0 {
        return Err(RenderError::TooLarge { file: DIGEST.to_owned() });
    }
    let items: Vec<Item<'_>> = contents.iter().take(fitting).map(|content| item(content)).collect();
    // The titles are subjects.
    let values = context! {
        name => without_control(reader.name),
        event_type => event_type,
        words => words(event_type),
        count => count,
        more => count.saturating_sub(fitting),
        items => Value::from(Serde(items)),
        unsubscribe_link => reader.unsubscribe_link,
    };
    // The texts have the language of their template, which may be a fallback: one e-mail has one language.
    let locale = contents.first().map_or(reader.locale, |content| &content.locale);
    templates.render_values(DIGEST, locale, &PartValues { subject: values.clone(), body: values })
}

/// A text of a digest. Most texts begin with their title, which the digest shows above them.
fn item(content: &Content) -> Item<'_> {
    let (title, text) = (content.subject.as_str(), content.text.trim());
    let rest = text.strip_prefix(title).filter(|rest| rest.is_empty() || rest.starts_with(['\r', '\n']));
    Item { title, text: rest.unwrap_or(text).trim() }
}

fn values(event: &BusinessEvent, reader: Reader<'_>) -> PartValues {
    PartValues {
        subject: cleaned_values(event, reader, subject_text),
        body: cleaned_values(event, reader, without_control),
    }
}

/// A value in a subject. Strangers choose titles, which must not pretend to be another part of the subject, nor be links. The
/// built-in templates show titles in quotation marks.
fn subject_text(value: &str) -> String {
    inert(value).replace(['“', '”', '„', '‟', '«', '»'], "'")
}

/// The values, with all texts passed through `clean`.
fn cleaned_values(event: &BusinessEvent, reader: Reader<'_>, clean: fn(&str) -> String) -> Value {
    let payload = match serde_json::from_str(event.payload.get()).unwrap_or(Json::Null) {
        Json::Object(fields) => Json::Object(fields),
        other => serde_json::json!({ "value": other }),
    };
    let payload = cleaned(payload, clean);
    let text = |name: &str| payload.get(name).and_then(Json::as_str).unwrap_or_default().to_owned();
    let (subject_type, subject_id) = event.subject().map(|Subject { kind, id }| (kind, id)).unwrap_or_default();
    context! {
        name => without_control(reader.name),
        event_type => event.event_type.as_str(),
        words => words(&event.event_type),
        title => text("title"),
        when => local_time(&text("start_time"), &text("time_zone")),
        city => text("city"),
        reason => text("reason"),
        fields => Value::from(Serde(fields(&payload))),
        payload => Value::from(Serde(&payload)),
        channel => <&str>::from(reader.channel),
        unsubscribe_link => reader.unsubscribe_link,
        aggregate_type => event.aggregate_type.clone().unwrap_or_default(),
        aggregate_id => event.aggregate_id.map(|id| id.to_string()).unwrap_or_default(),
        subject_type => subject_type,
        subject_id => subject_id,
    }
}

/// The event type as a person reads it: `order.paid` and `ORDER_PAID` are `Order paid`.
pub(crate) fn words(event_type: &str) -> String {
    let text = without_control(event_type).replace(['.', '_'], " ").to_lowercase();
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// A time in its zone, such as `2026-10-17 18:00 (Europe/Berlin)`; in UTC if the zone is unknown, and empty if there is none.
fn local_time(time: &str, zone: &str) -> String {
    let Ok(time) = time.parse::<DateTime<Utc>>() else { return String::new() };
    let zone = zone.parse().unwrap_or(Tz::UTC);
    format!("{} ({zone})", time.with_timezone(&zone).format("%Y-%m-%d %H:%M"))
}

/// The texts, numbers and truth values of the payload.
fn fields(payload: &Json) -> Vec<Field> {
    let scalar = |(name, value): (&String, &Json)| {
        let value = match value {
            Json::String(text) => text.clone(),
            Json::Number(number) => number.to_string(),
            Json::Bool(truth) => truth.to_string(),
            Json::Null | Json::Array(_) | Json::Object(_) => return None,
        };
        let cut = |text: &str| text.chars().take(FIELD_CHARS_MAX).collect();
        Some(Field { name: cut(&words(name)), value: cut(&value) })
    };
    payload.as_object().into_iter().flatten().filter_map(scalar).take(FIELDS_MAX).collect()
}

/// The same value with cleaned texts and names.
fn cleaned(value: Json, clean: fn(&str) -> String) -> Json {
    match value {
        Json::String(text) => Json::String(clean(&text)),
        Json::Array(items) => Json::Array(items.into_iter().map(|item| cleaned(item, clean)).collect()),
        Json::Object(fields) => {
            let field = |(name, value): (String, Json)| (without_control(&name), cleaned(value, clean));
            Json::Object(fields.into_iter().map(field).collect())
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => value,
    }
}

/// An event with which the templates of the event types in [`BUILT_IN`] are checked at the start.
pub(crate) fn example(event_type: &str, payload: &str) -> BusinessEvent {
    BusinessEvent {
        id: uuid::Uuid::nil(),
        event_type: event_type.to_owned(),
        aggregate_type: None,
        aggregate_id: None,
        payload: RawValue::from_string(payload.to_owned()).unwrap_or_else(|_| RawValue::NULL.to_owned()),
        at: DateTime::UNIX_EPOCH,
    }
}

/// The event types whose templates are built in. They are the ones that Pillarbox itself sends.
pub(crate) const BUILT_IN: [&str; 9] = [
    contracts::joins::CONFIRMED,
    contracts::joins::CANCELED,
    contracts::joins::WAITLISTED,
    contracts::joins::PROMOTED,
    contracts::joins::EXPIRED,
    contracts::joins::KICKED,
    contracts::joins::BANNED,
    contracts::events::CANCELED,
    contracts::events::UPDATED,
];

/// Payloads with which the built-in templates are checked: all fields, and none.
pub(crate) const EXAMPLES: [&str; 2] = [
    r#"{"title": "Rust <meetup>", "city": "Berlin", "start_time": "2026-10-17T16:00:00Z", "time_zone": "Europe/Berlin",
        "reason": "The venue is closed."}"#,
    "{}",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(locale: &str) -> Reader<'_> {
        let unsubscribe_link = "https://example.org/notify/v1/unsubscribe?token=x";
        Reader { name: "Ada", locale, channel: Channel::Email, unsubscribe_link }
    }

    #[test]
    fn built_in_texts_name_the_event_its_local_time_its_city_and_the_reason_in_both_languages() {
        let templates = Templates::load(None).unwrap();
        for event_type in BUILT_IN {
            for locale in ["en", "de"] {
                let content = render(&templates, &example(event_type, EXAMPLES[0]), reader(locale)).unwrap();
                assert_eq!(content.locale, locale);
                assert!(content.subject.contains("Rust <meetup>"), "{event_type}: {}", content.subject);
                let html = content.html.replace("&#x2f;", "/");
                let link = reader(locale).unsubscribe_link;
                for part in ["2026-10-17 18:00 (Europe/Berlin)", "Berlin", "The venue is closed.", link] {
                    assert!(content.text.contains(part) && html.contains(part), "{event_type}: {content:?}");
                }
                assert!(content.html.contains("Rust &lt;meetup&gt;") && !content.html.contains("<meetup>"));
                let (title, text) = render_in_app(&templates, &example(event_type, "{}"), "Ada", locale);
                assert!(!title.is_empty() && !text.contains("unsubscribe") && !text.contains('{'), "{title}: {text}");
            }
        }
    }

    #[test]
    fn a_title_in_a_subject_is_quoted_and_neither_a_link_nor_a_quotation_mark() {
        let templates = Templates::load(None).unwrap();
        let payload =
            r#"{"title": "Chess\u201d: your account was locked, see https://evil.example \u202e", "reason": "2.0"}"#;
        for event_type in BUILT_IN {
            for (locale, title) in [
                ("en", "event “Chess': your account was locked, see https: //evil. example ”"),
                ("de", "Veranstaltung „Chess': your account was locked, see https: //evil. example “"),
            ] {
                let content = render(&templates, &example(event_type, payload), reader(locale)).unwrap();
                assert!(content.subject.ends_with(title), "{event_type}: {}", content.subject);
                assert!(content.text.contains("https://evil.example"), "the text is not changed: {}", content.text);
            }
        }
    }

    #[test]
    fn the_default_shows_the_type_in_words_and_the_scalar_fields_escaped_and_on_one_line() {
        let templates = Templates::load(None).unwrap();
        let payload = r#"{"order_id": 7, "note": "<b>\r\nBcc: x\u0000", "paid": true, "lines": [1], "none": null}"#;
        let content = render(&templates, &example("ORDER.PAID_late", payload), reader("en")).unwrap();
        assert_eq!(content.subject, "Order paid late");
        assert!(content.text.starts_with("Order paid late\n"), "{}", content.text);
        for line in ["Note: <b>  Bcc: x ", "Order id: 7", "Paid: true"] {
            assert!(content.text.lines().any(|other| other == line), "{line}: {}", content.text);
        }
        assert!(content.html.contains("&lt;b&gt;") && !content.html.contains("<b>"), "{}", content.html);
        assert!(!content.text.contains("Lines") && !content.text.contains("None"));
        for odd in ["[1]", "7", "null", "\"x\"", "no json"] {
            render(&templates, &example("x", odd), reader("pt-BR")).unwrap();
        }
    }

    #[test]
    fn a_digest_shows_every_text_once_and_counts_those_beyond_its_limit() {
        let templates = Templates::load(None).unwrap();
        let content = |number: usize| {
            let payload = format!(r#"{{"title": "No <{number}>"}}"#);
            render(&templates, &example("join.promoted", &payload), reader("de")).unwrap()
        };
        let contents: Vec<Content> = (0..DIGEST_ITEMS_MAX + 3).map(content).collect();
        let contents: Vec<&Content> = contents.iter().collect();
        let digest = render_digest(&templates, "join.promoted", &contents, 0, reader("de")).unwrap();
        let subject = format!("{} Benachrichtigungen: {}", DIGEST_ITEMS_MAX + 3, contents[0].subject);
        assert_eq!(digest.subject, subject);
        assert!(digest.text.contains("No <0>") && digest.text.contains("No <99>") && !digest.text.contains("No <100>"));
        assert!(digest.text.contains("3 weitere") && digest.html.contains("3 weitere"));
        assert!(digest.html.contains("No &lt;99&gt;") && !digest.html.contains("No <99>"));
        assert_eq!(digest.text.matches("----").count(), DIGEST_ITEMS_MAX, "between texts, and before the last line");
    }

    #[test]
    fn a_digest_shows_each_title_once_in_one_language_and_separates_texts_only() {
        let templates = Templates::load(None).unwrap();
        let of_order = |number: usize, locale: &str| {
            let payload = format!(r#"{{"order": {number}}}"#);
            render(&templates, &example("order.paid", &payload), Reader { unsubscribe_link: "", ..reader(locale) })
                .unwrap()
        };
        let (first, second) = (of_order(1, "de"), of_order(2, "de"));
        let digest = render_digest(&templates, "order.paid", &[&first, &second], 0, reader("de")).unwrap();
        let link = reader("de").unsubscribe_link;
        let expected = format!(
            "Order paid\n\nOrder: 1\n\n----\n\nOrder paid\n\nOrder: 2\n\nUm keine solchen E-Mails mehr zu erhalten, öffnen Sie:\n{link}"
        );
        assert_eq!(digest.text.trim(), expected);
        assert_eq!((digest.html.matches("<hr>").count(), digest.html.matches("Order paid").count()), (1, 2));
        // The texts have no German template, so neither has the digest: an e-mail has one language.
        let (first, second) = (of_order(1, "en"), of_order(2, "en"));
        let digest = render_digest(&templates, "order.paid", &[&first, &second], 0, reader("de")).unwrap();
        assert!(digest.locale == "en" && digest.text.contains("To get no more"), "{digest:?}");
        // The event type is in no language: the title of a German text is.
        let own = render(&templates, &example("join.promoted", EXAMPLES[0]), reader("de")).unwrap();
        let digest = render_digest(&templates, "join.promoted", &[&own, &own], 0, reader("de")).unwrap();
        assert_eq!(digest.subject, format!("2 Benachrichtigungen: {}", own.subject));
    }

    #[test]
    fn texts_can_link_to_the_event_or_the_aggregate() {
        let of = |event: &BusinessEvent| {
            let values = values(event, reader("en")).body;
            ["subject_type", "subject_id"].map(|name| values.get_attr(name).unwrap().to_string())
        };
        let id = "0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11";
        let own = example("join.promoted", &format!(r#"{{"event_id": "{id}"}}"#));
        assert_eq!(of(&own), ["event", id]);
        let business = BusinessEvent { aggregate_type: Some("AGENCY".into()), aggregate_id: Some(7), ..own };
        assert_eq!(of(&business), ["AGENCY", "7"]);
        assert_eq!(of(&example("join.promoted", "{}")), ["", ""]);
    }
}
