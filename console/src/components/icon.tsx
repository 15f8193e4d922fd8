/** Outlines on a 16 × 16 grid. */
const PATHS = {
  alert: "M8 1.8 15 14H1L8 1.8ZM8 6v4M8 12.2v.1",
  bell: "M4 11V7a4 4 0 0 1 8 0v4l1.3 1.5H2.7L4 11ZM6.5 14.5h3",
  building: "M3 14.5V2h7v12.5M10 6h3.5v8.5M1.5 14.5h13M5.5 5h2M5.5 8h2M5.5 11h2",
  check: "m3 8.5 3.2 3.2L13 4.5",
  clock: "M8 1.5a6.5 6.5 0 1 1 0 13 6.5 6.5 0 0 1 0-13ZM8 4.5V8l2.5 1.5",
  copy: "M5.5 5.5h8v8h-8zM10.5 5V2.5h-8v8H5",
  gauge: "M2 12a6.5 6.5 0 1 1 12 0M8 10l3-4",
  key: "M10.5 1.8a3.7 3.7 0 1 1-2.8 6L2 13.5v1h2.5v-2H6v-2h1.6l.7-.8",
  layers: "m8 1.8 6.5 3.4L8 8.6 1.5 5.2 8 1.8ZM1.5 8.2 8 11.6l6.5-3.4M1.5 11l6.5 3.4 6.5-3.4",
  list: "M5.5 3.5h8.5M5.5 8h8.5M5.5 12.5h8.5M2 3.5h.1M2 8h.1M2 12.5h.1",
  menu: "M2 4h12M2 8h12M2 12h12",
  moon: "M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3Z",
  people: "M6 7.5a2.7 2.7 0 1 0 0-5.4 2.7 2.7 0 0 0 0 5.4ZM1.2 14a4.8 4.8 0 0 1 9.6 0M10.6 2.4a2.7 2.7 0 0 1 0 4.8M12 9.6a4.8 4.8 0 0 1 2.8 4.4",
  plug: "M5.5 1.5v4M10.5 1.5v4M3 5.5h10V8a5 5 0 0 1-10 0V5.5ZM8 13v2",
  progress: "M1.5 6h13v4h-13zM1.5 8H9",
  replay: "M2 8a6 6 0 1 0 2-4.5M2 1.5v3h3",
  search: "M7 12.5a5.5 5.5 0 1 0 0-11 5.5 5.5 0 0 0 0 11ZM11 11l3.5 3.5",
  send: "m14.5 1.5-6 13-2-5.5-5.5-2 13.5-5.5ZM6.5 9l8-7.5",
  skull: "M8 1.5a5.5 5.5 0 0 0-3 10v3h6v-3a5.5 5.5 0 0 0-3-10ZM5.8 7.2h.1M10.2 7.2h.1M8 12v2",
  stream: "M1.5 4h9M1.5 8h7M1.5 12h9M11 10.5v-7l3.5 3.5M14.5 7 11 10.5",
  sun: "M8 4.8a3.2 3.2 0 1 1 0 6.4 3.2 3.2 0 0 1 0-6.4ZM8 1v1M8 14v1M1 8h1M14 8h1M3 3l.7.7M12.3 12.3l.7.7M3 13l.7-.7M12.3 3.7 13 3",
  tag: "M1.5 7.5v-6h6l7 7-6 6-7-7ZM4.8 4.8h.1",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.4"
      stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

export function Logo() {
  return (
    <svg class="logo" width="22" height="22" viewBox="0 0 32 32" aria-hidden="true">
      <rect x="6" y="2" width="20" height="28" rx="6" fill="currentColor" />
      <rect x="10" y="9" width="12" height="3" rx="1.5" fill="var(--on-accent)" />
      <rect x="10" y="16" width="12" height="2" rx="1" fill="var(--on-accent)" opacity="0.6" />
    </svg>
  );
}
