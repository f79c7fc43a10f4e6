// Shows the arguments of tool calls, asks for their results, and shows JSON answers as a tree.
import { html, useState } from "../lib/html.js";
import { giveResult } from "./generate.js";

// Deeper values are shown as text, because each level of a tree needs room on the browser's stack.
const MAX_DEPTH = 50;

function isDeep(value, levels = MAX_DEPTH) {
  if (value === null || typeof value !== "object") return false;
  return levels === 0 || Object.values(value).some((each) => isDeep(each, levels - 1));
}

// The value that is shown as a tree. Undefined if the text is no JSON, or too deep.
export function parseOrNull(text) {
  try {
    const value = JSON.parse(text);
    return isDeep(value) ? undefined : value;
  } catch {
    return undefined;
  }
}

// A JSON value, with objects and lists that can be folded.
export function JsonTree({ value, name }) {
  const label = name === undefined ? "" : html`<span class="json-key">${name}</span>`;
  if (value === null || typeof value !== "object") {
    const kind = value === null ? "null" : typeof value;
    return html`<div class="json-row">${label}<span class=${`json-${kind}`}>${JSON.stringify(value)}</span></div>`;
  }
  const entries = Object.entries(value);
  const size = Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`;
  return html`<details class="json-row" open>
    <summary>${label}<span class="muted num">${size}</span></summary>
    <div class="json-inner">
      ${entries.map(([key, each]) => html`<${JsonTree} name=${key} value=${each} key=${key} />`)}
    </div>
  </details>`;
}

// An answer whose format is JSON. While it is not complete, its text is shown.
export function JsonAnswer({ text }) {
  const [raw, setRaw] = useState(false);
  const value = parseOrNull(text);
  if (value === undefined) return html`<pre class="plain" tabindex="0">${text}</pre>`;
  return html`<div class="parsed">
    <div class="parsed-head">
      <span class="pill"><span class="dot ready"></span>Valid JSON</span>
      <span class="grow"></span>
      <button type="button" class="link" aria-pressed=${raw} onClick=${() => setRaw(!raw)}>${raw ? "Parsed" : "Text"}</button>
    </div>
    ${raw ? html`<pre class="plain" tabindex="0">${text}</pre>` : html`<${JsonTree} value=${value} />`}
  </div>`;
}

export function ToolCalls({ calls }) {
  return calls.filter(Boolean).map((call) => {
    const value = parseOrNull(call.arguments);
    return html`<div class="call" key=${call.id}>
      <div class="call-head"><span class="pill">Tool call</span><code>${call.name}</code></div>
      ${value === undefined ? html`<pre class="plain" tabindex="0">${call.arguments}</pre>` : html`<${JsonTree} value=${value} />`}
    </div>`;
  });
}

// Fields for the results of a message's tool calls.
export function ToolResults({ node }) {
  const [results, setResults] = useState({});
  const onSubmit = (event) => {
    event.preventDefault();
    giveResult(node, node.toolCalls.map(({ id }) => ({ callId: id, content: results[id] ?? "" })));
  };
  return html`<form class="results" onSubmit=${onSubmit}>
    ${node.toolCalls.map(
      ({ id, name }) => html`<label class="field" key=${id}>
        <span>Result of ${name}</span>
        <textarea class="area mono" rows="2" placeholder='{"temperature": 21}' value=${results[id] ?? ""} onInput=${(event) => setResults({ ...results, [id]: event.target.value })}></textarea>
      </label>`,
    )}
    <div class="row"><span class="grow"></span><button class="btn">Give ${node.toolCalls.length > 1 ? "results" : "the result"} to the model</button></div>
  </form>`;
}
