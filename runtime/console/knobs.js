// The form's fields as fields of a request. What is left empty is left out.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

export class KnobError extends Error {}

export function requestFields(form) {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (!input.validity.valid) throw new KnobError(`${name}: ${input.validationMessage}`);
    if (input.value === "") continue;
    const value = Number(input.value);
    if (input.step === "1" && !Number.isSafeInteger(value)) throw new KnobError(`${name}: give an integer up to 2^53`);
    fields[name] = value;
  }
  const stops = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  const schema = form.elements.schema.value.trim();
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parsed(schema) } };
  return fields;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new KnobError(`the JSON schema is not valid JSON: ${error.message}`);
  }
}

export function summary(form) {
  const given = NUMBERS.filter((name) => form.elements[name].value !== "");
  const parts = given.map((name) => `${name.replace("_penalty", "")} ${form.elements[name].value}`);
  if (form.elements.schema.value.trim()) parts.push("JSON schema");
  return parts.join(" · ");
}
