import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { formatExactTime } from "../lib/format";
import { useStore } from "../lib/store";
import { isDark } from "../lib/theme";

/**
 * A meaning has the same colour in every chart: what was posted or counted is blue, what was delivered green, what failed orange,
 * what was given up red. Times and others are teal and violet.
 */
export type SeriesColour = "blue" | "green" | "orange" | "red" | "teal" | "violet";

export interface Series {
  label: string;
  colour: SeriesColour;
  values: (number | null)[];
}

type Scale = "linear" | "count" | "duration";

interface ChartProps {
  /** What the chart shows, for screen readers. */
  label: string;
  /** Seconds since 1970, ascending. */
  times: number[];
  series: Series[];
  format: (value: number) => string;
  /** What the last time is. */
  latest?: string;
  /** "count" has whole numbers; "duration" is logarithmic, for milliseconds that differ by orders of magnitude. */
  scale?: Scale;
  height?: number;
}

const DAY_SECONDS = 86_400;
/** A chart that has just begun shows at least a minute. */
const SPAN_SECONDS_MIN = 60;
const AXIS_WIDTH = 58;
const PADDING_RIGHT = 8;
/** The width of the longest label of the time axis. */
const LABEL_WIDTH = 52;
/** Steps between the values of an axis, multiplied by a power of ten. */
const STEPS = [1, 2, 5, 10];
/** As many labels as the height of a chart has space for. */
const INTERVALS_MAX = 3;
/** Response times are below a minute; these marks are on both sides of each. */
const DURATION_MARKS = [0.1, 1, 10, 100, 1_000, 10_000, 60_000, 600_000];

/** Lines over time. The chart is created once and only its data is replaced. */
export function TimeChart({ label, times, series, format, latest = "now", scale = "linear", height = 150 }: ChartProps) {
  const container = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const dark = useStore(isDark);
  const names = series.map((line) => line.label).join();
  const data: uPlot.AlignedData = [times, ...series.map((line) => line.values)];

  useEffect(() => {
    const parent = container.current;
    if (parent === null) return;
    const width = () => Math.max(120, parent.clientWidth);
    const options = chartOptions(series, format, scale, width(), height);
    options.hooks = { setCursor: [(chart) => setHovered(chart.cursor.idx ?? null)] };
    const created = new uPlot(options, data, parent);
    plot.current = created;
    const observer = new ResizeObserver(() => created.setSize({ width: width(), height }));
    observer.observe(parent);
    return () => {
      observer.disconnect();
      created.destroy();
      plot.current = null;
    };
  }, [dark, names, height]);

  useEffect(() => plot.current?.setData(data), [times, series]);

  const shown = hovered !== null && hovered < times.length ? hovered : times.length - 1;
  return (
    <div>
      <ul class="chart-legend">
        {series.map((line) => (
          <li key={line.label} class={`series-${line.colour}`}>{line.label} <strong>{formatValue(line.values[shown], format)}</strong></li>
        ))}
        {times[shown] !== undefined && <li class="chart-time">{hovered === null ? latest : formatExactTime(new Date(times[shown] * 1000))}</li>}
      </ul>
      <div class="chart" role="img" aria-label={`${label}: ${summary(series, format, latest)}`} ref={container} />
    </div>
  );
}

function formatValue(value: number | null | undefined, format: (value: number) => string): string {
  return value === null || value === undefined ? "–" : format(value);
}

function summary(series: Series[], format: (value: number) => string, latest: string): string {
  return series.map((line) => `${line.label} ${formatValue(line.values[line.values.length - 1], format)} (${latest})`).join(", ");
}

function chartOptions(series: Series[], format: (value: number) => string, scale: Scale, width: number, height: number): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const axis = {
    stroke: colour("--muted"),
    grid: { stroke: colour("--chart-grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const line = (one: Series, index: number): uPlot.Series => {
    const stroke = colour(`--chart-${one.colour}`);
    return { label: one.label, stroke, width: 1.6, fill: index === 0 ? `${stroke}18` : undefined, points: { size: 4, fill: stroke } };
  };
  return {
    width,
    height,
    padding: [8, PADDING_RIGHT, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: {
      x: { range: (chart) => timeRange(chart.data[0]) },
      y: { distr: scale === "duration" ? 3 : 1, range: (_, min, max) => ends(marksOf(scale, min, max)) },
    },
    axes: [
      { ...axis, size: 30, gap: 9, space: 70, values: axisTimes },
      {
        ...axis, size: AXIS_WIDTH, filter: (_, splits) => splits, values: (_, splits) => splits.map(format),
        splits: (_, __, min, max) => marksOf(scale, min, max).filter((mark) => mark <= max),
      },
    ],
    series: [{}, ...series.map(line)],
  };
}

type Limit = number | null | undefined;

/** The labelled values of the vertical axis, from below the smallest value to above the largest one. */
function marksOf(scale: Scale, min: Limit, max: Limit): number[] {
  return scale === "duration" ? durationMarks(min ?? 1, max ?? 1) : evenMarks(max ?? 0, scale === "count" ? 1 : 0);
}

function durationMarks(min: number, max: number): number[] {
  return DURATION_MARKS.filter((_, index) => (DURATION_MARKS[index + 1] ?? Infinity) > min && (DURATION_MARKS[index - 1] ?? 0) <= max);
}

function evenMarks(max: number, stepMin: number): number[] {
  const top = Math.max(max, 1);
  const power = 10 ** Math.floor(Math.log10(top / INTERVALS_MAX));
  const step = Math.max(stepMin, power * (STEPS.find((factor) => factor * power * INTERVALS_MAX >= top) ?? 10));
  return Array.from({ length: Math.ceil(top / step) + 1 }, (_, index) => index * step);
}

function ends(marks: number[]): [number, number] {
  return [marks[0]!, marks[marks.length - 1]!];
}

/** From the first to the last time. The limits that uPlot suggests for fewer than two times are days or years apart. */
function timeRange(times: ArrayLike<number>): [number, number] {
  const end = times[times.length - 1] ?? Date.now() / 1000;
  return [Math.min(times[0] ?? end, end - SPAN_SECONDS_MIN), end];
}

/** The labels of the time axis: clock times, or dates if the chart covers days. One that the right edge would cut off is empty. */
function axisTimes(chart: uPlot, splits: number[]): string[] {
  const { min = 0, max = 0 } = chart.scales["x"]!;
  const pixelsPerSecond = (chart.width - AXIS_WIDTH - PADDING_RIGHT) / Math.max(1, max - min);
  const isCut = (time: number) => (max - time) * pixelsPerSecond + PADDING_RIGHT < LABEL_WIDTH / 2;
  const step = (splits[1] ?? 0) - (splits[0] ?? 0);
  const options: Intl.DateTimeFormatOptions = step >= DAY_SECONDS
    ? { day: "numeric", month: "short" }
    : { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, hour12: false };
  const formatter = new Intl.DateTimeFormat("en-GB", options);
  return splits.map((split) => isCut(split) ? "" : formatter.format(new Date(split * 1000)));
}
