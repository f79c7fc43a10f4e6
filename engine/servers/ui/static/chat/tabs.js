// What tabs of this browser tell each other: which conversations have changed, and what the answers that they ask for
// look like so far. Each tab keeps what it has changed before it tells the others.
import { Run } from "./run.js";

// How often other tabs are told of a growing answer.
const TELL_EVERY_MS = 300;
// A tab that was closed by force does not stop its answers. After this long, they are forgotten.
const SILENCE_MS = 1500;

const channel = new BroadcastChannel("engine.chat");

// An answer that another tab asks for.
class RunElsewhere extends Run {
  isOwn = false;
  #stats = {};

  constructor(told, forget) {
    const stop = () => {
      channel.postMessage({ kind: "stop", conversation: told.conversation, node: told.node.id });
      setTimeout(() => forget([told.node.id]), SILENCE_MS);
    };
    super(told.node, told.conversation, { abort: stop });
    this.take(told);
  }

  take({ fields, waitsFor }) {
    this.text = fields.content;
    this.reasoning = fields.reasoning ?? "";
    this.toolCalls = fields.toolCalls ?? [];
    this.waitsFor = waitsFor;
    this.#stats = fields.stats;
    this.tell();
  }

  get stats() {
    return this.#stats;
  }
}

// Connects this tab with the others. `runs` is the store of answers that are being written, `onChange` is called with
// the id of a conversation that another tab has changed.
export function joinTabs(runs, onChange) {
  const forget = (ids) => {
    const left = new Map(runs.value);
    for (const id of ids) {
      if (!left.has(id) || left.get(id).isOwn) continue;
      left.get(id).end();
      left.delete(id);
    }
    if (left.size !== runs.value.size) runs.set(left);
  };
  const heard = {
    who: () => {
      for (const run of runs.value.values()) if (run.isOwn) tellRun(run);
    },
    run: (told) => {
      const known = runs.value.get(told.node.id);
      if (known) return known.take?.(told);
      runs.set(new Map([...runs.value, [told.node.id, new RunElsewhere(told, forget)]]));
    },
    stop: ({ node }) => {
      const run = runs.value.get(node);
      if (run?.isOwn) run.controller.abort();
    },
    changed: async ({ conversation, ended }) => {
      await onChange(conversation);
      forget(ended);
    },
  };
  channel.onmessage = ({ data }) => heard[data.kind](data);
  channel.postMessage({ kind: "who" });
  addEventListener("pagehide", () => {
    const own = [...runs.value.values()].filter((run) => run.isOwn);
    for (const run of own) tellChange(run.conversation, [run.node.id]);
  });
}

// Tells other tabs that `conversation` has changed, and which of its answers have ended.
export function tellChange(conversation, ended = []) {
  channel.postMessage({ kind: "changed", conversation, ended });
}

export function tellRun(run) {
  const { node, conversation, waitsFor } = run;
  channel.postMessage({ kind: "run", conversation, node, waitsFor, fields: run.fields() });
}

// Tells other tabs of `run` while it grows. Returns a function that ends this.
export function tellWhileItGrows(run) {
  let timer = 0;
  const tell = () => {
    timer = 0;
    tellRun(run);
  };
  const unwatch = run.watch(() => (timer ||= setTimeout(tell, TELL_EVERY_MS)));
  tellRun(run);
  return () => {
    unwatch();
    clearTimeout(timer);
  };
}
