// Where a call's time went: spans in groups as one stacked bar, and by name in a table.

import { html, setText } from "./element.js";
import { milliseconds, percent } from "./number.js";

/** A span's name is its group, or begins with it: `prefill_execute`. */
export const GROUPS = [
  { key: "before", label: "before the queue", names: ["read", "auth", "parse", "tokenize", "grammar", "other", "handoff"] },
  { key: "queue", label: "queue", names: ["queue"] },
  { key: "prefill", label: "prefill", names: ["prefill"] },
  { key: "decode", label: "decode", names: ["decode"] },
  { key: "after", label: "answer", names: ["host", "detokenize", "format", "write"] },
  { key: "idle", label: "idle", names: ["idle"] },
];

export function groupOf(name) {
  const first = name.split("_")[0];
  return GROUPS.find((group) => group.names.includes(first)) || GROUPS[0];
}

/** What is told of a call, or nothing yet → pairs of span name and seconds. */
export function spansOf(told) {
  return Object.entries(told?.spans_ms || {}).map(([name, ms]) => [name, ms / 1000]);
}

/** Pairs of span name and seconds → seconds by group, in order, without empty ones. */
export function byGroup(spans) {
  return GROUPS.map((group) => ({
    ...group,
    seconds: spans.reduce((sum, [name, seconds]) => sum + (groupOf(name) === group ? seconds : 0), 0),
  })).filter((group) => group.seconds > 0);
}

export function stackedBar(spans, whole) {
  const bar = html("span", { class: "stack" });
  for (const group of byGroup(spans)) {
    const part = html("span", { class: `part ${group.key}`, title: `${group.label}: ${milliseconds(group.seconds)}` });
    part.style.width = `${(100 * group.seconds) / whole}%`;
    bar.append(part);
  }
  return bar;
}

export function fillNumbers(body, spans) {
  const whole = spans.reduce((sum, [, seconds]) => sum + seconds, 0);
  const rows = [...spans].filter(([, seconds]) => seconds > 0).sort((one, two) => two[1] - one[1]);
  body.replaceChildren(
    ...rows.map(([name, seconds]) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, html("i", { class: `dot ${groupOf(name).key}` }), name),
        html("td", { class: "number" }, milliseconds(seconds)),
        html("td", { class: "number" }, percent(seconds, whole)),
      ),
    ),
  );
}

export function fillLegend(list) {
  list.replaceChildren(...GROUPS.map((group) => html("li", {}, html("i", { class: `dot ${group.key}` }), group.label)));
}

/** The timings that an answer carries, under the playground. */
export function showTimings(box, timings) {
  const spans = spansOf(timings);
  box.replaceChildren();
  if (!spans.length) return;
  const whole = spans.reduce((sum, [, seconds]) => sum + seconds, 0);
  const body = html("tbody");
  fillNumbers(body, spans);
  const summary = html("summary", {}, stackedBar(spans, whole), html("span", { class: "hint" }));
  setText(summary.lastChild, `${milliseconds(whole)} by span`);
  box.append(html("details", {}, summary, html("table", { class: "numbers" }, body)));
}
