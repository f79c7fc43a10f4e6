// Conversations in this browser's IndexedDB: one record for each conversation, one for each node.

const NAME = "engine";
let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("nodes", { keyPath: ["conversation", "id"] });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

// Calls `work` with the object stores. Resolves to its request's result when all is written.
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(["conversations", "nodes"], mode);
    const request = work(transaction.objectStore("conversations"), transaction.objectStore("nodes"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

const nodesOf = (id) => IDBKeyRange.bound([id, ""], [id, "\uffff"]);

// All conversations without their nodes, the last used one first.
export async function readConversations() {
  const found = await transact("readonly", (conversations) => conversations.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

export async function readNodes(id) {
  const found = await transact("readonly", (_, nodes) => nodes.getAll(nodesOf(id)));
  return new Map(found.map(({ conversation, ...node }) => [node.id, node]));
}

// Keeps a whole conversation.
export function writeConversation(meta, nodes) {
  return transact("readwrite", (conversations, kept) => {
    for (const node of nodes) kept.put({ ...node, conversation: meta.id });
    return conversations.put(meta);
  });
}

// Changes fields of a kept conversation, adds or changes nodes, and removes those named by `gone`. Another tab may have
// changed other fields meanwhile, so they are not written; if it has deleted the conversation, nothing is.
export function updateConversation(id, fields, changed = [], gone = []) {
  return transact("readwrite", (conversations, nodes) => {
    const asked = conversations.get(id);
    asked.onsuccess = () => {
      if (!asked.result) return;
      for (const node of changed) nodes.put({ ...node, conversation: id });
      for (const each of gone) nodes.delete([id, each]);
      if (Object.keys(fields).length) conversations.put({ ...asked.result, ...fields });
    };
    return asked;
  });
}

// Keeps nodes while the page is being closed: nothing is read first, because its result would not be waited for.
export function keepAtOnce(id, nodes) {
  return transact("readwrite", (_, kept) => {
    for (const node of nodes) kept.put({ ...node, conversation: id });
    kept.transaction.commit();
  });
}

export function removeConversation(id) {
  return transact("readwrite", (conversations, nodes) => {
    nodes.delete(nodesOf(id));
    return conversations.delete(id);
  });
}
