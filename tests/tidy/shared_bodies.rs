//! A response with a `SharedBody` is not counted in the memory of responses, so its body must exist once for all of them.

/// The files that send such bodies, and that of the extension itself.
const ALLOWED: [&str; 3] = [
    "crates/http-kit/src/admission/response_budget.rs",
    // The files of the console, which are in the binary.
    "crates/server/src/console.rs",
    // The description of the API, and the files of its pages.
    "crates/server/src/server_routes.rs",
];

pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    if ALLOWED.contains(&path) || !crate::paths::tokens(text).iter().any(|token| token == "SharedBody") {
        return Vec::new();
    }
    vec![format!("{path}: a response without a place in the budget: send it without `SharedBody`, which counts it")]
}

mod samples {
    use super::*;

    #[test]
    fn a_shared_body_is_found_outside_of_the_files_that_have_them() {
        for bad in [
            "use http_kit::admission::response_budget::SharedBody;",
            "fn f() { (Extension(SharedBody), bytes).into_response() }",
        ] {
            assert_eq!(violations("crates/hub/src/http/streams.rs", bad).len(), 1, "{bad}");
            assert_eq!(violations(ALLOWED[1], bad), [""; 0]);
        }
        assert_eq!(violations("crates/hub/src/http/streams.rs", "fn f() { bytes.into_response() }"), [""; 0]);
    }
}
