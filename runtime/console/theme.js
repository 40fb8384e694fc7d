// Light, dark, or as the system says.

import { byId } from "./element.js";

const CHOICES = ["auto", "light", "dark"];
const STORED = "ostinato-theme";

function stored() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null; // storage is off: the choice lasts as long as the page
  }
}

export function startTheme(changed) {
  const button = byId("theme");
  let choice = CHOICES.includes(stored()) ? stored() : "auto";
  const show = () => {
    document.documentElement.dataset.theme = choice;
    button.textContent = `Theme: ${choice}`;
    changed();
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try {
      localStorage.setItem(STORED, choice);
    } catch {
      // as above
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}
