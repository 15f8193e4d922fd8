// A receiver in another language: it verifies signatures with the Standard Webhooks library of npm.
//
// Reads `{secrets, stranger, headers, body}` as JSON from standard input. Each of the secrets must verify, and the secret
// `stranger` must not.

const assert = require("node:assert");
const fs = require("node:fs");
const { Webhook, WebhookVerificationError } = require("standardwebhooks");

const { secrets, stranger, headers, body } = JSON.parse(fs.readFileSync(0, "utf8"));
const refused = (secret, body, headers) =>
    assert.throws(() => new Webhook(secret).verify(body, headers), WebhookVerificationError);

for (const secret of secrets) {
    assert.deepEqual(new Webhook(secret).verify(body, headers), JSON.parse(body));
    refused(secret, body + " ", headers);
    refused(secret, body, { ...headers, "webhook-id": "msg_other" });
}
refused(stranger, body, headers);
console.log(`verified with ${secrets.length} secrets`);
