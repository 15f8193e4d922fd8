// Creates a subscriber and posts an event, with the client that @hey-api/openapi-ts has made of the API description.
import { createSubscriber, postEvent } from "./client";
import { client } from "./client/client.gen";

declare const process: { env: Record<string, string>; exitCode: number };

async function main() {
  client.setConfig({ baseUrl: process.env.BASE_URL, auth: process.env.API_KEY });
  const subscriber = { name: process.env.NAME, url: "http://127.0.0.1:9/", event_types: ["order.*"] };
  await createSubscriber({ body: subscriber, throwOnError: true });
  const event = await postEvent({ body: { event_type: "order.paid", payload: { id: 1 } }, throwOnError: true });
  console.log(event.data.event_id);
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
