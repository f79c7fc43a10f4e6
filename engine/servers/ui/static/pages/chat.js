// The page at /: conversations with a model.
import { Composer } from "../chat/composer.js";
import { chosenModels, isRunning, stop } from "../chat/generate.js";
import { Announcer, Messages, regenerate } from "../chat/messages.js";
import { Settings } from "../chat/settings.js";
import { Sidebar } from "../chat/sidebar.js";
import { change, chat, conversations, goTo, loadConversations, openConversation, runs, settings, startConversation, view } from "../chat/state.js";
import { exportShown } from "../chat/transfer.js";
import { groupOf, pathTo, variantsOf } from "../chat/tree.js";
import { TreeView } from "../chat/treeview.js";
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../lib/html.js";
import { copyText, IconButton, loadStyle, toast } from "../lib/parts.js";
import { contextOf, server } from "../lib/server.js";
import { useShortcuts } from "../lib/shortcuts.js";
import { useStore } from "../lib/store.js";

const STYLES = ["../chat/chat.css", "../chat/messages.css", "../chat/panels.css"].map((each) => new URL(each, import.meta.url).href);
// The page follows an answer as long as its end is within this many pixels.
const NEAR_END = 80;

await Promise.all(STYLES.map(loadStyle));
await loadConversations();
if (matchMedia("(max-width: 900px)").matches) view.set({ ...view.value, sidebar: false, panel: "" });

const toggle = (fields) => view.set({ ...view.value, ...fields });
const openPanel = (name) => toggle({ panel: view.value.panel === name ? "" : name });

export default function Chat() {
  const { sidebar, panel } = useStore(view);
  const { meta, nodes } = useStore(chat);
  const [tokens, setTokens] = useState(false);
  const [editing, setEditing] = useState(null);
  const field = useRef(null);
  const scroller = useRef(null);
  const follow = useFollow(scroller, meta);
  useEffect(() => setEditing(null), [meta.id]);
  useStore(settings);
  useChatShortcuts({ field, scroller, setEditing, setTokens });
  const hasTokens = settings.value.logprobs || [...nodes.values()].some((each) => each.tokens);
  const hasColumns = pathTo(nodes, meta.leaf).some((each) => groupOf(nodes, each).length > 1);
  return html`<div class=${`chat ${sidebar ? "with-sidebar" : ""} ${panel ? "with-panel" : ""}`}>
    ${sidebar && html`<${Sidebar} />`}
    <main class="thread">
      ${nodes.size > 0 && html`<h1 class="sr">${meta.title || "Chat"}</h1>`}
      <div class="toolbar">
        <${IconButton} icon="menu" label="Conversations" keys="b" aria-expanded=${sidebar} onClick=${() => toggle({ sidebar: !sidebar })} />
        <input class="title" aria-label="Title of the conversation" placeholder="New chat" value=${meta.title} onChange=${(event) => change({ title: event.target.value.slice(0, 200) })} />
        <${ModelNames} />
        ${hasTokens && html`<${IconButton} icon="tokens" label="Tokens" keys="p" aria-pressed=${tokens} onClick=${() => setTokens(!tokens)} />`}
        <${IconButton} icon="download" class="wide-only" label="Export the conversation" keys="x" disabled=${!nodes.size} onClick=${exportShown} />
        <${IconButton} icon="branch" label="Branches" keys="t" aria-pressed=${panel === "tree"} onClick=${() => openPanel("tree")} />
        <${IconButton} icon="sliders" label="Settings" keys="s" aria-pressed=${panel === "settings"} onClick=${() => openPanel("settings")} />
      </div>
      <div class="scroller" ref=${scroller} onScroll=${follow.onScroll} tabindex="-1">
        <div class=${hasColumns ? "messages wide" : "messages"}>
          ${nodes.size ? html`<${Messages} tokens=${tokens} editing=${editing} setEditing=${setEditing} onShow=${follow.onShow} />` : html`<${Welcome} field=${field} />`}
        </div>
      </div>
      <${Announcer} />
      <div class="dock"><${Composer} field=${field} /></div>
    </main>
    ${panel && html`<aside class="panel" aria-label=${panel === "tree" ? "Branches" : "Settings"}>
      <div class="panel-head">
        <h2>${panel === "tree" ? "Branches" : "Settings"}</h2>
        <${IconButton} icon="close" label="Close the panel" onClick=${() => toggle({ panel: "" })} />
      </div>
      <div class="panel-body" tabindex="-1">${panel === "tree" ? html`<${TreeView} />` : html`<${Settings} />`}</div>
    </aside>`}
    ${(panel || sidebar) && html`<div class="scrim" onClick=${() => toggle({ panel: "", sidebar: false })}></div>`}
  </div>`;
}

