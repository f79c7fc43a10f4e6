// The messages of the path that is shown. Answers to the same request stand side by side.
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { Markdown } from "../lib/markdown.js";
import { copyText, IconButton, toast } from "../lib/parts.js";
import { useStore } from "../lib/store.js";
import { answer, canContinue, continueAnswer, isRunning, retry, send } from "./generate.js";
import { JsonAnswer, ToolCalls, ToolResults } from "./parsed.js";
import { fullText } from "./request.js";
import { change, chat, goTo, removeMessage, runs, show } from "./state.js";
import { TokenView } from "./tokens.js";
import { childrenOf, groupOf, newNode, newestLeaf, pathTo, variantsOf } from "./tree.js";

export function Messages({ tokens, editing, setEditing, onShow }) {
  const { meta, nodes } = useStore(chat);
  const active = useStore(runs);
  return pathTo(nodes, meta.leaf).map((node) => {
    const group = groupOf(nodes, node);
    const props = { nodes, tokens, onShow, editing: editing === node.id, setEditing };
    if (group.length < 2) {
      return html`<${Message} key=${node.id} node=${node} run=${active.get(node.id)} ...${props} />`;
    }
    return html`<section class="columns" key=${node.group} aria-label="Answers side by side">
      ${group.map(
        (each) => html`<${Message} key=${each.id} node=${each} run=${active.get(each.id)} ...${props} column chosen=${each.id === node.id} editing=${editing === each.id} />`,
      )}
    </section>`;
  });
}

// Tells screen readers of each answer when it has ended; while it grows, they would read parts of it again and again.
export function Announcer() {
  const { nodes } = useStore(chat);
  const active = useStore(runs);
  const before = useRef([]);
  const [text, setText] = useState("");
  useEffect(() => {
    const ended = before.current.filter((id) => !active.has(id) && nodes.has(id)).map((id) => nodes.get(id));
    before.current = [...active.keys()];
    const told = ended.filter((node) => node.content); // a failure is an alert already
    if (told.length) setText(told.map((node) => `${node.model}: ${node.content}`).join("\n"));
  }, [active]);
  return html`<div class="sr" role="log" aria-live="polite" aria-label="Answers">${text}</div>`;
}

const NAMES = { user: "You", tool: "Tool result" };

function Message({ node, nodes, run, tokens, editing, setEditing, column, chosen, onShow }) {
  const name = NAMES[node.role] ?? (node.model || "Assistant");
  const classes = ["message", node.role, column && "column", chosen && "chosen"].filter(Boolean).join(" ");
  return html`<article class=${classes} data-node=${node.id} tabindex="-1" aria-label=${name} aria-busy=${Boolean(run)}>
    <header class="message-head">
      <span class="who">${name}</span>
      ${column && !chosen && !run && html`<button type="button" class="link" onClick=${() => show(newestLeaf(nodes, node.id))}>Continue from this one</button>`}
      ${column && chosen && html`<span class="pill">continues here</span>`}
    </header>
    ${editing ? html`<${Editor} node=${node} onClose=${() => setEditing(null)} />` : html`<${Body} node=${node} run=${run} tokens=${tokens} onShow=${onShow} />`}
    ${!run && !editing && html`<${Actions} node=${node} nodes=${nodes} column=${column} setEditing=${setEditing} />`}
    ${run && html`<${RunFoot} run=${run} />`}
  </article>`;
}

function Body({ node, run, tokens, onShow }) {
  if (node.role === "user") return html`<${UserBody} node=${node} />`;
  if (node.role === "tool") return html`<pre class="plain" tabindex="0">${node.content}</pre>`;
  return html`<${AnswerBody} node=${node} run=${run} tokens=${tokens} onShow=${onShow} />`;
}

function UserBody({ node }) {
  return html`<div class="user-body">
    ${(node.images ?? []).map((image) => html`<img class="attached" src=${image.url} alt=${image.name} />`)}
    ${(node.files ?? []).map((file) => html`<details class="file"><summary>${file.name} <span class="muted num">${file.text.length.toLocaleString()} characters</span></summary><pre class="plain" tabindex="0">${file.text}</pre></details>`)}
    ${node.content && html`<${UserText} key=${node.id} text=${node.content} />`}
  </div>`;
}

