// What two tabs of a browser must show, whatever their user does. It knows nothing of the page's code.

let numIds = 0;
let numUses = 0;

class Conversation {
  constructor(title, system) {
    Object.assign(this, { id: ++numIds, title, system, nodes: new Map(), leaf: null, used: ++numUses });
  }

  children(parent) {
    return [...this.nodes.values()].filter((each) => each.parent === parent);
  }

  newest(id) {
    for (let below = this.children(id); below.length; below = this.children(id)) id = below.at(-1).id;
    return id;
  }

  path(leaf) {
    const found = [];
    for (let node = this.nodes.get(leaf); node; node = this.nodes.get(node.parent)) found.unshift(node);
    return found;
  }

  add(parent, fields) {
    const node = { id: ++numIds, parent, text: "", files: [], images: 0, end: "", run: null, ...fields };
    this.nodes.set(node.id, node);
    this.used = ++numUses;
    return node;
  }
}

export class Model {
  isUp = true;
  conversations = [];
  stored = { temperature: "", system: "" }; // the settings that a new tab starts with
  tabs = [this.#tab(), this.#tab()];

  #tab() {
    return { ...this.#fresh(this.stored.system), drafts: new Map(), settings: { ...this.stored } };
  }

  #fresh(system) {
    return { shown: null, leaf: null, title: "", system };
  }

  // --- What is known of a tab.

  path(tab) {
    return tab.shown ? tab.shown.path(tab.leaf) : [];
  }

  runs(conversation) {
    return conversation ? [...conversation.nodes.values()].filter((each) => each.run) : [];
  }

  allRuns() {
    return this.conversations.flatMap((each) => this.runs(each).map((node) => ({ node, conversation: each })));
  }

  isRunning(tab) {
    return this.runs(tab.shown).length > 0;
  }

  draft(tab) {
    return tab.drafts.get(tab.shown) ?? "";
  }

  // The messages of the request for the answer `node`.
  messages(conversation, node) {
    const found = conversation.path(node.parent).filter((each) => each.role === "user" || each.text);
    const sent = found.map(({ role, text, files, images }) => ({ role, text: [...files.map((name) => `\`\`\`${name}\nIn ${name}.\n\`\`\``), text].filter(Boolean).join("\n\n"), images }));
    if (node.run.system) sent.unshift({ role: "system", text: node.run.system, images: 0 });
    if (node.text) sent.push({ role: "assistant", text: node.text, images: 0 });
    return sent;
  }

  // --- What the user does. Each returns the answer that is asked for, if one is.

  type(tab, text) {
    if (text) tab.drafts.set(tab.shown, text);
    else tab.drafts.delete(tab.shown);
  }

  send(tab, { text, files = [], images = 0 }) {
    tab.drafts.delete(tab.shown);
    if (!tab.shown) {
      tab.shown = new Conversation(tab.title || text, tab.system);
      this.conversations.push(tab.shown);
    }
    if (!tab.shown.title) tab.shown.title = text;
    const node = tab.shown.add(tab.leaf, { role: "user", text, files, images });
    return this.answer(tab, node.id);
  }

  answer(tab, parent) {
    const node = this.#start(tab, tab.shown.add(parent, { role: "assistant" }));
    this.#go(tab, node.id);
    return node;
  }

