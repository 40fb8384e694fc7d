// Puts the page together.

import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { startTheme } from "./theme.js";

const playground = new Playground();
const live = new Live((model) => playground.setModel(model));
startTheme(() => requestAnimationFrame(() => live.redraw()));
