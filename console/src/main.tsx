import { render } from "preact";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/components.css";
import "./styles/data.css";
import { App } from "./app";
import { loadBranding } from "./api/console";
import { brandName } from "./lib/brand";
import { applyBrandColour } from "./lib/theme";

const root = document.getElementById("app");
if (root !== null) render(<App />, root);

void loadBranding().then((branding) => {
  if (branding === null) return;
  if (branding.name) brandName.set(branding.name);
  if (branding.colour) applyBrandColour(branding.colour);
});
