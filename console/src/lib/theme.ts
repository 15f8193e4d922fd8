// The colour scheme, and the colour of the brand in variants that are readable on both backgrounds.
import { createStore } from "./store";

export type Theme = "system" | "light" | "dark";

const STORAGE_KEY = "pillarbox.theme";
const LIGHT_SURFACE = "#ffffff";
const DARK_SURFACE = "#1b1e24";
/** WCAG 2.1 AA for normal text, with a margin for tinted backgrounds. */
const CONTRAST_MIN = 6;

export const theme = createStore<Theme>(readTheme());
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
/** Changes whenever the colours on screen change, so that canvases can be drawn again. */
export const isDark = createStore(computeIsDark());

theme.subscribe(applyTheme);
systemIsDark.addEventListener("change", applyTheme);
applyTheme();

export function setTheme(next: Theme): void {
  localStorage.setItem(STORAGE_KEY, next);
  theme.set(next);
}

/** Sets the colour of the brand (`#rrggbb` or `#rgb`). Other texts are ignored, so a setting cannot break the page. */
export function applyBrandColour(setting: string): void {
  const colour = setting.replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
  if (!/^#[0-9a-f]{6}$/i.test(colour)) return;
  const style = document.documentElement.style;
  style.setProperty("--brand-light", readableOn(colour, LIGHT_SURFACE, "#000000"));
  style.setProperty("--brand-dark", readableOn(colour, DARK_SURFACE, "#ffffff"));
}

function readTheme(): Theme {
  const saved = localStorage.getItem(STORAGE_KEY);
  return saved === "light" || saved === "dark" ? saved : "system";
}

function computeIsDark(): boolean {
  const chosen = theme.get();
  return chosen === "dark" || (chosen === "system" && systemIsDark.matches);
}

function applyTheme(): void {
  const next = computeIsDark();
  document.documentElement.dataset["theme"] = next ? "dark" : "light";
  isDark.set(next);
}

/** Mixes the colour with black or white until a text in it is readable on the background. */
function readableOn(colour: string, background: string, towards: string): string {
  for (let share = 0; share < 1; share += 0.05) {
    const mixed = mix(colour, towards, share);
    if (contrast(mixed, background) >= CONTRAST_MIN) return mixed;
  }
  return towards;
}

function mix(from: string, to: string, share: number): string {
  const channels = [0, 1, 2].map((index) => {
    const value = channel(from, index) * (1 - share) + channel(to, index) * share;
    return Math.round(value).toString(16).padStart(2, "0");
  });
  return `#${channels.join("")}`;
}

function channel(colour: string, index: number): number {
  return parseInt(colour.slice(1 + index * 2, 3 + index * 2), 16);
}

function contrast(one: string, other: string): number {
  const [dark = 0, light = 0] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

function luminance(colour: string): number {
  const linear = [0, 1, 2].map((index) => {
    const value = channel(colour, index) / 255;
    return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0]! + 0.7152 * linear[1]! + 0.0722 * linear[2]!;
}
