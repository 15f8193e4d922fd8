import { defineConfig } from "vite";

// During development the page comes from Vite and the API from a running Pillarbox.
const server = process.env["PILLARBOX_URL"] ?? "http://127.0.0.1:8080";
const apiPaths = ["/admin", "/hub", "/event", "/join", "/identity", "/progress", "/notify", "/console/config.json"];

export default defineConfig({
  base: "/console/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    target: "es2021",
    // The Content-Security-Policy allows no `data:` scripts or styles, and an inlined preload helper is not needed.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  server: { proxy: Object.fromEntries(apiPaths.map((path) => [path, server])) },
});
