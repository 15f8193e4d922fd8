import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { isDark } from "../lib/theme";
import { useStore } from "../lib/store";

export interface Series {
  label: string;
  values: (number | null)[];
}

interface ChartProps {
  /** What the chart shows, for screen readers and above the chart. */
  label: string;
  /** Seconds since 1970, ascending. */
  times: number[];
  series: Series[];
  format: (value: number) => string;
  height?: number;
}

/** Lines over time, at most four. The chart is created once and only its data is replaced. */
export function TimeChart({ label, times, series, format, height = 150 }: ChartProps) {
  const container = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = useStore(isDark);
  const names = series.map((line) => line.label).join();
  const data: uPlot.AlignedData = [times, ...series.map((line) => line.values)];

  useEffect(() => {
    const parent = container.current;
    if (parent === null) return;
    const width = () => Math.max(120, parent.clientWidth);
    const created = new uPlot(chartOptions(series, format, width(), height), data, parent);
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

  return (
    <div>
      <ul class="chart-legend">
        {series.map((line, index) => (
          <li key={line.label} class={`series-${index + 1}`}>
            {line.label} <strong>{formatLast(line.values, format)}</strong>
          </li>
        ))}
      </ul>
      <div class="chart" role="img" aria-label={`${label}: ${summary(series, format)}`} ref={container} />
    </div>
  );
}

function formatLast(values: (number | null)[], format: (value: number) => string): string {
  const last = values[values.length - 1];
  return last === null || last === undefined ? "–" : format(last);
}

function summary(series: Series[], format: (value: number) => string): string {
  return series.map((line) => `${line.label} now ${formatLast(line.values, format)}`).join(", ");
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
    const stroke = colour(`--chart-${index + 1}`);
    return { label: one.label, stroke, width: 1.6, fill: index === 0 ? `${stroke}18` : undefined, points: { show: false } };
  };
  return {
    width,
    height,
    padding: [8, 6, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { y: { range: (_, __, max) => [0, Math.max(max * 1.1, 1)] } },
    axes: [
      { ...axis, size: 26, space: 70 },
      { ...axis, size: 58, space: 34, values: (_, splits) => splits.map(format) },
    ],
    series: [{}, ...series.map(line)],
  };
}