// A message longer than this is folded.
const MAX_LINES = 16;
const MAX_CHARACTERS = 1500;

function UserText({ text }) {
  const [open, setOpen] = useState(false);
  const isLong = text.length > MAX_CHARACTERS || text.split("\n", MAX_LINES + 1).length > MAX_LINES;
  return html`<div class=${isLong && !open ? "user-text folded" : "user-text"}>${text}</div>
    ${isLong && html`<button type="button" class="link" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Show less" : `Show all ${text.length.toLocaleString()} characters`}</button>`}`;
}

// The parts of a run that change rarely. The text itself is watched by those that show it.
function useRun(run) {
  const [, setSeen] = useState("");
  useEffect(() => {
    if (!run) return;
    let frame = 0;
    const look = () => {
      frame = 0;
      setSeen(`${run.reasoning.length} ${JSON.stringify(run.toolCalls).length} ${run.waitsFor} ${run.text ? 1 : 0} ${run.tokens.length ? 1 : 0}`);
    };
    const later = () => (frame ||= requestAnimationFrame(look));
    look();
    const unwatch = run.watch(later);
    return () => {
      unwatch();
      cancelAnimationFrame(frame);
    };
  }, [run]);
}

function AnswerBody({ node, run, tokens, onShow }) {
  useRun(run);
  const text = run ? run.text : node.content;
  const reasoning = run ? run.reasoning : node.reasoning;
  const calls = (run ? run.toolCalls : node.toolCalls) ?? [];
  const known = run?.tokens ?? node.tokens;
  const isJson = node.format && node.format !== "text" && !calls.length;
  const answered = calls.length && childrenOf(chat.value.nodes, node.id).length;
  return html`
    ${reasoning && html`<${Reasoning} text=${reasoning} thinking=${run && !text} />`}
    ${tokens && known?.length
      ? html`<${TokenView} tokens=${known} run=${run} onShow=${onShow} />`
      : isJson && !run
        ? html`<${JsonAnswer} text=${text} />`
        : html`<${Markdown} text=${text} run=${run} onShow=${onShow} />`}
    ${calls.length > 0 && html`<${ToolCalls} calls=${calls} />`}
    ${calls.length > 0 && !run && !answered && html`<${ToolResults} node=${node} />`}
    ${node.error && !run && html`<${Failure} node=${node} onShow=${onShow} />`}
  `;
}

// Why an answer failed, and what can be done about it. It is scrolled into view if the answer's end was in sight.
function Failure({ node, onShow }) {
  useEffect(() => onShow?.(), []);
  return html`<div class="notice bad failed" role="alert">
    <span>${node.error}</span>
    <span class="grow"></span>
    <button type="button" class="btn" onClick=${() => unlessRunning(() => retry(node))}>Retry</button>
    ${canContinue(node) && html`<button type="button" class="btn" onClick=${() => unlessRunning(() => continueAnswer(node))}>Continue</button>`}
  </div>`;
}

function Reasoning({ text, thinking }) {
  return html`<details class="reasoning">
    <summary>${thinking ? "Thinking…" : "Reasoning"} <span class="muted num">${text.length.toLocaleString()} characters</span></summary>
    <div class="reasoning-text" tabindex="0">${text}</div>
  </details>`;
}

