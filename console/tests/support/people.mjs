import assert from "node:assert/strict";
import { waitFor } from "./wait.mjs";

/** Registers a user, verifies the address with the captured e-mail, and gives the user the role admin. */
export async function registerOperator(world, email) {
  const password = "correct horse battery staple";
  const anyone = (path, body) => fetch(world.pillarbox.url + path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  await anyone("/identity/v1/register", { email, password, name: "Operator" });
  const mail = await waitFor("the e-mail is captured", async () => (await world.api.get(`/admin/v1/mail?to=${email}&status=captured`)).items[0]);
  const token = /token=([\w.-]+)/.exec(mail.text)?.[1] ?? /\b([A-Za-z0-9_-]{30,})\b/.exec(mail.text)?.[1];
  assert.equal((await anyone("/identity/v1/verify", { token })).status, 200);
  await world.pillarbox.command("user", "set-role", email, "admin");
  return { email, password };
}
