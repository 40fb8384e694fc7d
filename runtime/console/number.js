// Numbers as the console writes them.

export function milliseconds(seconds) {
  const value = seconds * 1000;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  return value >= 10 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;
}

export function count(value) {
  return value.toLocaleString("en-US");
}

export function percent(part, whole) {
  if (!whole) return "0%";
  const value = (100 * part) / whole;
  return value > 0 && value < 10 ? `${value.toFixed(1)}%` : `${value.toFixed(0)}%`;
}

export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}
