// The live view: asks for the state twice a second and hands it to the parts of the page.

import { Bars } from "./bars.js";
import { Blocks } from "./blocks.js";
import { byId, html, setText } from "./element.js";
import { Latency } from "./latency.js";
import { count, percent } from "./number.js";
import { Requests } from "./requests.js";
import { Rows } from "./rows.js";
import { ask, complaint } from "./server.js";

const POLL_MS = 500;
const PATIENCE_MS = 5000;
const OLD_SECONDS = 2;

export class Live {
  constructor(onModel) {
    this.onModel = onModel;
    this.rows = new Rows();
    this.blocks = new Blocks();
    this.requests = new Requests();
    this.latency = new Latency();
    this.steps = new Bars(byId("steps"));
    this.queue = new Bars(byId("queue"));
    this.gauges = new Map();
    for (const name of ["running", "waiting", "prefix hits", "preempted"]) {
      const value = html("dd");
      byId("gauges").append(html("div", {}, html("dt", {}, name), value));
      this.gauges.set(name, value);
    }
    document.addEventListener("visibilitychange", () => this.poll());
    this.poll();
  }

  redraw() {
    this.blocks.draw();
  }

  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || this.isAsking) return;
    this.isAsking = true;
    try {
      const response = await ask("debug/state", { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (response.ok) this.show(await response.json());
      else this.tell(await complaint(response), response.status === 503 ? "busy" : "lost");
    } catch (error) {
      if (!["TypeError", "TimeoutError", "AbortError"].includes(error.name)) throw error;
      this.tell("no contact with the server", "lost");
    } finally {
      this.isAsking = false;
      this.timer = setTimeout(() => this.poll(), POLL_MS);
    }
  }

  tell(text, kind) {
    setText(byId("contact"), text);
    byId("contact").className = `contact ${kind}`;
  }

  show(state) {
    const { engine, limits, age_seconds: age } = state;
    setText(byId("model"), state.model);
    this.onModel(state.model);
    const isOld = age === null || age > OLD_SECONDS;
    if (state.trouble) this.tell(state.trouble, "lost");
    else if (isOld) this.tell("a step takes long: what you see is old", "busy");
    else this.tell("ready", "ready");
    if (engine) this.showEngine(engine, limits);
    this.showSteps(state.steps);
    if (engine) this.showQueue(engine);
    this.requests.show(state.recent);
    this.latency.show(state.latency);
  }

  showEngine(engine, limits) {
    this.rows.show(engine);
    this.blocks.show(engine);
    setText(this.gauges.get("running"), `${count(engine.num_running)} of ${count(limits.max_rows)}`);
    setText(this.gauges.get("waiting"), count(engine.num_waiting));
    setText(this.gauges.get("prefix hits"), percent(engine.prefix_hits, engine.prefix_queries));
    setText(this.gauges.get("preempted"), count(engine.num_preemptions));
  }

  showSteps(steps) {
    const most = Math.max(...steps.buckets.map((one) => one.steps));
    const lines = steps.buckets.map(({ bucket, steps: number, tokens, padding }) => {
      const live = (number * tokens) / (tokens + padding);
      return {
        label: bucket,
        parts: [["live-tokens", live], ["padding", number - live]],
        text: padding ? `${count(number)} · ${percent(padding, tokens + padding)} pad` : count(number),
      };
    });
    this.steps.show(lines, most);
    setText(byId("steps-note"), steps.steps ? `last ${count(steps.steps)}, by tokens` : "no step yet");
  }

  showQueue({ queue, num_waiting: waiting }) {
    const lines = Object.entries(queue).map(([reason, number]) => ({ label: reason, parts: [["queue", number]], text: count(number) }));
    this.queue.show(lines, Math.max(1, ...Object.values(queue)));
    setText(byId("queue-note"), waiting ? `${count(waiting)} waiting` : "nobody waits");
  }
}
