//! What a caller wants an event to be: each field checked, and every one that is wrong named.

use chrono::{DateTime, SubsecRound, Utc};
use kit::field::{Field, Settling, Wrong, each, one, printable};
use kit::problem::FieldError;
use serde::Deserialize;
use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use crate::domain::{Details, Name};

const TITLE_CHARS_MAX: usize = 200;
const DESCRIPTION_CHARS_MAX: usize = 10_000;
pub(crate) const CITY_CHARS_MAX: usize = 100;
pub(crate) const CATEGORY_CHARS_MAX: usize = 50;
const CAPACITY_MAX: i64 = 1_000_000;
const COVERS_MAX: usize = 10;
const COVER_CHARS_MAX: usize = 200;

/// Absent is unchanged, or the default of a new event; null is the default.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = EventFields)]
pub(crate) struct Fields {
    #[serde(default)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 200, example = "Rust meetup")]
    title: Field<String>,
    #[serde(default)]
    #[schema(value_type = Option<String>, max_length = 10000, default = "")]
    description: Field<String>,
    #[serde(default)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 100, example = "Zürich")]
    city: Field<String>,
    #[serde(default)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 50, example = "tech")]
    category: Field<String>,
    #[serde(default)]
    #[schema(value_type = Option<DateTime<Utc>>, example = "2027-03-01T18:00:00+01:00")]
    start_time: Field<DateTime<Utc>>,
    /// After `start_time`.
    #[serde(default)]
    #[schema(value_type = Option<DateTime<Utc>>, example = "2027-03-01T21:00:00+01:00")]
    end_time: Field<DateTime<Utc>>,
    /// Where its times are read, by IANA name.
    #[serde(default)]
    #[schema(value_type = Option<String>, example = "Europe/Zurich")]
    time_zone: Field<String>,
    /// 0 is unlimited.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 1000000, default = 0)]
    capacity: Field<i64>,
    /// Ids of images that are kept elsewhere, the cover first.
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>, max_items = 10, default = json!([]))]
    cover_image_ids: Field<Vec<String>>,
}

/// [`Fields`], some of them required.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct NewFields(pub(crate) Fields);

impl Fields {
    /// The details as they are to be; `old` is None for a new event.
    pub(crate) fn settle(self, old: Option<&Details>) -> Result<Details, Vec<FieldError>> {
        let mut to = Settling::of(old);
        let title = to.be("/title", self.title, |old| old.title.clone(), None, |text| line(&text, TITLE_CHARS_MAX));
        let description =
            to.be("/description", self.description, |old| old.description.clone(), Some(String::new()), description);
        let city = to.be("/city", self.city, |old| old.city.clone(), None, |text| name(&text, CITY_CHARS_MAX));
        let category =
            to.be("/category", self.category, |old| old.category.clone(), None, |text| name(&text, CATEGORY_CHARS_MAX));
        let start_time = to.be("/start_time", self.start_time, |old| old.start_time, None, instant);
        let end_is_given = matches!(self.end_time, Field::Given(_));
        let end_time = to.be("/end_time", self.end_time, |old| old.end_time, None, instant);
        let time_zone = to.be("/time_zone", self.time_zone, |old| old.time_zone.clone(), None, zone);
        let capacity = to.be("/capacity", self.capacity, |old| old.capacity, Some(0), capacity);
        let covers = to.be(
            "/cover_image_ids",
            self.cover_image_ids,
            |old| old.cover_image_ids.clone(),
            Some(Vec::new()),
            cover_image_ids,
        );
        let mut wrong = to.into_wrong();
        if let (Some(start), Some(end)) = (start_time, end_time)
            && end <= start
        {
            let (pointer, detail) = match end_is_given {
                true => ("/end_time", "takes a time after start_time"),
                false => ("/start_time", "takes a time before end_time"),
            };
            wrong.push(FieldError::body(pointer, detail));
        }
        let all = || {
            Some(Details {
                title: title?,
                description: description?,
                city: city?,
                category: category?,
                start_time: start_time?,
                end_time: end_time?,
                time_zone: time_zone?,
                capacity: capacity?,
                cover_image_ids: covers?,
            })
        };
        all().filter(|_| wrong.is_empty()).ok_or(wrong)
    }
}

