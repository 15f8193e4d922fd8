// Server-sent events over `fetch`, because an EventSource cannot send the `Authorization` header.
import { requestHeaders, send } from "./client";

export interface ServerEvent {
  name: string;
  id: string;
  data: string;
}

/** Calls `onEvent` for each event until the stream ends or `signal` is aborted. Fails with an `ApiError` otherwise. */
export async function readStream(path: string, signal: AbortSignal, onEvent: (event: ServerEvent) => void): Promise<void> {
  const headers = await requestHeaders(path);
  headers.set("accept", "text/event-stream");
  const response = await send(path, { headers, signal });
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value.replace(/\r\n?/g, "\n");
    let end = buffer.indexOf("\n\n");
    while (end >= 0) {
      const event = parseEvent(buffer.slice(0, end));
      if (event !== null) onEvent(event);
      buffer = buffer.slice(end + 2);
      end = buffer.indexOf("\n\n");
    }
  }
}

/** Returns null for a comment, which servers send to keep the connection open. */
function parseEvent(block: string): ServerEvent | null {
  const event: ServerEvent = { name: "message", id: "", data: "" };
  const data: string[] = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.startsWith("event:")) event.name = value;
    else if (line.startsWith("id:")) event.id = value;
    else if (line.startsWith("data:")) data.push(value);
  }
  if (data.length === 0) return null;
  event.data = data.join("\n");
  return event;
}
