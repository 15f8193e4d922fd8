const MINUTE_SECONDS = 60;
/** The server saves the attempts of a minute so many seconds after its end. */
const SAVED_AFTER_SECONDS = 10;

/**
 * The start times of the intervals of a range, in seconds since 1970. The API leaves out intervals without attempts. An interval
 * of which no minute is saved yet is left out: it would look like a sudden fall.
 */
export function intervalsOf(from: string, to: string, stepSeconds: number): number[] {
  const first = Math.ceil(Date.parse(from) / 1000 / stepSeconds) * stepSeconds;
  const last = Date.parse(to) / 1000 - MINUTE_SECONDS - SAVED_AFTER_SECONDS;
  const times: number[] = [];
  for (let time = first; time <= last; time += stepSeconds) times.push(time);
  return times;
}

export function sum(values: number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
