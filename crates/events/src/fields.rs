//! The fields of a request that creates or changes an event. Every invalid field is reported.

use chrono::{DateTime, SubsecRound, Utc};
use http_kit::field::{Field, FieldChecks, FieldErrors, Whole, check_each, error, printable};
use http_kit::problem::FieldError;
use serde::Deserialize;
use serde_json::json;
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

/// An absent field stays unchanged, or has its default in a new event. Null sets the default.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = GatheringFields, example = json!({"title": "Rust meetup", "capacity": 50}))]
pub(crate) struct Fields {
    #[serde(default)]
    #[schema(value_type = String, format = "line", max_length = 200, example = "Rust meetup")]
    title: Field<String>,
    #[serde(default)]
    #[schema(value_type = Option<String>, pattern = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$", max_length = 10000, default = "")]
    description: Field<String>,
    #[serde(default)]
    #[schema(value_type = String, format = "line", max_length = 100, example = "Zürich")]
    city: Field<String>,
    #[serde(default)]
    #[schema(value_type = String, format = "line", max_length = 50, example = "tech")]
    category: Field<String>,
    #[serde(default)]
    #[schema(value_type = DateTime<Utc>, example = "2035-03-01T18:00:00+01:00")]
    start_time: Field<DateTime<Utc>>,
    /// Must be after `start_time`.
    #[serde(default)]
    #[schema(value_type = DateTime<Utc>, example = "2035-03-01T21:00:00+01:00")]
    end_time: Field<DateTime<Utc>>,
    /// IANA name of the time zone in which the times are displayed.
    #[serde(default)]
    #[schema(value_type = String, pattern = "^[A-Za-z0-9_+/-]+$", example = "Europe/Zurich")]
    time_zone: Field<String>,
    /// 0 means unlimited.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 1000000, default = 0)]
    capacity: Field<Whole>,
    /// Ids of images that another service stores; the first is the cover.
    #[serde(default)]
    #[schema(value_type = Option<Vec<CoverImageId>>, max_items = 10, default = json!([]))]
    cover_image_ids: Field<Vec<String>>,
}

/// The id of an image.
#[derive(ToSchema)]
#[schema(value_type = String, format = "line", max_length = 200)]
#[expect(dead_code, reason = "it only describes the items of a list")]
struct CoverImageId(String);

/// The [`Fields`] of a new event. Some of them are required.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct NewFields(pub(crate) Fields);

