// A conversation is a tree of messages. These functions read and build it; none of them stores
// anything.
//
// A node is `{ id, parent, role, content, created, ... }`. `role` is "user", "assistant" or "tool".
// An assistant's node may have `group`: nodes with the same group are answers to the same request,
// which are shown side by side. Other fields are listed at `NODE_FIELDS`.

export const FORMAT = "engine.conversation";
const MAX_TITLE = 60;

export function newId() {
  return crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}

// A conversation without messages. `leaf` is the last node of the path that is shown.
export function newMeta(fields = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, system: "", ...fields };
}

export function newNode(parent, role, fields = {}) {
  return { id: newId(), parent, role, content: "", created: Date.now(), ...fields };
}

// The children of `parent`, oldest first. `parent` is null for the first messages.
export function childrenOf(nodes, parent) {
  return [...nodes.values()].filter((each) => each.parent === parent).sort((a, b) => a.created - b.created || a.order - b.order);
}

// The nodes from the first message to `leaf`.
export function pathTo(nodes, leaf) {
  const path = [];
  for (let node = nodes.get(leaf); node; node = nodes.get(node.parent)) path.push(node);
  return path.reverse();
}

// The newest leaf below `id`.
export function newestLeaf(nodes, id) {
  for (;;) {
    const below = childrenOf(nodes, id);
    if (!below.length) return id;
    id = below.at(-1).id;
  }
}

// The leaf that is shown when `nodes` come in place of `before`, of which `leaf` was shown: the newest one below it, or
// below the last of its ancestors that is still there.
export function leafNear(nodes, before, leaf) {
  let id = leaf;
  while (id !== null && !nodes.has(id)) id = before.get(id)?.parent ?? null;
  return newestLeaf(nodes, id);
}

// The nodes that are answers to the same request as `node`, with `node` among them.
export function groupOf(nodes, node) {
  const siblings = childrenOf(nodes, node.parent);
  return node.group ? siblings.filter((each) => each.group === node.group) : [node];
}

// The alternatives at the place of `node`: one node for each group of answers, or for each edit.
// `at` is the position of `node` among them.
export function variantsOf(nodes, node) {
  const variants = [];
  let at = 0;
  for (const each of childrenOf(nodes, node.parent)) {
    const known = variants.findIndex((other) => each.group && other.group === each.group);
    if (known < 0) variants.push(each);
    if (each === node) at = known < 0 ? variants.length - 1 : known;
  }
  return { variants, at };
}

// The ids of `id` and of all nodes below it.
export function subtree(nodes, id) {
  const found = [id];
  for (let next = 0; next < found.length; next++) {
    for (const child of childrenOf(nodes, found[next])) found.push(child.id);
  }
  return found;
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}

// What the file of an exported conversation holds.
export function exported(meta, nodes) {
  return { format: FORMAT, version: 1, conversation: meta, nodes: [...nodes.values()] };
}

const isText = (value) => typeof value === "string";
const NODE_FIELDS = {
  model: isText,
  group: isText,
  reasoning: isText,
  finish: isText,
  error: isText,
  responseId: isText,
  callId: isText,
  requestId: isText,
  order: Number.isFinite,
  format: isText,
  stats: (value) => typeof value === "object" && Object.values(value).every(Number.isFinite),
  images: (value) => Array.isArray(value) && value.every((each) => /^data:image\//.test(each?.url) && isText(each.name)),
  files: (value) => Array.isArray(value) && value.every((each) => isText(each?.name) && isText(each.text)),
  toolCalls: (value) => Array.isArray(value) && value.every((each) => isText(each?.id) && isText(each.name) && isText(each.arguments)),
  tokens: (value) =>
    Array.isArray(value) &&
    value.every(
      (each) => isText(each?.text) && Number.isFinite(each.logprob) && Array.isArray(each.top) && each.top.every((one) => isText(one?.text) && Number.isFinite(one.logprob)),
    ),
};

// The conversation in an exported file, with new ids. Throws an error that says what is wrong.
export function imported(data) {
  const wrong = (what) => new Error(`The file is not an exported conversation: ${what}.`);
  if (data?.format !== FORMAT || data.version !== 1) throw wrong(`"format" should be "${FORMAT}", version 1`);
  if (!Array.isArray(data.nodes)) throw wrong("it has no nodes");
  const ids = new Map(data.nodes.map((each) => [each?.id, newId()]));
  const nodes = new Map();
  for (const each of data.nodes) {
    const isKnown = isText(each?.id) && isText(each.content) && ["user", "assistant", "tool"].includes(each.role);
    if (!isKnown || !Number.isFinite(each.created)) throw wrong("a node has no id, role, content or time");
    if (each.parent !== null && !ids.has(each.parent)) throw wrong(`the parent of node ${each.id} is missing`);
    const node = { id: ids.get(each.id), parent: each.parent === null ? null : ids.get(each.parent), role: each.role, content: each.content, created: each.created };
    for (const [name, isValid] of Object.entries(NODE_FIELDS)) {
      if (each[name] === undefined || each[name] === null) continue;
      if (!isValid(each[name])) throw wrong(`"${name}" of node ${each.id} is not valid`);
      node[name] = each[name];
    }
    nodes.set(node.id, node);
  }
  for (const node of nodes.values()) if (!reachesRoot(nodes, node)) throw wrong("its nodes are no tree");
  const given = data.conversation ?? {};
  const title = isText(given.title) ? given.title.slice(0, 200) : "Imported";
  const leaf = ids.get(given.leaf) ?? newestLeaf(nodes, null);
  return { meta: newMeta({ title, leaf, system: isText(given.system) ? given.system : "" }), nodes };
}

function reachesRoot(nodes, node) {
  for (let steps = 0; steps <= nodes.size; steps++) {
    if (node.parent === null) return true;
    node = nodes.get(node.parent);
  }
  return false;
}
