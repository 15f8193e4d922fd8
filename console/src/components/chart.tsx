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

interface ChartProps {
  /** What the chart shows, for screen readers. */
  label: string;
  /** Seconds since 1970, ascending. */
  times: number[];
  series: Series[];
  format: (value: number) => string;
  /** What the last time is. */
  latest?: string;
  height?: number;
}

const DAY_SECONDS = 86_400;
/** A chart that has just begun shows at least a minute. */
const SPAN_SECONDS_MIN = 60;

/** Lines over time. The chart is created once and only its data is replaced. */
export function TimeChart({ label, times, series, format, latest = "now", height = 150 }: ChartProps) {
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
    const options = chartOptions(series, format, width(), height);
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

function chartOptions(series: Series[], format: (value: number) => string, width: number, height: number): uPlot.Options {
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
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: {
      x: { range: (chart) => timeRange(chart.data[0]) },
      y: { range: (_, __, max) => [0, Math.max((max ?? 0) * 1.1, 1)] },
    },
    axes: [
      { ...axis, size: 26, space: 70, values: (_, splits) => axisTimes(splits) },
      { ...axis, size: 58, space: 34, values: (_, splits) => splits.map(format) },
    ],
    series: [{}, ...series.map(line)],
  };
}

/** From the first to the last time. The limits that uPlot suggests for fewer than two times are days or years apart. */
function timeRange(times: ArrayLike<number>): [number, number] {
  const end = times[times.length - 1] ?? Date.now() / 1000;
  return [Math.min(times[0] ?? end, end - SPAN_SECONDS_MIN), end];
}

/** The labels of the time axis: clock times, or dates if the chart covers days. */
function axisTimes(splits: number[]): string[] {
  const step = (splits[1] ?? 0) - (splits[0] ?? 0);
  const options: Intl.DateTimeFormatOptions = step >= DAY_SECONDS
    ? { day: "numeric", month: "short" }
    : { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, hour12: false };
  const formatter = new Intl.DateTimeFormat("en-GB", options);
  return splits.map((split) => formatter.format(new Date(split * 1000)));
}
