//! Rendering: locales, escaping, hostile variables, and invalid templates.

use super::*;

fn variables(values: &[(&str, &str)]) -> BTreeMap<String, String> {
    let examples = VARIABLES.iter().chain(values.iter());
    examples.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn render(values: &[(&str, &str)]) -> Result<Content, RenderError> {
    Templates::load(None).unwrap().render("verification", "en", &variables(values))
}

/// A folder with these files, which is removed after the test.
struct Folder(std::path::PathBuf);

impl Folder {
    fn with(files: &[(&str, &str)]) -> Folder {
        let folder = std::env::temp_dir().join(format!("pillarbox-templates-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&folder).unwrap();
        for (name, source) in files {
            std::fs::write(folder.join(name), source).unwrap();
        }
        Folder(folder)
    }

    fn error(files: &[(&str, &str)]) -> String {
        match Templates::load(Some(&Folder::with(files).0)) {
            Ok(_) => panic!("the templates are accepted"),
            Err(error) => error.to_string(),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn every_built_in_template_renders_with_a_token_or_a_link() {
    let templates = Templates::load(None).unwrap();
    for template in TEMPLATES {
        for locale in ["en", "de"] {
            let with_link = templates.render(template, locale, &variables(&[])).unwrap();
            assert_eq!(with_link.locale, locale);
            let mut token = variables(&[]);
            token.retain(|name, _| name == "token");
            let token = templates.render(template, locale, &token).unwrap();
            if template == "verification" || template == "password_reset" {
                assert!(with_link.text.contains("https://example.org/verify?token=0123456789abcdef"));
                assert!(with_link.html.contains("verify?token=0123456789abcdef"), "{}", with_link.html);
                assert!(token.text.contains("\n0123456789abcdef\n") && token.html.contains(">0123456789abcdef<"));
                assert!(!token.html.contains("example.org"));
            }
        }
    }
}

#[test]
fn a_locale_falls_back_to_its_language_and_then_to_english() {
    let templates = Templates::load(None).unwrap();
    for (requested, found) in [
        ("de", "de"),
        ("de-AT", "de"),
        ("DE_at", "de"),
        ("de-Latn-AT", "de"),
        ("pt-BR", "en"),
        ("", "en"),
        ("../x", "en"),
    ] {
        assert_eq!(templates.render("verification", requested, &variables(&[])).unwrap().locale, found, "{requested}");
    }
    assert_eq!(templates.render("nope", "en", &variables(&[])), Err(RenderError::UnknownTemplate));
}

#[test]
fn variables_can_neither_add_lines_nor_markup() {
    let name = "<img src=x onerror=alert(1)>\r\nBcc: everybody@example.org\u{2028}\u{202e}x";
    let content = render(&[("name", name)]).unwrap();
    assert!(!content.html.contains("<img"), "{}", content.html);
    assert!(content.html.contains("&lt;img src=x onerror=alert(1)&gt;  Bcc:"), "{}", content.html);
    assert!(content.text.starts_with("Hello <img src=x onerror=alert(1)>  Bcc: everybody@example.org  x,\n"));
    let folder = Folder::with(&[("verification.en.subject", "Welcome {{ name }}\n\nand\tmore")]);
    let templates = Templates::load(Some(&folder.0)).unwrap();
    let content = templates.render("verification", "en", &variables(&[("name", "A\r\nBcc: b@example.org")])).unwrap();
    assert_eq!(content.subject, "Welcome A Bcc: b@example.org and more");
    let encoded = templates.render("verification", "en", &variables(&[("name", "=?utf-8?q?A=0D=0ABcc:_b?=")])).unwrap();
    assert_eq!(encoded.subject, "Welcome = ?utf-8?q?A=0D=0ABcc:_b?= and more");
    let long = templates.render("verification", "en", &variables(&[("name", &"x".repeat(10_000))])).unwrap();
    assert_eq!(long.subject.chars().count(), SUBJECT_CHARS_MAX);
}

#[test]
fn a_link_is_an_address_of_the_web_and_a_huge_body_is_refused() {
    for link in ["javascript:alert(1)", "//example.org", "data:text/html,x", " https://example.org"] {
        assert_eq!(render(&[("link", link)]), Err(RenderError::InvalidLink), "{link}");
    }
    let content = render(&[("link", "https://example.org/?a=\"><script>")]).unwrap();
    assert!(!content.html.contains("<script>") && content.html.contains("&quot;"), "{}", content.html);
    let huge = "x".repeat(BODY_BYTES_MAX);
    assert!(matches!(render(&[("name", &huge)]), Err(RenderError::TooLarge { .. })));
}

#[test]
fn an_error_names_the_file_and_the_line_but_no_variable() {
    let files = [
        ("welcome.en.subject", "Hi"),
        ("welcome.en.txt", "Hi\n\n{{ secret.field.field }}"),
        ("welcome.en.html", "{% extends 'layout.html' %}\n{% block content %}\n{{ secret | int }}\n{% endblock %}"),
    ];
    let folder = Folder::with(&files);
    let templates = Templates::load(Some(&folder.0)).unwrap();
    let error = templates.render("welcome", "en", &variables(&[("secret", "hunter2")])).unwrap_err().to_string();
    assert!(error.contains("welcome.en.txt, line 3") && !error.contains("hunter2"), "{error}");
    std::fs::write(folder.0.join("welcome.en.txt"), "Hi").unwrap();
    let templates = Templates::load(Some(&folder.0)).unwrap();
    let error = templates.render("welcome", "en", &variables(&[("secret", "hunter2")])).unwrap_err().to_string();
    assert!(error.contains("welcome.en.html, line 3") && !error.contains("hunter2"), "{error}");
}

#[test]
fn an_invalid_folder_is_refused_with_the_file_and_the_line() {
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);
    let cases: [Case; 8] = [
        (&[("verification.en.html", "<p>\n{{ name")], &["verification.en.html, line 2", "syntax error"]),
        (&[("verification.en.txt", "a\nb\n{{ colour }}")], &["verification.en.txt, line 3", "undefined value"]),
        (
            &[("verification.en.txt", "a\n{% if name == 'x' %}{{ colour }}{% endif %}")],
            &["verification.en.txt, line 2", "colour does not exist", "expires_in_hours"],
        ),
        (&[("verification.fr.txt", "Salut")], &["verification.fr.subject", "missing"]),
        (&[("welcome.fr.txt", "Salut")], &["welcome.en.txt", "missing"]),
        (&[("verification.en.subject", " \n ")], &["verification.en.subject", "empty"]),
        (&[("Verification.en.txt", "a")], &["Verification.en.txt", "is not a template"]),
        (&[("verification.en.txt.bak", "a")], &["verification.en.txt.bak", "is not a template"]),
    ];
    for (files, expected) in cases {
        let error = Folder::error(files);
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    }
    assert!(Templates::load(Some(Path::new("/nowhere"))).is_err());
}

#[test]
fn an_error_names_the_variable_that_is_undefined_and_no_value() {
    let folder = Folder::with(&[
        ("notification.order_paid.en.subject", "Order {{ payload.order }}"),
        (
            "notification.order_paid.en.txt",
            "Hi\n{{ payload.order }} {{ payload.customer.name }} {{ payload.note|upper }}",
        ),
        (
            "notification.order_paid.en.html",
            "{% extends \"layout.html\" %}{% block content %}\n{{ payload.note }}{% endblock %}",
        ),
    ]);
    let templates = Templates::load(Some(&folder.0)).unwrap();
    let error = |payload: &str| {
        let event = notification::example("order.paid", payload);
        let reader = Reader { name: "Ada", locale: "en", channel: Channel::Email, unsubscribe_link: "" };
        notification::render(&templates, &event, reader).map(drop).unwrap_err().to_string()
    };
    let file = "notification.order_paid.en";
    assert_eq!(error(r#"{"total": 5}"#), format!("{file}.subject, line 1: undefined value: payload.order"));
    let customer = format!("{file}.txt, line 2: undefined value: payload.customer.name");
    assert_eq!(error(r#"{"order": "secret"}"#), customer);
    assert_eq!(error(r#"{"order": "secret", "customer": {}}"#), customer);
    let known = r#"{"order": 1, "customer": {"name": "x"}}"#;
    assert_eq!(error(known), format!("{file}.txt, line 2: undefined value: payload.note|upper"));
}

#[test]
fn one_hour_is_not_plural() {
    let text = |locale: &str, hours: &str| {
        let templates = Templates::load(None).unwrap();
        templates.render("password_reset", locale, &variables(&[("expires_in_hours", hours)])).unwrap()
    };
    for (locale, one, many) in [("en", "1 hour,", "24 hours,"), ("de", "1 Stunde lang", "24 Stunden lang")] {
        let (single, several) = (text(locale, "1"), text(locale, "24"));
        assert!(single.text.contains(one) && single.html.contains(one), "{}", single.text);
        assert!(several.text.contains(many) && several.html.contains(many), "{}", several.text);
    }
}

/// A template of an event type whose payload is not known at the start.
fn heavy(text: &str) -> Folder {
    Folder::with(&[
        ("notification.heavy.en.subject", "Heavy"),
        ("notification.heavy.en.txt", text),
        ("notification.heavy.en.html", "<p>Heavy</p>"),
    ])
}

fn render_heavy(text: &str) -> Result<Content, RenderError> {
    let templates = Templates::load(Some(&heavy(text).0)).unwrap();
    let reader = Reader { name: "Ada", locale: "en", channel: Channel::Email, unsubscribe_link: "" };
    notification::render(&templates, &notification::example("heavy", "{}"), reader)
}

#[test]
fn a_template_ends_at_the_limits_of_its_steps_and_its_bytes_which_the_error_names() {
    let file = || "notification.heavy.en.txt".to_owned();
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}";
    let ends = "{% endfor %}{% endfor %}{% endfor %}";
    let silent = render_heavy(&format!("{loops}{{% set x = a %}}{ends}")).unwrap_err();
    assert_eq!(silent, RenderError::TooManySteps { file: file() });
    assert!(silent.to_string().contains("more than 50000 steps"), "{silent}");
    let loud = render_heavy(&format!("{loops}{}{ends}", "x".repeat(1_000))).unwrap_err();
    assert_eq!(loud, RenderError::TooLarge { file: file() });
    assert!(loud.to_string().contains("more than 262144 bytes"), "{loud}");
    assert_eq!(render_heavy("{{ 'x' * 100000000 }}").unwrap_err(), RenderError::TooLarge { file: file() });
    let in_macro = "{% macro m(n) %}{% for a in range(100000) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}";
    assert!(render_heavy(in_macro).is_err());
    let wide = render_heavy("{% for a in range(5000) %}{{ a }} {% endfor %}").unwrap();
    assert!(wide.text.contains("4999"));
}

#[test]
fn a_template_that_exceeds_a_limit_with_an_example_stops_the_start() {
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{{ name }}{% endfor %}{% endfor %}";
    let files = [
        ("verification.en.subject", "Confirm"),
        ("verification.en.txt", loops),
        ("verification.en.html", "<p>{{ token }}</p>"),
    ];
    let error = Folder::error(&files);
    assert!(error.starts_with("verification.en.txt: with an example: more than"), "{error}");
}
