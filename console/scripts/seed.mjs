// Fills a server with realistic data for screenshots: tenants, healthy and failing subscribers, events, gatherings,
// projects, mail. The receivers run in this process until it ends.
import { apiClient } from "../tests/support/api.mjs";
import { startReceiver } from "../tests/support/receiver.mjs";
import { waitFor } from "../tests/support/wait.mjs";

const DAY_MS = 86_400_000;

/** Returns the ids that the screenshots open. */
export async function seed(pillarbox, adminKey) {
  const api = apiClient(pillarbox.url, adminKey);
  const acme = apiClient(pillarbox.url, adminKey, { "pillarbox-tenant": "acme" });
  await api.post("/admin/v1/tenants", { name: "acme", display_name: "Acme Inc.", events_per_second_max: 500 });
  await api.post("/admin/v1/tenants", { name: "globex", display_name: "Globex Corporation", subscribers_max: 50 });
  await api.post("/admin/v1/tenants/globex/suspend");
  for (const role of ["ingest", "manage"]) await api.post("/admin/v1/keys", { name: `${role} service`, role, tenant: "acme" });
  await acme.post("/hub/v1/portal-tokens", { access: "read", name: "Support team" });

  const receivers = await seedReceivers();
  const ids = await seedWebhooks(api, receivers);
  await seedWebhooks(acme, receivers);
  ids.gathering = await seedGathering(pillarbox);
  ids.project = await seedProjects(api);
  await seedPeople(pillarbox);
  await api.post("/hub/v1/event-types", {
    name: "order.paid", description: "A customer has paid an order.", examples: [{ id: 17, amount: 4990, currency: "EUR", customer: { name: "Ada Lovelace", city: "Zürich" } }],
    schema: {
      type: "object", required: ["id", "amount", "currency"],
      properties: {
        id: { type: "integer" }, amount: { type: "integer" }, currency: { type: "string" },
        customer: { type: "object", properties: { name: { type: "string" }, city: { type: "string" } } },
      },
    },
  });
  await api.post("/hub/v1/event-types", { name: "order.created", description: "An order was placed.", enforce: false });
  const replay = await api.post("/hub/v1/replays", { subscriber_id: ids.subscriber, from: new Date(Date.now() - DAY_MS).toISOString() });
  return { ...ids, replay: replay.id, stop: () => Promise.all(receivers.map((receiver) => receiver.stop())) };
}

async function seedReceivers() {
  let count = 0;
  return Promise.all([
    startReceiver({ delayMs: 12 }),
    startReceiver({ delayMs: 60, status: () => (++count % 4 === 0 ? 503 : 200) }),
    startReceiver({ status: 422 }),
  ]);
}

async function seedWebhooks(api, [healthy, flaky, broken]) {
  const create = (name, receiver, types, rest = {}) => api.post("/hub/v1/subscribers", { name, url: receiver.url, event_types: types, ...rest });
  const billing = await create("billing", healthy, ["order.*", "invoice.*"]);
  await create("warehouse", flaky, ["order.*"], { retry_backoff_seconds: [2, 5, 30] });
  const crm = await create("crm-sync", broken, ["order.paid", "customer.*"]);
  const paused = await create("data-lake", healthy, ["*"]);
  await api.post(`/hub/v1/subscribers/${paused.id}/pause`);
  const types = ["order.created", "order.paid", "order.shipped", "invoice.sent", "customer.updated"];
  const events = Array.from({ length: 60 }, (_, index) => ({
    event_type: types[index % types.length], ordering_key: `order-${1000 + (index % 12)}`,
    payload: { id: 1000 + index, amount: 1990 + index * 10, currency: "EUR", customer: { name: "Ada Lovelace", city: "Zürich" } },
  }));
  const accepted = await api.post("/hub/v1/events/batch", { events });
  await waitFor("dead letters appear", async () => (await api.get("/hub/v1/dead-letters")).items.length > 5);
  const [letter] = (await api.get("/hub/v1/dead-letters")).items;
  return { subscriber: billing.id, failing: crm.id, event: accepted.event_ids[1], deadLetter: letter.id };
}

async function seedGathering(pillarbox) {
  const token = (number) => pillarbox.command("token", "--user", `0190a000-0000-7000-8000-${String(number).padStart(12, "0")}`);
  const owner = apiClient(pillarbox.url, await token(1));
  const titles = [["Rust meetup", "Zürich", 12], ["PostgreSQL evening", "Basel", 40], ["Board games", "Bern", 6]];
  const created = [];
  for (const [title, city, capacity] of titles) {
    const start = new Date(Date.now() + 9 * DAY_MS);
    const event = await owner.post("/event/v1/events", {
      title, city, category: "tech", capacity, time_zone: "Europe/Zurich",
      start_time: start.toISOString(), end_time: new Date(start.getTime() + 7_200_000).toISOString(),
    });
    await owner.post(`/event/v1/events/${event.id}/publish`);
    created.push(event.id);
  }
  const [gathering] = created;
  const join = async (number) => apiClient(pillarbox.url, await token(number)).post(`/join/v1/events/${gathering}/join`);
  await waitFor("the gathering accepts joins", () => join(2).then(() => true, () => false));
  for (let number = 3; number <= 16; number += 1) await join(number);
  return gathering;
}

async function seedProjects(api) {
  await api.post("/progress/v1/projects", { id: "crawl-42" });
  await api.patch("/progress/v1/projects/crawl-42", { status: "CRAWLING", total: 1200 });
  for (let part = 0; part < 6; part += 1) {
    const items = Array.from({ length: 130 }, (_, index) => ({ id: `page-${part}-${index}`, error: index === 7 }));
    await api.post("/progress/v1/projects/crawl-42/items", { items });
  }
  await api.post("/progress/v1/projects", { id: "import-7" });
  await api.patch("/progress/v1/projects/import-7", { status: "PROCESSING", total: 10 });
  await api.post("/progress/v1/projects/import-7/items", { items: Array.from({ length: 10 }, (_, index) => ({ id: `row-${index}` })) });
  return "crawl-42";
}

/** A registration sends an e-mail, which an installation without a mail server captures. */
async function seedPeople(pillarbox) {
  for (const [name, email] of [["Ada Lovelace", "ada@example.org"], ["Grace Hopper", "grace@example.org"]]) {
    await fetch(`${pillarbox.url}/identity/v1/register`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ email, name, password: "correct horse battery staple" }),
    });
  }
}
