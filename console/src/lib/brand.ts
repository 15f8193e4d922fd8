import { createStore } from "./store";

/** The name that an installation shows to its customers. */
export const brandName = createStore("Pillarbox");
