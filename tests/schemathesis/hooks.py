"""Hooks of schemathesis: two checks of our own, and values that JSON Schema cannot describe."""

import re
import uuid

import schemathesis

# A port on which nothing listens: test deliveries must not leave this machine.
RECEIVER = "http://127.0.0.1:9/webhooks"
# Times that are valid together: `to` is after `from`, an end is after a start, an expiry is in the future.
TIMES = {
    "from": "2026-01-01T00:00:00Z",
    "to": "2026-01-02T00:00:00Z",
    "start_time": "2035-03-01T18:00:00Z",
    "end_time": "2035-03-01T21:00:00Z",
    "expires_at": "2090-01-01T00:00:00Z",
}
KEYS = ("idempotency-key", "x-idempotency-key")
TAGS = ("if-match", "if-none-match")
# What the parsers of Rust say, which a caller must never see.
PARSER_WORDS = (
    "premature end of input",
    "trailing input",
    "trailing characters",
    "UUID parsing",
    "expected a sequence",
    "expected struct",
    "EOF while parsing",
    "invalid type",
    "invalid value",
    "invalid digit",
    "missing field",
    "unknown field",
    "unknown variant",
    "did not match any variant",
    "target type",
    "relative URL",
    "at line ",
    "`i64`",
    "`u32`",
)


@schemathesis.hook
def before_call(context, case, kwargs):
    """Makes a request valid that is valid by its schema alone."""
    # Deliveries must not leave this machine, whatever the request is meant to test.
    if isinstance(case.body, dict) and str(case.body.get("url", "")).lower().startswith("http"):
        case.body["url"] = RECEIVER
    if isinstance(case.body, dict) and isinstance(case.body.get("auth"), dict) and "token_url" in case.body["auth"]:
        if str(case.body["auth"]["token_url"]).lower().startswith("http"):
            case.body["auth"]["token_url"] = RECEIVER
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.headers:
        repair_headers(case.headers)
    if case.query:
        repair_query(case.query)
    if isinstance(case.body, dict):
        repair_body(case.body)
    # A cursor of a stream can also be made by the server only. Another operation may have created the stream since.
    if case.operation.path.endswith("/acknowledge"):
        case.path_parameters["name"] = f"missing-{uuid.uuid4()}"


def repair_headers(headers):
    for name in KEYS:
        # The generator repeats its values, and another request with the same key is refused.
        if name in headers:
            headers[name] = str(uuid.uuid4())
    for name in TAGS:
        # The generator has its own values for these headers, whatever their pattern is; a tag needs quotes.
        if name in headers and not re.fullmatch(r'(W/)?"[!-~]*"', headers[name]):
            headers[name] = '"1"'


def repair_query(query):
    # Only the server can make a cursor.
    query.pop("cursor", None)
    query.pop("after", None)
    # An order by relevance needs words, and trending events cannot be searched.
    if "sort" in query:
        query["sort"] = "relevance" if "q" in query else "trending"


def repair_body(body):
    body.pop("acknowledge", None)
    # A consumer is reset to a time, or to the position of another one.
    if body.get("like") is not None:
        body.pop("from", None)
    for name, time in TIMES.items():
        if isinstance(body.get(name), str):
            body[name] = time
    if isinstance(body.get("time_zone"), str):
        body["time_zone"] = "Europe/Zurich"
    if isinstance(body.get("quiet_hours"), dict):
        body["quiet_hours"] = {"time_zone": "Europe/Zurich", "from": "22:00", "until": "07:00"}
    # An address is unlike any text that its pattern alone describes, and common passwords are refused.
    if isinstance(body.get("email"), str):
        body["email"] = "somebody@example.org"
    for name in ("password", "current_password", "new_password"):
        if isinstance(body.get(name), str):
            body[name] = "a password for tests"
    # Each type of credentials has separate fields; a certificate is unlike any text that a schema describes.
    if isinstance(body.get("auth"), dict):
        secret = {"client_id": "hub", "client_secret": "a secret for tests"}
        body["auth"] = {"type": "oauth2", "token_url": RECEIVER, **secret}
        headers = body.get("headers")
        if isinstance(headers, dict):
            body["headers"] = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    # Either of two fields, not both.
    if isinstance(body.get("retry_schedule"), str):
        body.pop("retry_backoff_seconds", None)
    if isinstance(body.get("retry_rules"), dict):
        # Only a single 4xx status can disable a subscriber.
        for status, rule in body["retry_rules"].items():
            if rule == "disable" and not re.fullmatch("4[0-9]{2}", status):
                body["retry_rules"][status] = "retry"
    # A secret is base64 of some length, and determines the kind of its signature.
    if isinstance(body.get("secret"), str):
        body["secret"] = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
        body.pop("signature", None)


@schemathesis.check
def problem_is_documented(context, response, case):
    """Every problem that an operation returns has an example in its description, under the name of its type."""
    problem = problem_of(response)
    if problem is None or response.status_code == 405:
        return
    content = case.operation.definition.raw["responses"][str(response.status_code)]["content"]
    kind = problem["type"].removeprefix("urn:pillarbox:problem:")
    examples = content["application/problem+json"].get("examples", {})
    assert kind in examples, f"{response.status_code} {kind} has no example: {sorted(examples)}"


@schemathesis.check
def problem_is_understandable(context, response, case):
    """A problem names the invalid part of the request and what it accepts, not what a parser said."""
    problem = problem_of(response)
    if problem is None:
        return
    texts = [problem["detail"], *(error["detail"] for error in problem.get("errors", []))]
    for text in texts:
        found = [words for words in PARSER_WORDS if words in text]
        assert not found, f"{found} in {text!r}"
    kind = problem["type"].rsplit(":", 1)[1]
    if kind.startswith("malformed-") or kind == "validation-failed":
        assert problem.get("errors"), f"{kind} does not name the invalid part: {problem['detail']!r}"


def problem_of(response):
    content_type = (response.headers.get("content-type") or [""])[0]
    return response.json() if content_type == "application/problem+json" else None
