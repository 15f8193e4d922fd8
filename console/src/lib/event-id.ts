const PREFIX = "evt_";
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

export function isUuid(text: string): boolean {
  return UUID.test(text);
}

/** The id of an event as the API writes it, also from the UUID alone, which `pillarbox.post` returns. Null for another text. */
export function parseEventId(text: string): string | null {
  const typed = text.trim();
  if (typed.startsWith(PREFIX)) return typed;
  return isUuid(typed) ? `${PREFIX}${typed.toLowerCase()}` : null;
}
