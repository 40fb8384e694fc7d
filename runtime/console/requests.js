// Recent requests, each a stacked bar of its spans; the table tells one in numbers, by hover or by focus.

import { byId, html, setText } from "./element.js";
import { milliseconds } from "./number.js";
import { fillLegend, fillNumbers, spansOf, stackedBar } from "./timings.js";

const SHOWN = 6;

function ended(request) {
  return [...new Set(request.finish_reasons)].sort().join(", ");
}

export class Requests {
  constructor() {
    this.list = byId("spans");
    this.chosen = null; // an id, or null: the newest
    this.key = "";
    fillLegend(byId("spans-legend"));
    for (const kind of ["pointerover", "focusin"]) this.list.addEventListener(kind, (event) => this.choose(event));
    this.list.addEventListener("pointerleave", () => this.forget());
  }

  show(recent) {
    this.recent = recent.slice(0, SHOWN);
    const key = this.recent.map((request) => request.id).join();
    if (key !== this.key) {
      this.key = key;
      this.draw();
    }
    this.tell();
  }

  draw() {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const longest = Math.max(...this.recent.map((request) => request.total_ms / 1000));
    this.list.replaceChildren(
      ...this.recent.map((request) => {
        const name = request.id.replace(/^req-/, "").slice(0, 6);
        const time = milliseconds(request.total_ms / 1000);
        return html(
          "li", { tabindex: 0, "data-id": request.id, "aria-label": `request ${name}: ${time}, ${ended(request)}` },
          html("code", {}, name), stackedBar(spansOf(request), longest), html("span", { class: "number" }, time),
        );
      }),
    );
    if (focused) [...this.list.children].find((line) => line.dataset.id === focused)?.focus();
  }

  choose(event) {
    const line = event.target.closest("li");
    if (!line) return;
    this.chosen = line.dataset.id;
    this.tell();
  }

  forget() {
    if (this.list.contains(document.activeElement)) return;
    this.chosen = null;
    this.tell();
  }

  tell() {
    const request = this.recent.find((one) => one.id === this.chosen) || this.recent[0];
    if (!request) {
      setText(byId("span-caption"), "No request has ended yet");
      return;
    }
    const tokens = `${request.prompt_tokens} + ${request.output_tokens} tokens`;
    const caption = `${request.id.replace(/^req-/, "").slice(0, 6)} · ${ended(request)} · ${tokens}`;
    if (byId("span-caption").textContent === caption) return;
    setText(byId("span-caption"), caption);
    fillNumbers(byId("span-numbers"), spansOf(request));
    for (const line of this.list.children) line.classList.toggle("chosen", line.dataset.id === request.id);
  }
}
