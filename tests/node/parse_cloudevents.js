// Reads a webhook of the format cloudevents with the CloudEvents SDK of npm.
//
// Standard input is the request as JSON: {"headers": {...}, "body": "..."}. Prints the events as JSON. Fails if the SDK
// refuses one.

const fs = require("fs");
const { HTTP } = require("cloudevents");

const request = JSON.parse(fs.readFileSync(0, "utf8"));
if (!HTTP.isEvent(request)) throw new Error("not a CloudEvent");
const parsed = HTTP.toEvent(request);
const events = Array.isArray(parsed) ? parsed : [parsed];
const shown = (event) => {
  event.validate();
  return {
    id: event.id,
    type: event.type,
    source: event.source,
    has_time: event.time !== undefined,
    data: event.data,
    lane: event.partitionkey ?? null,
    seq: event.sequence ?? null,
  };
};
console.log(JSON.stringify(events.map(shown)));
