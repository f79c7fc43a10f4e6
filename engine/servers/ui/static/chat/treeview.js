// The whole tree of a conversation. A row is one message; rows are indented only where the
// conversation branches.
import { html, useEffect, useMemo, useRef } from "../lib/html.js";
import { useStore } from "../lib/store.js";
import { chat, goTo } from "./state.js";
import { closeIfNarrow } from "./sidebar.js";
import { pathTo } from "./tree.js";

// The rows from top to bottom: `{ node, depth, branches }`.
function rowsOf(nodes) {
  const below = Map.groupBy([...nodes.values()].sort((a, b) => a.created - b.created || a.order - b.order), (each) => each.parent);
  const rows = [];
  const waiting = (below.get(null) ?? []).map((node) => ({ node, depth: 0 })).reverse();
  if (waiting.length > 1) for (const each of waiting) each.depth = 1;
  while (waiting.length) {
    const { node, depth } = waiting.pop();
    const children = below.get(node.id) ?? [];
    rows.push({ node, depth, branches: children.length });
    const inner = children.length > 1 ? depth + 1 : depth;
    for (const child of children.reverse()) waiting.push({ node: child, depth: inner });
  }
  return rows;
}

const SNIPPET = 80;

function snippet(node) {
  const text = node.content || node.toolCalls?.map((call) => `${call.name}(${call.arguments})`).join(" ") || node.error || "…";
  return text.slice(0, SNIPPET).replace(/\s+/g, " ");
}

export function TreeView() {
  const { meta, nodes } = useStore(chat);
  const rows = useMemo(() => rowsOf(nodes), [nodes]);
  const path = new Set(pathTo(nodes, meta.leaf).map((each) => each.id));
  const element = useRef(null);
  useEffect(() => element.current?.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" }), [meta.leaf]);
  const onKey = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const buttons = [...element.current.querySelectorAll("button")];
    buttons[Math.min(Math.max(buttons.indexOf(document.activeElement) + step, 0), buttons.length - 1)]?.focus();
  };
  if (!rows.length) return html`<p class="muted empty">Edits and new answers become branches, which are shown here.</p>`;
  return html`<ol class="tree" ref=${element} onKeyDown=${onKey} aria-label="Messages of the conversation">
    ${rows.map(
      ({ node, depth, branches }) => html`<li key=${node.id} style=${{ "--depth": Math.min(depth, 8) }} class=${path.has(node.id) ? "in-path" : ""}>
        <button type="button" aria-current=${node.id === meta.leaf} onClick=${() => (goTo(node.id), closeIfNarrow())}>
          <span class=${`tree-dot ${node.role}`}></span>
          <span class="tree-text">${snippet(node)}</span>
          ${branches > 1 && html`<span class="pill num">${branches}</span>`}
        </button>
      </li>`,
    )}
  </ol>`;
}