// Keeps the end of an answer in sight, unless the user has scrolled away from it.
function useFollow(scroller, meta) {
  const follows = useRef(true);
  const onScroll = useCallback(() => {
    const { scrollTop, scrollHeight, clientHeight } = scroller.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  }, []);
  const onShow = useCallback(() => {
    if (follows.current && scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  }, []);
  useEffect(() => {
    follows.current = true;
    const frame = requestAnimationFrame(onShow);
    return () => cancelAnimationFrame(frame);
  }, [meta.id, meta.leaf]);
  return { onScroll, onShow };
}

function ModelNames() {
  useStore(server);
  useStore(settings);
  const names = chosenModels();
  const { answers } = settings.value;
  if (!names.length) return null;
  const label = names.join(" and ") + (answers > 1 ? `, ${answers} answers` : "");
  return html`<button type="button" class="models" title="Choose models" onClick=${() => openPanel("settings")}>
    ${names.length > 1 ? html`<span class="narrow-hide">${names[0]} + ${names.length - 1}</span>` : html`<span>${names[0]}</span>`}
    ${answers > 1 && html`<span class="num">×${answers}</span>`}
    <span class="sr">${label}</span>
  </button>`;
}

const IDEAS = ["Explain what a KV cache is, in three sentences.", "Write a haiku about tests that pass.", "Write a Python function that merges two sorted lists."];

function Welcome({ field }) {
  const { state, models } = useStore(server);
  const fill = (text) => {
    field.current.value = text;
    field.current.dispatchEvent(new Event("input", { bubbles: true }));
    field.current.focus();
  };
  const name = chosenModels()[0];
  const model = models.find((each) => each.id === name);
  const facts = model && [model.backend, model.quantization, contextOf(model) && `${contextOf(model).toLocaleString()} tokens of context`].filter(Boolean).join(" · ");
  return html`<div class="welcome">
    <h1>${name ?? (state === "loading" ? "The model is loading" : "engine")}</h1>
    <p class="muted">${facts ?? "Write a message; it is sent when the model is ready."}</p>
    <div class="ideas">${IDEAS.map((text) => html`<button type="button" class="idea" onClick=${() => fill(text)}>${text}</button>`)}</div>
    <p class="muted keys-hint wide-only"><kbd>Enter</kbd> sends · <kbd>Esc</kbd> stops or leaves the field · <kbd>?</kbd> lists all keys</p>
  </div>`;
}

// The message that shortcuts act on: the one with the focus, or else the last one.
function actedOn() {
  const { meta, nodes } = chat.value;
  const focused = document.activeElement?.closest?.("[data-node]")?.dataset.node;
  return nodes.get(focused ?? meta.leaf);
}

// Shows the next (1) or previous (-1) branch at the message that is acted on, or above it.
function stepBranch(by) {
  const { nodes } = chat.value;
  for (let node = actedOn(); node; node = nodes.get(node.parent)) {
    const { variants, at } = variantsOf(nodes, node);
    if (variants.length > 1) return variants[at + by] && goTo(variants[at + by].id);
  }
  return undefined;
}

function stepMessage(by) {
  const all = [...document.querySelectorAll(".message")];
  const at = all.indexOf(document.activeElement?.closest?.(".message"));
  const next = all[at < 0 ? (by < 0 ? all.length - 1 : 0) : at + by];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function stepConversation(by) {
  const all = conversations.value;
  const at = all.findIndex((each) => each.id === chat.value.meta.id);
  const next = all[at < 0 ? 0 : at + by];
  if (next) openConversation(next.id);
}

async function copyMessage() {
  const node = actedOn();
  if (node && (await copyText(node.content))) toast("Copied.");
}

function useChatShortcuts({ field, setEditing, setTokens }) {
  const escape = () => {
    if (isRunning()) return stop();
    if (document.activeElement !== document.body) return document.activeElement.blur();
    return false;
  };
  const shortcuts = useMemo(
    () => [
      { keys: "/", text: "Write a message", run: () => field.current.focus() },
      { keys: "Enter", text: "Send (Shift+Enter: a new line)" },
      { keys: "Escape", text: "Stop the answer, or leave the field", run: escape },
      { keys: "n", text: "New chat", run: startConversation },
      { keys: "j", text: "Next message", run: () => stepMessage(1) },
      { keys: "k", text: "Previous message", run: () => stepMessage(-1) },
      { keys: "e", text: "Edit the message", run: () => actedOn() && setEditing(actedOn().id) },
      { keys: "r", text: "Answer again", run: () => actedOn() && regenerate(actedOn()) },
      { keys: "c", text: "Copy the message", run: copyMessage },
      { keys: "[", text: "Previous branch", run: () => stepBranch(-1) },
      { keys: "]", text: "Next branch", run: () => stepBranch(1) },
      { keys: "Alt+ArrowUp", text: "Previous conversation", run: () => stepConversation(-1) },
      { keys: "Alt+ArrowDown", text: "Next conversation", run: () => stepConversation(1) },
      { keys: "t", text: "Branches as a tree", run: () => openPanel("tree") },
      { keys: "s", text: "Settings", run: () => openPanel("settings") },
      { keys: "p", text: "Probabilities of tokens", run: () => setTokens((shown) => !shown) },
      { keys: "b", text: "List of conversations", run: () => toggle({ sidebar: !view.value.sidebar }) },
      { keys: "x", text: "Export the conversation", run: () => chat.value.nodes.size && exportShown() },
    ],
    [],
  );
  useShortcuts("Chat", shortcuts);
  useStore(runs);
}
