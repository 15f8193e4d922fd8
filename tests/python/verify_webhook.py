"""A receiver in another language: it verifies signatures with the Standard Webhooks library of PyPI.

Reads `{secrets, stranger, headers, body}` as JSON from standard input. Each of the secrets must verify, and the secret
`stranger` must not.
"""

import json
import sys

from standardwebhooks import Webhook, WebhookVerificationError


def refused(secret, body, headers):
    try:
        Webhook(secret).verify(body, headers)
    except WebhookVerificationError:
        return True
    return False


signed = json.load(sys.stdin)
body, headers = signed["body"], signed["headers"]
for secret in signed["secrets"]:
    assert Webhook(secret).verify(body, headers) == json.loads(body)
    assert refused(secret, body + " ", headers), "a changed body"
    assert refused(secret, body, {**headers, "webhook-id": "msg_other"}), "another id"
assert refused(signed["stranger"], body, headers), "another secret"
print(f"verified with {len(signed['secrets'])} secrets")
