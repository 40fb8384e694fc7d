// Horizontal bars with a label and a number, for counts by bucket or by reason.

import { html, setText } from "./element.js";

export class Bars {
  constructor(box) {
    this.box = box;
    this.lines = new Map();
  }

  /** Each line: label, parts (name and size, drawn one after the other), and text beside the bar. */
  show(lines, whole) {
    const labels = lines.map((line) => line.label);
    if (labels.join() !== [...this.lines.keys()].join()) this.make(lines);
    for (const { label, parts, text } of lines) {
      const line = this.lines.get(label);
      parts.forEach(([, size], place) => {
        line.parts[place].style.width = `${whole ? (100 * size) / whole : 0}%`;
      });
      setText(line.text, text);
    }
  }

  make(lines) {
    this.lines.clear();
    this.box.replaceChildren();
    for (const { label, parts } of lines) {
      const drawn = parts.map(([name]) => html("span", { class: `part ${name}` }));
      const text = html("span", { class: "number" });
      this.box.append(html("div", { class: "line" }, html("span", { class: "label" }, label), html("span", { class: "stack" }, ...drawn), text));
      this.lines.set(label, { parts: drawn, text });
    }
  }
}
