// The sampling parameters that the settings show. `kind` is "number", "whole", "list" (a text for
// each line), "flag" or "json". `absent` says what holds if there is no value.

export const PARAMS = [
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 5, step: 0.1, main: true, hint: "0 always takes the likeliest token." },
  { name: "max_tokens", label: "Max tokens", kind: "whole", min: 1, main: true, absent: "no limit", hint: "Where the answer is cut off." },
  { name: "top_p", label: "Top-p", kind: "number", min: 0, max: 1, step: 0.05, main: true, hint: "Keeps the likeliest tokens whose probabilities sum to this." },
  { name: "top_k", label: "Top-k", kind: "whole", min: -1, main: true, hint: "Keeps this many of the likeliest tokens." },
  { name: "min_p", label: "Min-p", kind: "number", min: 0, max: 1, step: 0.01, main: true, hint: "Drops tokens below this share of the likeliest one's probability." },
  { name: "seed", label: "Seed", kind: "whole", main: true, absent: "random", hint: "The same seed gives the same answer." },
  { name: "stop", label: "Stop at", kind: "list", main: true, hint: "One text for each line." },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0, max: 2, step: 0.05 },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { name: "repeat_last_n", label: "Penalized tokens", kind: "whole", min: -1, hint: "The penalties look at this many last tokens; -1: all." },
  { name: "typical_p", label: "Typical-p", kind: "number", min: 0, max: 1, step: 0.05 },
  { name: "top_n_sigma", label: "Top-n-sigma", kind: "number", step: 0.1 },
  { name: "xtc_probability", label: "XTC probability", kind: "number", min: 0, max: 1, step: 0.05 },
  { name: "xtc_threshold", label: "XTC threshold", kind: "number", min: 0, max: 1, step: 0.05 },
  { name: "dry_multiplier", label: "DRY multiplier", kind: "number", min: 0, step: 0.1 },
  { name: "dry_base", label: "DRY base", kind: "number", min: 1, step: 0.05 },
  { name: "dry_allowed_length", label: "DRY allowed length", kind: "whole", min: 0 },
  { name: "dry_penalty_last_n", label: "DRY last tokens", kind: "whole", min: -1 },
  { name: "dry_sequence_breakers", label: "DRY breakers", kind: "list" },
  { name: "dynatemp_range", label: "Dynamic temperature range", kind: "number", min: 0, step: 0.1 },
  { name: "dynatemp_exponent", label: "Dynamic temperature exponent", kind: "number", min: 0, step: 0.1 },
  { name: "mirostat", label: "Mirostat", kind: "whole", min: 0, max: 2 },
  { name: "mirostat_tau", label: "Mirostat tau", kind: "number", min: 0, step: 0.5 },
  { name: "mirostat_eta", label: "Mirostat eta", kind: "number", min: 0, step: 0.05 },
  { name: "min_tokens", label: "Min tokens", kind: "whole", min: 0 },
  { name: "min_keep", label: "Min keep", kind: "whole", min: 0, hint: "Filters keep at least this many tokens." },
  { name: "ignore_eos", label: "Ignore the end token", kind: "flag" },
  { name: "bad_words", label: "Forbidden texts", kind: "list" },
  { name: "stop_regex", label: "Stop at a pattern", kind: "list", hint: "Regular expressions, one for each line." },
  { name: "stop_token_ids", label: "Stop at tokens", kind: "json", hint: "A list of token ids, such as [2]." },
  { name: "allowed_token_ids", label: "Allowed tokens", kind: "json", absent: "all", hint: "A list of token ids." },
  { name: "logit_bias", label: "Logit bias", kind: "json", hint: 'Such as {"50256": -100}.' },
  { name: "samplers", label: "Order of samplers", kind: "json", absent: "the usual order", hint: 'Such as ["top_k", "temperature"].' },
  { name: "reasoning_effort", label: "Reasoning effort", kind: "text", hint: "Such as low, medium, high." },
  { name: "chat_template_kwargs", label: "Chat template options", kind: "json", hint: 'Such as {"enable_thinking": false}.' },
];

// The value of a parameter from what was typed. Undefined if nothing was. Throws an error that
// names the parameter.
export function parsed({ name, label, kind }, text) {
  if (text === undefined || text === "" || text === false) return undefined;
  if (kind === "flag") return true;
  if (kind === "text") return text.trim();
  if (kind === "list") return text.split("\n").filter(Boolean).map(unescaped);
  if (kind === "json") return parsedJson(text, label);
  const value = Number(text);
  if (!Number.isFinite(value) || (kind === "whole" && !Number.isInteger(value))) {
    throw new Error(`${label} (${name}) should be a ${kind === "whole" ? "whole " : ""}number.`);
  }
  return value;
}

// A line break can't be typed into a line, so `\n` stands for it.
const unescaped = (line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t");

export function parsedJson(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}
