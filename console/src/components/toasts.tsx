import { createStore, useStore } from "../lib/store";

interface Toast {
  id: number;
  text: string;
  tone: "neutral" | "bad";
}

const TOASTS_MAX = 3;
const VISIBLE_MS = 6_000;

const toasts = createStore<Toast[]>([]);
let lastId = 0;

export function showToast(text: string, tone: Toast["tone"] = "neutral"): void {
  lastId += 1;
  const id = lastId;
  toasts.set([...toasts.get().slice(1 - TOASTS_MAX), { id, text, tone }]);
  window.setTimeout(() => toasts.set(toasts.get().filter((toast) => toast.id !== id)), VISIBLE_MS);
}

export function Toasts() {
  const shown = useStore(toasts);
  return (
    <div class="toasts" role="status" aria-live="polite">
      {shown.map((toast) => <div key={toast.id} class={`toast ${toast.tone}`}>{toast.text}</div>)}
    </div>
  );
}
