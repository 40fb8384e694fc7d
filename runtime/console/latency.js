// Small multiples over the last five minutes: time to the first token, time between tokens, tokens per second.

import { byId, html, setText, svg } from "./element.js";
import { milliseconds, niceTop } from "./number.js";

const WIDTH = 260;
const HEIGHT = 74;
const LEFT = 40;
const BOTTOM = 14;

export class Latency {
  constructor() {
    byId("latency-legend").append(
      ...[["p50", "median"], ["p99", "99th percentile"]].map(([key, label]) => html("li", {}, html("i", { class: `dot ${key}` }), label)),
    );
    this.charts = new Map();
    for (const [key, title] of [["first", "First token"], ["between", "Between tokens"], ["rate", "Tokens per second"]]) {
      const note = html("span", { class: "hint" });
      const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
      byId("latency").append(html("figure", {}, html("figcaption", {}, `${title} `, note), plot));
      this.charts.set(key, { title, note, plot });
    }
  }

  show(latency) {
    const { bin_seconds: bin, num_bins: bins, first_token: first, between_tokens: between } = latency;
    const span = bin * bins;
    this.draw("first", quantiles(first), milliseconds, span, bin);
    this.draw("between", quantiles(between), milliseconds, span, bin);
    const counts = new Map();
    for (const point of [...first, ...between]) {
      const age = Math.round(point.age * 100) / 100;
      counts.set(age, (counts.get(age) || 0) + point.num_values);
    }
    const rates = [...counts].filter(([age]) => age >= bin).sort((one, two) => two[0] - one[0]);
    this.draw("rate", [["p50", rates.map(([age, number]) => [age, number / bin])]], (value) => value.toFixed(0), span, bin);
  }

  /** Lines: name and [age, value] points, oldest first. */
  draw(key, lines, text, span, bin) {
    const { title, note, plot } = this.charts.get(key);
    const values = lines.flatMap(([, points]) => points.map(([, value]) => value));
    const top = niceTop(Math.max(0, ...values));
    const x = (age) => LEFT + (WIDTH - LEFT - 4) * (1 - age / span);
    const y = (value) => 4 + (HEIGHT - BOTTOM - 4) * (1 - value / top);
    const latest = lines.map(([, points]) => (points.length ? text(points[points.length - 1][1]) : "")).filter(Boolean);
    setText(note, latest.join(" / ") || "nothing yet");
    plot.setAttribute("aria-label", `${title}, last five minutes: now ${note.textContent}, the scale ends at ${text(top)}`);
    const grid = [0, top / 2, top].map((value) => svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 4, y1: y(value), y2: y(value) }));
    const labels = values.length ? [0, top].map((value) => svg("text", { x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end" }, value ? text(value).replace(/\.0+ /, " ") : "0")) : [];
    const ages = [["5 min ago", LEFT, "start"], ["now", WIDTH - 4, "end"]];
    const axis = ages.map(([word, at, anchor]) => svg("text", { x: at, y: HEIGHT - 3.5, "text-anchor": anchor }, word));
    plot.replaceChildren(...grid, ...labels, ...axis, ...lines.flatMap(([name, points]) => strokes(name, points, x, y, bin)));
  }
}

function quantiles(points) {
  return ["p50", "p99"].map((name) => [name, points.map((point) => [Math.max(0, point.age), point[name]])]);
}

/** A line where bins follow each other, a dot where one stands alone. */
function strokes(name, points, x, y, bin) {
  const pieces = [];
  for (const [age, value] of points) {
    const piece = pieces[pieces.length - 1];
    if (piece && piece[piece.length - 1][0] - age < 1.5 * bin) piece.push([age, value]);
    else pieces.push([[age, value]]);
  }
  return pieces.map((piece) =>
    piece.length === 1
      ? svg("circle", { class: `mark ${name}`, cx: x(piece[0][0]), cy: y(piece[0][1]), r: 2 })
      : svg("polyline", { class: `stroke ${name}`, points: piece.map(([age, value]) => `${x(age).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }),
  );
}
