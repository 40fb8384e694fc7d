// The playground: one call at a time, streamed, stopped at will.

import { Conversation } from "./conversation.js";
import { byId, setText } from "./element.js";
import { KnobError, requestFields, summary } from "./knobs.js";
import { milliseconds } from "./number.js";
import { ask, complaint, setKey } from "./server.js";
import { eventData } from "./sse.js";
import { showTimings } from "./timings.js";

class Refused extends Error {}

export class Playground {
  constructor() {
    this.form = byId("form");
    this.prompt = byId("prompt");
    this.conversation = new Conversation(byId("log"));
    this.model = "";
    this.running = null; // the AbortController of the call that runs
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop-call").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    this.form.elements.key.addEventListener("input", (event) => setKey(event.target.value));
    this.form.addEventListener("input", () => this.describe());
    document.addEventListener("keydown", (event) => this.press(event));
    this.describe();
  }

  describe() {
    setText(byId("knobs-summary"), summary(this.form));
  }

  press(event) {
    if (event.key === "Escape" && this.running) {
      event.preventDefault();
      this.stop();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.send();
    }
  }

  setModel(name) {
    this.model = name;
    this.enable();
  }

  enable() {
    byId("send-call").disabled = !this.model || Boolean(this.running);
    byId("stop-call").disabled = !this.running;
    byId("log").setAttribute("aria-busy", String(Boolean(this.running)));
  }

  clear() {
    this.stop();
    this.conversation.clear();
    setText(byId("call"), "");
    byId("call-spans").replaceChildren();
    this.prompt.focus();
  }

  stop() {
    if (this.running) this.running.abort();
  }

  async send() {
    const text = this.prompt.value.trim();
    if (!text || !this.model || this.running) return;
    let body;
    try {
      body = this.body(text);
    } catch (error) {
      if (!(error instanceof KnobError)) throw error;
      byId("knobs").open = true;
      setText(byId("call"), error.message);
      return;
    }
    this.running = new AbortController();
    this.enable();
    this.prompt.value = "";
    byId("call-spans").replaceChildren();
    setText(byId("call"), "waiting for the first token");
    const asked = this.conversation.show("user", text);
    const call = { began: performance.now(), first: 0, last: 0, answer: null, text: "", finish: "", usage: null, timings: null };
    try {
      await this.stream(body, call);
    } catch (error) {
      this.fail(error, call);
    } finally {
      this.running = null;
      this.enable();
      this.keep(call, text, asked);
    }
  }

  body(text) {
    const system = this.form.elements.system.value.trim();
    const messages = [...this.conversation.messages, { role: "user", content: text }];
    if (system) messages.unshift({ role: "system", content: system });
    return {
      model: this.model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      timings: true,
      ...requestFields(this.form),
    };
  }

  async stream(body, call) {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    if (!response.ok) throw new Refused(await complaint(response));
    let ended = false;
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") ended = true;
      else this.take(JSON.parse(data), call);
    }
    if (!ended) throw new Refused("the stream ended before it was done");
    call.finish = call.finish || "stop";
  }

  take(chunk, call) {
    if (chunk.error) throw new Refused(chunk.error.message || "the call failed");
    if (chunk.usage) call.usage = chunk.usage;
    if (chunk.timings) call.timings = chunk.timings;
    for (const choice of chunk.choices || []) {
      if (choice.finish_reason) call.finish = choice.finish_reason;
      const text = choice.delta && choice.delta.content;
      if (!text) continue;
      call.last = performance.now();
      if (!call.first) {
        call.first = call.last;
        setText(byId("call"), `first token after ${milliseconds((call.first - call.began) / 1000)}`);
      }
      if (!call.answer) call.answer = this.conversation.show("assistant");
      call.text += text;
      this.conversation.grow(call.answer, text);
    }
  }

  fail(error, call) {
    if (error.name === "AbortError") {
      call.finish = "stopped";
      return;
    }
    call.finish = "error";
    const text = error instanceof Refused ? error.message : `no answer from the server (${error.message})`;
    this.conversation.show("error", text);
  }

  /** What the next call builds on: a turn that got no answer goes back to the prompt. */
  keep(call, text, asked) {
    if (call.text) {
      this.conversation.messages.push({ role: "user", content: text }, { role: "assistant", content: call.text });
    } else if (call.finish !== "stop" && call.finish !== "length") {
      asked.turn.classList.add("unanswered");
      if (!this.prompt.value) this.prompt.value = text;
    } else {
      this.conversation.show("note", "The answer has no text.");
    }
    setText(byId("call"), this.outcome(call));
    showTimings(byId("call-spans"), call.timings);
  }

  outcome(call) {
    const parts = [];
    if (call.first) parts.push(`first token ${milliseconds((call.first - call.began) / 1000)}`);
    const tokens = call.usage && call.usage.completion_tokens;
    const seconds = (call.last - call.first) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (tokens) parts.push(`${tokens} tokens`);
    if (call.usage) parts.push(`prompt ${call.usage.prompt_tokens}`);
    parts.push(call.finish);
    return parts.join(" · ");
  }
}
