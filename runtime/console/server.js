// Calls to the server that this page came from. The key stays in this module's memory and nowhere else.

let key = "";

export function setKey(text) {
  key = text.trim();
}

export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
}

export async function complaint(response) {
  let text = `the server answered ${response.status}`;
  try {
    const { error } = await response.json();
    if (error && error.message) text = `${response.status}: ${error.message}`;
    if (error && error.param) text += ` (${error.param})`;
  } catch {
    return text; // no JSON: the status says what is known
  }
  return text;
}