impl Fields {
    /// Checks the fields and merges them with `old`, which is None for a new event. Fails with every invalid field.
    pub(crate) fn into_details(self, old: Option<&Details>) -> Result<Details, Vec<FieldError>> {
        let mut checks = FieldChecks::new(old);
        let title =
            checks.check("/title", self.title, |old| old.title.clone(), None, |text| line(&text, TITLE_CHARS_MAX));
        let description = checks.check(
            "/description",
            self.description,
            |old| old.description.clone(),
            Some(String::new()),
            description,
        );
        let city = checks.check("/city", self.city, |old| old.city.clone(), None, |text| name(&text, CITY_CHARS_MAX));
        let category = checks.check(
            "/category",
            self.category,
            |old| old.category.clone(),
            None,
            |text| name(&text, CATEGORY_CHARS_MAX),
        );
        let start_time = checks.check("/start_time", self.start_time, |old| old.start_time, None, instant);
        let end_is_given = matches!(self.end_time, Field::Given(_));
        let end_time = checks.check("/end_time", self.end_time, |old| old.end_time, None, instant);
        let time_zone = checks.check("/time_zone", self.time_zone, |old| old.time_zone.clone(), None, zone);
        let capacity = checks.check("/capacity", self.capacity, |old| old.capacity, Some(0), capacity);
        let covers = checks.check(
            "/cover_image_ids",
            self.cover_image_ids,
            |old| old.cover_image_ids.clone(),
            Some(Vec::new()),
            cover_image_ids,
        );
        let mut errors = checks.into_errors();
        if let (Some(start), Some(end)) = (start_time, end_time)
            && end <= start
        {
            let (pointer, detail) = if end_is_given {
                ("/end_time", "must be after start_time")
            } else {
                ("/start_time", "must be before end_time")
            };
            errors.push(FieldError::body(pointer, detail));
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
        all().filter(|_| errors.is_empty()).ok_or(errors)
    }
}

/// Normalizes a name for comparisons: without accents, in lower case, with single spaces.
pub(crate) fn normalized(text: &str) -> String {
    let plain = text.nfkd().filter(|letter| !is_combining_mark(*letter)).flat_map(char::to_lowercase);
    // Unicode does not decompose these letters, but they are often typed as plain ones.
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

fn line(text: &str, chars_max: usize) -> Result<String, FieldErrors> {
    printable(text, chars_max).map_err(error)?;
    Ok(text.trim().to_owned())
}

fn name(text: &str, chars_max: usize) -> Result<Name, FieldErrors> {
    let spelled = line(text, chars_max)?;
    let normalized = normalized(&spelled);
    if normalized.is_empty() {
        Err(error("must contain at least one letter or digit"))
    } else {
        Ok(Name { spelled, normalized })
    }
}

fn description(text: String) -> Result<String, FieldErrors> {
    let is_forbidden = |letter: char| letter.is_control() && !matches!(letter, '\n' | '\r' | '\t');
    if text.chars().count() <= DESCRIPTION_CHARS_MAX && !text.chars().any(is_forbidden) {
        Ok(text)
    } else {
        Err(error(format!(
            "must have at most {DESCRIPTION_CHARS_MAX} characters and no control characters except line breaks and tabs"
        )))
    }
}

/// Truncates to microseconds, which PostgreSQL stores. Fails if the year is out of range.
fn instant(time: DateTime<Utc>) -> Result<DateTime<Utc>, FieldErrors> {
    http_kit::instant::check(time).map(|time| time.trunc_subsecs(6)).map_err(error)
}

fn zone(name: String) -> Result<String, FieldErrors> {
    match name.parse::<chrono_tz::Tz>() {
        Ok(zone) => Ok(zone.name().to_owned()),
        Err(_) => Err(error("must be the IANA name of a time zone, such as Europe/Zurich")),
    }
}

fn capacity(Whole(number): Whole) -> Result<i32, FieldErrors> {
    let fits = i32::try_from(number).ok().filter(|_| (0..=CAPACITY_MAX).contains(&number));
    fits.ok_or_else(|| error(format!("must be a number from 0 (unlimited) to {CAPACITY_MAX}")))
}

fn cover_image_ids(ids: Vec<String>) -> Result<Vec<String>, FieldErrors> {
    if ids.len() > COVERS_MAX {
        return Err(error(format!("must contain at most {COVERS_MAX} ids")));
    }
    check_each(ids, |id| printable(&id, COVER_CHARS_MAX).map(|()| id))
}

impl PartialSchema for NewFields {
    fn schema() -> RefOr<Schema> {
        let mut schema = Fields::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            let required = ["title", "city", "category", "start_time", "end_time", "time_zone"];
            object.required = required.map(str::to_owned).to_vec();
            object.example = Some(json!({
                "title": "Rust meetup",
                "city": "Zürich",
                "category": "tech",
                "start_time": "2035-03-01T18:00:00+01:00",
                "end_time": "2035-03-01T21:00:00+01:00",
                "time_zone": "Europe/Zurich",
                "capacity": 50,
            }));
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
    fn spellings_of_a_city_normalize_to_the_same_name() {
        for (typed, expected) in [
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
            assert_eq!(normalized(typed), expected, "{typed}");
            assert_eq!(normalized(&normalized(typed)), expected, "normalizing is idempotent");
        }
    }
}
