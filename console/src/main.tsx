import { render } from "preact";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/components.css";
import "./styles/data.css";
import { api } from "./api/client";
import { takeOverSession } from "./api/tabs";
import { App } from "./app";
import { showDirectionMarks } from "./lib/marks";
import { brandName } from "./lib/brand";
import { applyBrandColour } from "./lib/theme";

showDirectionMarks();
const root = document.getElementById("app");
void takeOverSession().catch(() => {}).then(() => root !== null && render(<App />, root));

// The page works without its name and colour.
api.get("/console/config.json").then(({ name, colour }) => {
  brandName.set(name);
  applyBrandColour(colour);
}, () => {});
