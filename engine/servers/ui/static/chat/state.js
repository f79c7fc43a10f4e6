// The conversation that is shown, the list of all conversations, and the settings of the chat.
import { toast } from "../lib/parts.js";
import { keptStore, Store } from "../lib/store.js";
import * as database from "./database.js";
import { childrenOf, newestLeaf, newMeta, subtree, titleOf } from "./tree.js";

// What the chat sends with each request. Empty fields are left out of it.
export const settings = keptStore("chat", {
  models: [], // up to four ids; more than one answers side by side
  answers: 1, // of each model
  system: "",
  params: {}, // texts by the name of the parameter, as they were typed
  format: "text", // "text", "json_object" or "json_schema"
  schema: "",
  tools: "",
  toolChoice: "auto",
  logprobs: false,
  stored: false, // on the server, by /v1/responses
  extra: "", // more fields of the body, as JSON
});
// Which parts of the page are open.
export const view = keptStore("view", { sidebar: true, panel: "" });

export const conversations = new Store([]);
// `{ meta, nodes }` of the conversation that is shown. `nodes` is a Map by id.
export const chat = new Store({ meta: newMeta(), nodes: new Map() });
// Runs by the id of the node that they write.
export const runs = new Store(new Map());

function failed(error) {
  toast(`This browser does not keep the conversation: ${error?.message ?? error}`);
}

export async function loadConversations() {
  try {
    conversations.set(await database.readConversations());
    const last = sessionStorage.getItem("engine.conversation");
    if (conversations.value.some((each) => each.id === last)) await openConversation(last);
  } catch (error) {
    failed(error);
  }
}

export async function openConversation(id) {
  const meta = conversations.value.find((each) => each.id === id);
  if (!meta || meta.id === chat.value.meta.id) return;
  chat.set({ meta, nodes: await database.readNodes(id) });
  sessionStorage.setItem("engine.conversation", id);
  settings.set({ ...settings.value, system: meta.system });
}

export function startConversation() {
  chat.set({ meta: newMeta(), nodes: new Map() });
  sessionStorage.removeItem("engine.conversation");
}

// Changes the conversation that is shown: fields of it, and nodes that are new or changed.
export function change(fields, changed = []) {
  changeIn(chat.value.meta.id, fields, changed);
}

// As `change`, for any conversation. An answer may end after another conversation was opened.
export function changeIn(id, fields, changed = []) {
  const shown = chat.value.meta.id === id;
  const old = shown ? chat.value.meta : conversations.value.find((each) => each.id === id);
  if (!old) return; // it was deleted meanwhile
  const meta = { ...old, ...fields };
  if (changed.length) meta.updated = Date.now();
  if (!meta.title && changed[0]?.role === "user") {
    meta.title = titleOf(changed[0].content || changed[0].files?.[0]?.name || "Images");
  }
  if (shown) {
    const nodes = changed.length ? new Map(chat.value.nodes) : chat.value.nodes;
    for (const node of changed) nodes.set(node.id, node);
    chat.set({ meta, nodes });
    sessionStorage.setItem("engine.conversation", id);
  }
  const others = conversations.value.filter((each) => each.id !== id);
  const place = changed.length ? 0 : Math.max(0, conversations.value.findIndex((each) => each.id === id));
  conversations.set([...others.slice(0, place), meta, ...others.slice(place)]);
  database.writeConversation(meta, changed).catch(failed);
}

// Keeps what an answer has so far, without showing the conversation again.
export function keepDraft(run) {
  const meta = conversations.value.find((each) => each.id === run.conversation);
  const { text, reasoning, node } = run;
  const draft = { ...node, content: text, finish: "interrupted" };
  if (meta) database.writeConversation(meta, [reasoning ? { ...draft, reasoning } : draft]).catch(failed);
}

export function show(leaf) {
  change({ leaf });
}

// Shows the newest path through `id`.
export function goTo(id) {
  show(newestLeaf(chat.value.nodes, id));
}

// Removes a message and all that follows it.
export function removeMessage(id) {
  const { meta, nodes } = chat.value;
  const gone = subtree(nodes, id);
  const { parent } = nodes.get(id);
  const left = new Map([...nodes].filter(([each]) => !gone.includes(each)));
  const inPath = gone.includes(meta.leaf);
  const leaf = inPath ? (childrenOf(left, parent).length ? newestLeaf(left, parent) : parent) : meta.leaf;
  const next = { ...meta, leaf };
  chat.set({ meta: next, nodes: left });
  conversations.set(conversations.value.map((each) => (each.id === next.id ? next : each)));
  database.removeNodes(next, gone).catch(failed);
  const restored = gone.map((each) => nodes.get(each));
  toast("Deleted.", { label: "Undo", run: () => changeIn(meta.id, { leaf: meta.leaf }, restored) });
}

export async function removeConversation(id) {
  const meta = conversations.value.find((each) => each.id === id);
  const nodes = await nodesOf(id);
  conversations.set(conversations.value.filter((each) => each.id !== id));
  if (chat.value.meta.id === id) startConversation();
  await database.removeConversation(id).catch(failed);
  toast(`Deleted ${meta.title || "the conversation"}.`, { label: "Undo", run: () => addConversation({ meta, nodes }) });
}

// Keeps a conversation that comes from a file or from the server, and shows it.
export async function addConversation({ meta, nodes }) {
  await database.writeConversation(meta, [...nodes.values()]);
  conversations.set([meta, ...conversations.value]);
  await openConversation(meta.id);
}

export async function nodesOf(id) {
  return chat.value.meta.id === id ? chat.value.nodes : database.readNodes(id);
}