/// Without accents and case, and with single blanks: what people mean when they type it in any way.
pub(crate) fn folded(text: &str) -> String {
    let plain = text.nfkd().filter(|letter| !is_combining_mark(*letter)).flat_map(char::to_lowercase);
    // These have no accent to take away, and yet people leave it out.
    let plain: String = plain
        .map(|letter| match letter {
            'ø' => 'o',
            'đ' | 'ð' => 'd',
            'ł' => 'l',
            'ı' => 'i',
            other => other,
        })
        .collect();
    let plain = plain.replace('ß', "ss").replace('æ', "ae").replace('œ', "oe").replace('þ', "th");
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn line(text: &str, chars_max: usize) -> Result<String, Wrong> {
    printable(text, chars_max).map_err(one)?;
    Ok(text.trim().to_owned())
}

fn name(text: &str, chars_max: usize) -> Result<Name, Wrong> {
    let spelled = line(text, chars_max)?;
    let folded = folded(&spelled);
    match folded.is_empty() {
        true => Err(one("takes at least one letter or digit")),
        false => Ok(Name { spelled, folded }),
    }
}

fn description(text: String) -> Result<String, Wrong> {
    let acts = |letter: char| letter.is_control() && !matches!(letter, '\n' | '\r' | '\t');
    match text.chars().count() <= DESCRIPTION_CHARS_MAX && !text.chars().any(acts) {
        true => Ok(text),
        false => Err(one(format!(
            "takes up to {DESCRIPTION_CHARS_MAX} characters, and no control characters but line ends and tabs"
        ))),
    }
}

/// Microseconds, as PostgreSQL keeps them, of a year with four digits.
fn instant(time: DateTime<Utc>) -> Result<DateTime<Utc>, Wrong> {
    kit::instant::check(time).map(|time| time.trunc_subsecs(6)).map_err(one)
}

fn zone(name: String) -> Result<String, Wrong> {
    match name.parse::<chrono_tz::Tz>() {
        Ok(zone) => Ok(zone.name().to_owned()),
        Err(_) => Err(one("takes the IANA name of a time zone, such as Europe/Zurich")),
    }
}

fn capacity(number: i64) -> Result<i32, Wrong> {
    let fits = i32::try_from(number).ok().filter(|_| (0..=CAPACITY_MAX).contains(&number));
    fits.ok_or_else(|| one(format!("takes a number from 0, which is unlimited, to {CAPACITY_MAX}")))
}

fn cover_image_ids(ids: Vec<String>) -> Result<Vec<String>, Wrong> {
    if ids.len() > COVERS_MAX {
        return Err(one(format!("takes at most {COVERS_MAX} ids")));
    }
    each(ids, |id| printable(&id, COVER_CHARS_MAX).map(|()| id))
}

impl PartialSchema for NewFields {
    fn schema() -> RefOr<Schema> {
        let mut schema = Fields::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            let required = ["title", "city", "category", "start_time", "end_time", "time_zone"];
            object.required = required.map(str::to_owned).to_vec();
        }
        schema
    }
}

impl ToSchema for NewFields {
    fn name() -> std::borrow::Cow<'static, str> {
        "NewEvent".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Fields::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_city_is_the_same_however_it_is_typed() {
        for (typed, meant) in [
            ("Zürich", "zurich"),
            ("  SÃO   Paulo ", "sao paulo"),
            ("Łódź", "lodz"),
            ("København", "kobenhavn"),
            ("Gießen", "giessen"),
            ("Zu\u{308}rich", "zurich"),
            ("İstanbul", "istanbul"),
            ("東京", "東京"),
            ("Київ", "киів"),
        ] {
            assert_eq!(folded(typed), meant, "{typed}");
            assert_eq!(folded(&folded(typed)), meant, "folding again changes nothing");
        }
    }
}
