const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

const numbers = new Intl.NumberFormat("en");
const compactNumbers = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const exactTimes = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });

export function formatNumber(value: number): string {
  return numbers.format(value);
}

/** `1234567` is `1.2M`, for places where the exact number is in a title. */
export function formatCompact(value: number): string {
  return value < 10_000 ? numbers.format(Math.round(value * 10) / 10) : compactNumbers.format(value);
}

/** `3 dead letters`, or `at least 100 dead letters` if others follow. */
export function atLeast(count: number, hasMore: boolean, noun: string): string {
  return `${hasMore ? "at least " : ""}${plural(count, noun)}`;
}

export function capitalized(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

export function formatRate(perSecond: number): string {
  if (perSecond === 0) return "0/s";
  if (perSecond < 0.1) return `${(perSecond * MINUTE).toFixed(1)}/min`;
  return `${perSecond < 10 ? perSecond.toFixed(1) : formatCompact(Math.round(perSecond))}/s`;
}

export function formatMilliseconds(milliseconds: number): string {
  if (milliseconds < 10) return `${Math.round(milliseconds * 10) / 10} ms`;
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  return formatSeconds(milliseconds / 1000);
}

export function formatSeconds(seconds: number): string {
  if (seconds < 10) return `${seconds.toFixed(1).replace(/\.0$/, "")} s`;
  if (seconds < MINUTE) return `${Math.round(seconds)} s`;
  if (seconds < HOUR) return twoUnits(seconds, MINUTE, "min", 1, "s");
  if (seconds < DAY) return twoUnits(seconds, HOUR, "h", MINUTE, "min");
  return twoUnits(seconds, DAY, "d", HOUR, "h");
}

function twoUnits(seconds: number, large: number, largeName: string, small: number, smallName: string): string {
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${largeName}${rest === 0 ? "" : ` ${rest} ${smallName}`}`;
}

export function formatPercent(share: number): string {
  const percent = share * 100;
  // 99.96 % must not be shown as 100 %.
  if (percent > 99 && percent < 100) return `${Math.floor(percent * 100) / 100} %`;
  return `${Math.round(percent * 10) / 10} %`;
}

export function formatExactTime(time: Date): string {
  return exactTimes.format(time);
}

/** `3 min ago`, `in 20 s`, `just now`. */
export function formatRelativeTime(time: Date, now: number): string {
  const seconds = Math.round((time.getTime() - now) / 1000);
  const distance = Math.abs(seconds);
  if (distance < 3) return seconds > 0 ? "in a moment" : "just now";
  const text = coarse(distance);
  return seconds < 0 ? `${text} ago` : `in ${text}`;
}

function coarse(seconds: number): string {
  if (seconds < MINUTE) return `${seconds} s`;
  if (seconds < HOUR - MINUTE / 2) return `${Math.round(seconds / MINUTE)} min`;
  if (seconds < 2 * DAY) return `${Math.round(seconds / HOUR)} h`;
  return `${Math.round(seconds / DAY)} days`;
}

export function formatJson(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${formatNumber(count)} ${count === 1 ? one : many}`;
}

const SETTINGS_KEY = "00000000-0000-0000-0000-000000000000";

/** Whether an API key is that of the setting `admin_key`. */
export function isSettingsKey(id: string): boolean {
  return id === SETTINGS_KEY;
}

/** Who has requested something, as the API names it: `key:<id>`, `user:<id>`, or a name. */
export function describePrincipal(principal: string): string {
  if (principal === `key:${SETTINGS_KEY}`) return "admin key (from the settings)";
  return principal.replace(/^(key|user|portal):/, "$1 ");
}