  #start(tab, node) {
    // What holds when a message is sent, holds for its answer, even if the server is down and it waits.
    node.run = { tab, temperature: tab.settings.temperature, system: tab.shown.system, chat: null };
    node.end = "";
    return node;
  }

  editUser(tab, node, text) {
    const edited = tab.shown.add(node.parent, { role: "user", text, files: node.files, images: node.images });
    if (!tab.shown.title) tab.shown.title = text;
    return this.answer(tab, edited.id);
  }

  editAnswer(tab, node, text) {
    this.#go(tab, tab.shown.add(node.parent, { role: "assistant", text, end: "edited" }).id);
  }

  retry(tab, node) {
    if (!node.text && !tab.shown.children(node.id).length) {
      this.gone.set(node.id, node.parent);
      tab.shown.nodes.delete(node.id);
      this.#settle(tab.shown);
    }
    return this.answer(tab, node.parent);
  }

  resume(tab, node) {
    tab.shown.used = ++numUses;
    this.#go(tab, tab.leaf);
    return this.#start(tab, node);
  }

  // Shows the newest path through a node, and keeps that. Other tabs stay where they are, unless more follows there.
  #go(tab, id) {
    const { shown } = tab;
    shown.leaf = tab.leaf = shown.newest(id);
    this.#settle(shown);
  }

  #settle(conversation) {
    for (const tab of this.tabs.filter((each) => each.shown === conversation)) {
      while (tab.leaf !== null && !conversation.nodes.has(tab.leaf)) tab.leaf = this.gone.get(tab.leaf);
      tab.leaf = conversation.newest(tab.leaf);
    }
  }

  gone = new Map(); // the parents of removed nodes

  step(tab, node) {
    this.#go(tab, node.id);
  }

  remove(tab, node) {
    const { shown } = tab;
    const removed = [node];
    for (let at = 0; at < removed.length; at++) removed.push(...shown.children(removed[at].id));
    const before = { leaf: tab.leaf, nodes: new Map(shown.nodes) };
    for (const each of removed) {
      this.gone.set(each.id, each.parent);
      shown.nodes.delete(each.id);
    }
    this.#settle(shown);
    shown.leaf = tab.leaf;
    return () => {
      shown.nodes = before.nodes;
      shown.used = ++numUses;
      shown.title ||= node.role === "user" ? node.text : "";
      shown.leaf = tab.leaf = before.leaf;
      this.#settle(shown);
    };
  }

  open(tab, conversation) {
    if (tab.shown === conversation) return;
    tab.shown = conversation;
    tab.leaf = this.#kept(conversation);
  }

  #kept(conversation) {
    return conversation.newest(conversation.nodes.has(conversation.leaf) ? conversation.leaf : null);
  }

  startNew(tab) {
    Object.assign(tab, this.#fresh(tab.settings.system));
  }

  removeConversation(tab, conversation) {
    for (const node of this.runs(conversation)) this.ended(conversation, node, "stopped");
    this.conversations = this.conversations.filter((each) => each !== conversation);
    for (const each of this.tabs.filter((one) => one.shown === conversation)) this.startNew(each);
    return () => {
      this.conversations.push(conversation);
      this.open(tab, conversation);
    };
  }

  rename(tab, title) {
    (tab.shown ?? tab).title = title;
  }

  setSystem(tab, system) {
    (tab.shown ?? tab).system = system;
    tab.settings.system = this.stored.system = system;
  }

  setTemperature(tab, temperature) {
    tab.settings.temperature = this.stored.temperature = temperature;
  }

  reload(tab) {
    for (const { node } of this.allRuns()) if (node.run.tab === tab) Object.assign(node, { run: null, end: "interrupted" });
    tab.settings = { ...this.stored };
    if (tab.shown) tab.leaf = this.#kept(tab.shown);
    else Object.assign(tab, this.#fresh(tab.settings.system));
  }

  // --- What the server does.

  ended(conversation, node, end) {
    Object.assign(node, { run: null, end });
    conversation.used = ++numUses;
  }

  stopServer() {
    this.isUp = false;
    const used = ++numUses; // which of several answers fails first is not known
    for (const { node, conversation } of this.allRuns()) {
      if (!node.run.chat) continue;
      this.ended(conversation, node, "failed");
      conversation.used = used;
    }
  }

  // --- What a tab shows.

  expected(tab) {
    const messages = this.path(tab).map((node) => this.#message(tab.shown, node));
    const running = this.isRunning(tab);
    return {
      status: this.isUp ? "Ready" : "Not reachable",
      title: tab.shown ? tab.shown.title : tab.title,
      current: tab.shown ? tab.shown.title || "Untitled" : "",
      messages,
      draft: this.draft(tab),
      button: running ? "Stop" : this.draft(tab) ? "Send" : "Send (off)",
    };
  }

  #message(conversation, node) {
    const siblings = conversation.children(node.parent);
    const branches = siblings.length > 1 && !node.run ? `${siblings.indexOf(node) + 1}/${siblings.length}` : "";
    if (node.role === "user") return { role: "user", text: node.text, branches, files: node.files, images: node.images };
    const waits = node.run && !node.run.chat && !this.isUp ? "Waiting for the server…" : "";
    const isCut = ["failed", "stopped", "interrupted", "cut at max tokens"].includes(node.end);
    const offers = [...(node.end === "failed" ? ["Retry"] : []), ...(isCut && node.text ? ["Continue"] : [])];
    return { role: "assistant", text: node.text.trim(), branches, busy: Boolean(node.run), waits, end: node.end, offers };
  }

  // The titles of all conversations, the last used first. Those that were used at the same time are in the order of `seen`.
  titles(seen) {
    const name = (each) => each.title || "Untitled";
    return [...this.conversations].sort((a, b) => b.used - a.used || seen.indexOf(name(a)) - seen.indexOf(name(b))).map(name);
  }
}
