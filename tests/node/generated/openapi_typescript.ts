// Creates a subscriber and posts an event, with the types that openapi-typescript has made of the API description.
import type { components, operations } from "./schema";

declare const process: { env: Record<string, string>; exitCode: number };

type Body<Operation extends { requestBody: { content: { "application/json": unknown } } }> =
  Operation["requestBody"]["content"]["application/json"];

async function post<Response>(path: string, body: unknown): Promise<Response> {
  const headers = { authorization: `Bearer ${process.env.API_KEY}`, "content-type": "application/json" };
  const response = await fetch(process.env.BASE_URL + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!response.ok) {
    throw new Error(await response.text());
  }
  return response.json();
}

async function main() {
  // Only what is required: all fields with defaults are optional.
  const subscriber: Body<operations["createSubscriber"]> = {
    name: process.env.NAME,
    url: "http://127.0.0.1:9/",
    event_types: ["order.*"],
  };
  await post("/hub/v1/subscribers", subscriber);
  const event: Body<operations["postEvent"]> = { event_type: "order.paid", payload: { id: 1 } };
  const accepted = await post<components["schemas"]["AcceptedEvent"]>("/hub/v1/events", event);
  console.log(accepted.event_id);
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
