// The conversation that is shown, the list of all conversations, and the settings of the chat.
import { toast } from "../lib/parts.js";
import { keptStore, Store } from "../lib/store.js";
import * as database from "./database.js";
import { showDraft } from "./drafts.js";
import { joinTabs, tellChange } from "./tabs.js";
import { childrenOf, leafNear, newestLeaf, newMeta, subtree, titleOf } from "./tree.js";

// What the chat sends with each request. Empty fields are left out of it.
export const settings = keptStore("chat", {
  models: [], // up to four ids; more than one answers side by side
  answers: 1, // of each model
  system: "", // of new conversations; each conversation has its own
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
const emptyChat = () => ({ meta: newMeta({ system: settings.value.system }), nodes: new Map() });
// `{ meta, nodes }` of the conversation that is shown. `nodes` is a Map by id.
export const chat = new Store(emptyChat());
const isNew = ({ meta }) => !conversations.value.some((each) => each.id === meta.id);
chat.watch((shown) => showDraft(isNew(shown) ? null : shown.meta.id));
// Runs by the id of the node that they write.
export const runs = new Store(new Map());

// The changes of this tab are counted, so that what was read from the database before a change is not shown after it.
let numChanges = 0;
let kept = Promise.resolve();

function failed(error) {
  toast(`This browser does not keep the conversation: ${error?.message ?? error}`);
}

// Writes to the database, and then tells other tabs.
function keep(id, write, ended) {
  numChanges += 1;
  const written = write().then(() => tellChange(id, ended), failed);
  kept = Promise.all([kept, written]);
  return written;
}

// All conversations, and the nodes of `id`, as the database has them after all changes of this tab.
async function readAgain(id) {
  for (;;) {
    await kept;
    const seen = numChanges;
    const [metas, nodes] = await Promise.all([database.readConversations(), id ? database.readNodes(id) : new Map()]);
    if (seen === numChanges) return { metas, nodes };
  }
}

const byUse = (metas) => metas.sort((a, b) => b.updated - a.updated);
const remember = (id) => (id ? sessionStorage.setItem("engine.conversation", id) : sessionStorage.removeItem("engine.conversation"));

export async function loadConversations() {
  joinTabs(runs, onChangeElsewhere);
  try {
    conversations.set(await database.readConversations());
    await openConversation(sessionStorage.getItem("engine.conversation"));
  } catch (error) {
    failed(error);
  }
}

let wanted = ""; // the conversation that was asked for last

export async function openConversation(id) {
  wanted = id;
  if (id === chat.value.meta.id || !conversations.value.some((each) => each.id === id)) return;
  const { metas, nodes } = await readAgain(id);
  const meta = metas.find((each) => each.id === id);
  if (!meta || wanted !== id) return;
  chat.set({ meta: { ...meta, leaf: leafNear(nodes, nodes, meta.leaf) }, nodes });
  remember(id);
}

export function startConversation() {
  wanted = "";
  chat.set(emptyChat());
  remember("");
}

// Shows what another tab has changed. This tab stays at the branch that it shows.
async function onChangeElsewhere() {
  const shown = chat.value;
  const isKept = !isNew(shown);
  const { metas, nodes } = await readAgain(isKept ? shown.meta.id : "");
  conversations.set(metas);
  const known = new Set(metas.map((each) => each.id));
  for (const run of runs.value.values()) if (run.isOwn && !known.has(run.conversation)) run.controller.abort();
  if (!isKept || chat.value.meta.id !== shown.meta.id) return;
  const meta = metas.find((each) => each.id === shown.meta.id);
  if (!meta) return startConversation();
  chat.set({ meta: { ...meta, leaf: leafNear(nodes, chat.value.nodes, chat.value.meta.leaf) }, nodes });
}

// Changes the conversation that is shown: fields of it, and nodes that are new or changed.
export function change(fields, changed = []) {
  changeIn(chat.value.meta.id, fields, changed);
}

// As `change`, for any conversation. An answer may end after another conversation was opened.
// `ended` are the ids of answers that have ended with this change.
export function changeIn(id, fields, changed = [], ended = []) {
  const shown = chat.value.meta.id === id;
  const old = conversations.value.find((each) => each.id === id);
  if (!old && !shown) return undefined; // it was deleted meanwhile
  const meta = { ...(shown ? chat.value.meta : old), ...fields };
  if (changed.length) meta.updated = Date.now();
  if (!meta.title && changed[0]?.role === "user") {
    meta.title = titleOf(changed[0].content || changed[0].files?.[0]?.name || "Images");
  }
  const isKept = old || changed.length; // from its first message on
  if (isKept) conversations.set(byUse([...conversations.value.filter((each) => each.id !== id), meta]));
  if (shown) {
    const nodes = changed.length ? new Map(chat.value.nodes) : chat.value.nodes;
    for (const node of changed) nodes.set(node.id, node);
    chat.set({ meta, nodes });
    if (isKept) remember(id);
  }
  if (!isKept) return undefined;
  if (!old) return keep(id, () => database.writeConversation(meta, changed));
  const { title, updated } = meta;
  return keep(id, () => database.updateConversation(id, { title, updated, ...fields }, changed), ended);
}

// What is kept of an answer that has not ended. If the page is closed, it stays like this.
export function draftOf(run) {
  return { ...run.node, ...run.fields(), finish: "interrupted" };
}

// Keeps what an answer has so far, without showing the conversation again.
export function keepDraft(run) {
  database.updateConversation(run.conversation, {}, [draftOf(run)]).catch(failed);
}

addEventListener("pagehide", () => {
  for (const run of runs.value.values()) if (run.isOwn) database.keepAtOnce(run.conversation, [draftOf(run)]).catch(() => {});
});

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
  const restored = removeQuietly(id).map((each) => nodes.get(each));
  toast("Deleted.", { label: "Undo", run: () => changeIn(meta.id, { leaf: meta.leaf }, restored) });
}

// As `removeMessage`, without a way back. Returns the ids of all that was removed.
export function removeQuietly(id) {
  const { meta, nodes } = chat.value;
  const gone = subtree(nodes, id);
  const left = new Map([...nodes].filter(([each]) => !gone.includes(each)));
  const leaf = leafNear(left, nodes, meta.leaf);
  const next = { ...meta, leaf };
  chat.set({ meta: next, nodes: left });
  conversations.set(conversations.value.map((each) => (each.id === next.id ? next : each)));
  keep(meta.id, () => database.updateConversation(meta.id, { leaf }, [], gone));
  return gone;
}

// An answer that is being written is stopped first, so that what it has can be restored.
export async function removeConversation(id) {
  const running = [...runs.value.values()].filter((run) => run.conversation === id);
  for (const run of running) run.controller.abort();
  await Promise.all(running.map((run) => run.ended));
  const { metas, nodes } = await readAgain(id);
  const meta = metas.find((each) => each.id === id);
  if (!meta) return;
  conversations.set(conversations.value.filter((each) => each.id !== id));
  if (chat.value.meta.id === id) startConversation();
  await keep(id, () => database.removeConversation(id));
  toast(`Deleted ${meta.title || "the conversation"}.`, { label: "Undo", run: () => addConversation({ meta, nodes }) });
}

// Keeps a conversation that comes from a file or from the server, and shows it.
export async function addConversation({ meta, nodes }) {
  await keep(meta.id, () => database.writeConversation(meta, [...nodes.values()]));
  conversations.set(byUse([...conversations.value.filter((each) => each.id !== meta.id), meta]));
  await openConversation(meta.id);
}

export async function nodesOf(id) {
  return (await readAgain(id)).nodes;
}
