// The KV pool, a square a block.

import { byId, html, setText } from "./element.js";
import { count, percent } from "./number.js";

const NAMES = { s: "shared", p: "private", c: "cached", f: "free", n: "null" };
const HEIGHT = 92;
const MEANINGS = {
  shared: "held by several rows",
  private: "held by one row",
  cached: "held by nobody, content kept",
  free: "blank",
  null: "where padding goes",
};

/** Run lengths such as `n1p3f12` → [letter, length] pairs. */
export function runs(map) {
  return [...map.matchAll(/([a-z])(\d+)/g)].map(([, letter, length]) => [letter, Number(length)]);
}

export class Blocks {
  constructor() {
    this.canvas = byId("blocks");
    this.map = "";
    this.total = 0;
    this.legend = new Map();
    for (const name of Object.values(NAMES)) {
      const amount = html("b");
      const swatch = html("i", { class: `dot block-${name}` });
      byId("blocks-legend").append(html("li", { title: MEANINGS[name] }, swatch, `${name} `, amount));
      this.legend.set(name, { amount, swatch });
    }
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.tell());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(engine) {
    const { map, counts } = engine.blocks;
    this.counts = counts;
    for (const [name, { amount }] of this.legend) setText(amount, count(counts[name]));
    const words = Object.entries(counts).map(([name, number]) => `${number} ${name}`).join(", ");
    this.canvas.setAttribute("aria-label", `KV blocks: ${words}`);
    if (map !== this.map) {
      this.map = map;
      this.draw();
    }
    this.tell();
  }

  tell() {
    if (!this.counts) return;
    const held = this.counts.shared + this.counts.private;
    const usable = held + this.counts.cached + this.counts.free;
    setText(byId("blocks-note"), `${percent(held, usable)} of ${count(usable)} held`);
  }

  point(event) {
    if (!this.grid) return;
    const { cell, columns } = this.grid;
    const index = Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell);
    let left = index;
    for (const [letter, length] of runs(this.map)) {
      if (left < length) {
        setText(byId("blocks-note"), `block ${index}: ${NAMES[letter]}`);
        return;
      }
      left -= length;
    }
  }

  /** The largest square that lets all blocks in. */
  draw() {
    const width = this.canvas.clientWidth;
    const parts = runs(this.map);
    const total = parts.reduce((sum, [, length]) => sum + length, 0);
    if (!width || !total) return;
    let cell = Math.min(14, Math.sqrt((width * HEIGHT) / total));
    while (Math.ceil(total / Math.max(1, Math.floor(width / cell))) * cell > HEIGHT) cell *= 0.98;
    const columns = Math.max(1, Math.floor(width / cell));
    cell = Math.min(14, width / columns);
    this.grid = { cell, columns };
    const ratio = window.devicePixelRatio || 1;
    const height = Math.min(HEIGHT, Math.ceil(total / columns) * cell);
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const gap = cell > 4 ? 1 : 0;
    let index = 0;
    for (const [letter, length] of parts) {
      pen.fillStyle = getComputedStyle(this.legend.get(NAMES[letter]).swatch).backgroundColor;
      for (const end = index + length; index < end; index += 1) {
        pen.fillRect((index % columns) * cell, Math.floor(index / columns) * cell, cell - gap, cell - gap);
      }
    }
  }
}
