/** The start times of all intervals of a range, in seconds since 1970. The API leaves out intervals without attempts. */
export function intervalsOf(from: string, to: string, stepSeconds: number): number[] {
  const first = Math.ceil(Date.parse(from) / 1000 / stepSeconds) * stepSeconds;
  const last = Date.parse(to) / 1000;
  const times: number[] = [];
  for (let time = first; time <= last; time += stepSeconds) times.push(time);
  return times;
}

export function sum(values: number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