function Editor({ node, onClose }) {
  const [text, setText] = useState(node.content);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const save = () => {
    if (text === node.content) return onClose();
    if (node.role === "user") return unlessRunning(() => (onClose(), send(node.parent, { content: text, images: node.images, files: node.files })));
    onClose();
    const edited = newNode(node.parent, "assistant", { content: text, model: node.model, finish: "edited" });
    change({ leaf: edited.id }, [edited]);
  };
  const onKey = (event) => {
    if (event.key === "Escape") onClose();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div class="stack">
    <textarea class="area" ref=${field} rows=${Math.min(14, Math.max(3, text.split("\n").length + 1))} aria-label="Edit the message" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    <div class="row">
      <span class="muted hint">${node.role === "user" ? "The old message stays as a branch." : "The old answer stays as a branch."}</span>
      <span class="grow"></span>
      <button type="button" class="btn" onClick=${onClose}>Cancel</button>
      <button type="button" class="btn primary" onClick=${save}>${node.role === "user" ? "Send" : "Save"}</button>
    </div>
  </div>`;
}

// An answer that still runs would be kept without the message that it belongs to.
function unlessRunning(work) {
  return isRunning() ? toast("Stop the answer first.") : work();
}

export function regenerate(node) {
  return unlessRunning(() => answer(node.role === "assistant" ? node.parent : node.id));
}

function Actions({ node, nodes, column, setEditing }) {
  const { variants, at } = variantsOf(nodes, node);
  const step = (by) => goTo(variants[at + by].id);
  const copy = async () => (await copyText(node.role === "user" ? fullText(node) : node.content)) && toast("Copied.");
  return html`<footer class="actions">
    ${variants.length > 1 &&
    html`<span class="branches">
      <${IconButton} icon="left" label="Previous branch" keys="[" class="small" disabled=${at === 0} onClick=${() => step(-1)} />
      <span class="num" aria-label=${`Branch ${at + 1} of ${variants.length}`}>${at + 1}/${variants.length}</span>
      <${IconButton} icon="right" label="Next branch" keys="]" class="small" disabled=${at === variants.length - 1} onClick=${() => step(1)} />
    </span>`}
    <${IconButton} icon="copy" label="Copy" keys="c" class="small" onClick=${copy} />
    ${node.role !== "tool" && html`<${IconButton} icon="edit" label="Edit" keys="e" class="small" onClick=${() => setEditing(node.id)} />`}
    ${!(column && node.role === "user") && html`<${IconButton} icon="redo" label=${node.role === "assistant" ? "Answer again" : "Answer this"} keys="r" class="small" onClick=${() => regenerate(node)} />`}
    <${IconButton} icon="trash" label="Delete with all that follows" class="small" onClick=${() => unlessRunning(() => removeMessage(node.id))} />
    ${canContinue(node) && !node.error && html`<button type="button" class="link" onClick=${() => unlessRunning(() => continueAnswer(node))}>Continue</button>`}
    ${node.role === "assistant" && html`<${Figures} stats=${node.stats} finish=${node.finish} responseId=${node.responseId} />`}
  </footer>`;
}

const ENDS = { length: "cut at max tokens", stopped: "stopped", edited: "edited", interrupted: "interrupted", error: "failed" };

export function Figures({ stats, finish, responseId }) {
  const parts = [];
  if (stats?.tokens) parts.push(`${stats.tokens.toLocaleString()} token${stats.tokens === 1 ? "" : "s"}`);
  if (stats?.perSecond) parts.push(`${stats.perSecond.toFixed(1)} tok/s`);
  if (stats?.firstTokenS !== undefined) parts.push(`first after ${stats.firstTokenS.toFixed(2)} s`);
  const prompt = stats?.prompt ? `prompt of ${stats.prompt.toLocaleString()} tokens, ${stats.cached.toLocaleString()} of them cached` : "";
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return html`<span class="figures num" title=${prompt}>${parts.join(" · ")}${responseId && html` · <button type="button" class="link" title="Copy the id of the stored response" onClick=${() => copyText(responseId)}>stored</button>`}</span>`;
}

// The figures of an answer that is being written. They change four times a second.
function RunFoot({ run }) {
  const [, setTime] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setTime((time) => time + 1), 250);
    return () => clearInterval(timer);
  }, [run]);
  return html`<footer class="actions running">
    <span class="dot loading"></span>
    ${run.waitsFor ? html`<span class="waits">${run.waitsFor}…</span>` : html`<${Figures} stats=${run.stats} />`}
  </footer>`;
}
