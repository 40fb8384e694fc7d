// The rows of the engine, each a line of music: its prompt, then a note for every part of its output.

import { byId, html, setText, svg } from "./element.js";
import { count } from "./number.js";

const PITCHES = [3, 1, 2, 0, 2, 1]; // the phrase that repeats
const NOTES = 36;
const WIDTH = 400;
const HEIGHT = 22;
const PROMPT_WIDTH = 96;

export class Rows {
  constructor() {
    this.body = byId("rows");
    this.lines = new Map(); // by request id: rows are kept, so that a reader's place is
  }

  show(engine) {
    const seen = new Set();
    engine.rows.forEach((row, place) => {
      seen.add(row.id);
      const line = this.lines.get(row.id) || this.make(row);
      line.update(row);
      if (this.body.children[place] !== line.node) this.body.insertBefore(line.node, this.body.children[place] || null);
    });
    for (const [id, line] of this.lines) {
      if (seen.has(id)) continue;
      line.node.remove();
      this.lines.delete(id);
    }
    const hidden = engine.num_hidden ? `, ${count(engine.num_hidden)} more not shown` : "";
    setText(byId("rows-note"), `${count(engine.num_running)} running, ${count(engine.num_waiting)} waiting${hidden}`);
    this.body.classList.toggle("empty", engine.rows.length === 0);
  }

  make(row) {
    const state = html("span", { class: "state" });
    const [score, draw] = makeScore();
    const tokens = html("td", { class: "number" });
    const blocks = html("td", { class: "number" });
    const node = html(
      "tr", { "data-id": row.id },
      html("th", { scope: "row" }, `#${row.id}`), html("td", {}, state), html("td", {}, score), tokens, blocks,
    );
    const line = {
      node,
      update(now) {
        node.dataset.state = now.state;
        state.className = `state ${now.state}`;
        setText(state, now.num_preemptions ? `${now.state} ↺${now.num_preemptions}` : now.state);
        setText(tokens, `${count(now.num_prompt)} + ${count(now.num_output)}`);
        setText(blocks, count(now.num_blocks));
        draw(now);
      },
    };
    this.lines.set(row.id, line);
    return line;
  }
}

function makeScore() {
  const staff = [0, 1, 2, 3, 4].map((n) => svg("line", { class: "staff", x1: 0, x2: WIDTH, y1: 3 + n * 4, y2: 3 + n * 4 }));
  const cached = svg("rect", { class: "cached", y: 3, height: 16, x: 0, width: 0 });
  const computed = svg("rect", { class: "computed", y: 3, height: 16, x: 0, width: 0 });
  const bar = svg("line", { class: "bar", x1: PROMPT_WIDTH, x2: PROMPT_WIDTH, y1: 3, y2: 19 });
  const notes = svg("g", { class: "notes" });
  const node = svg(
    "svg", { class: "score", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" },
    ...staff, cached, computed, bar, notes,
  );
  const draw = (row) => {
    const scale = PROMPT_WIDTH / row.num_prompt;
    const done = Math.min(row.num_computed, row.num_prompt);
    const shared = Math.min(row.num_cached, done);
    cached.setAttribute("width", shared * scale);
    computed.setAttribute("x", shared * scale);
    computed.setAttribute("width", (done - shared) * scale);
    const wanted = row.num_output ? Math.max(1, Math.round((NOTES * row.num_output) / row.max_tokens)) : 0;
    while (notes.childElementCount > wanted) notes.lastChild.remove();
    while (notes.childElementCount < wanted) notes.append(note(notes.childElementCount));
    node.setAttribute(
      "aria-label",
      `${done} of ${row.num_prompt} prompt tokens, ${shared} from the cache; ${row.num_output} of at most ${row.max_tokens} output tokens`,
    );
  };
  return [node, draw];
}

function note(place) {
  const x = PROMPT_WIDTH + 8 + (place * (WIDTH - PROMPT_WIDTH - 14)) / (NOTES - 1);
  const y = 5 + PITCHES[place % PITCHES.length] * 4;
  return svg(
    "g", {},
    svg("ellipse", { cx: x, cy: y, rx: 2.9, ry: 2.1, transform: `rotate(-20 ${x} ${y})` }),
    svg("line", { x1: x + 2.5, x2: x + 2.5, y1: y - 0.6, y2: y - 8 }),
  );
}
