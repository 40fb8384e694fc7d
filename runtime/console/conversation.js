// The turns of one conversation, on the page and as the messages of a request.

import { html } from "./element.js";

const SPEAKERS = { user: "You", assistant: "Model", error: "Error", note: "Note" };

export class Conversation {
  constructor(log) {
    this.log = log;
    this.messages = [];
  }

  clear() {
    this.messages = [];
    this.log.replaceChildren();
  }

  /** A turn on the page; text is added to it with `grow`. */
  show(kind, text = "") {
    const body = html("p", { class: "text" });
    const words = document.createTextNode(text);
    body.append(words);
    const turn = html("article", { class: `turn ${kind}` }, html("h3", {}, SPEAKERS[kind]), body);
    this.log.append(turn);
    this.follow(true);
    return { turn, words };
  }

  grow(shown, text) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    shown.words.appendData(text);
    this.follow(atEnd);
  }

  follow(wanted) {
    if (wanted) this.log.scrollTop = this.log.scrollHeight;
  }
}
