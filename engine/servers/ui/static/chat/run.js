// An answer that is being written. Its text grows many times a second, so it is no part of the
// conversation's nodes until it ends.

// A rate over fewer tokens or less time than this says more about the connection than about the model.
const MIN_RATE_TOKENS = 16;
const MIN_RATE_S = 0.2;

export class Run {
  isOwn = true; // of this tab
  toolCalls = [];
  waitsFor = ""; // why nothing comes yet, such as a model that is loading
  finish = "";
  responseId = "";
  requestId = "";
  usage = null;
  #count = 0;
  #sentAt = performance.now();
  #firstAt = 0;
  #lastAt = 0;
  #watchers = new Set();
  #end;
  ended = new Promise((resolve) => (this.#end = resolve));

  // An answer that is continued has a content already.
  constructor(node, conversation, controller) {
    this.node = node;
    this.conversation = conversation;
    this.controller = controller;
    this.text = node.content;
    this.reasoning = node.reasoning ?? "";
    this.tokens = [...(node.tokens ?? [])]; // with probabilities, if they were asked for
    this.numBefore = node.stats?.tokens ?? 0;
  }

  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  // Tells the watchers about a change.
  tell() {
    for (const watcher of this.#watchers) watcher(this);
  }

  // Notes that the answer is a part of the conversation now.
  end() {
    this.#end();
  }

  // Notes that the request is sent now. Time before that was spent on waiting for the model.
  begin() {
    this.#sentAt = performance.now();
    this.waitsFor = "";
    this.tell();
  }

  noteToken(number = 1) {
    this.#lastAt = performance.now();
    if (!this.#firstAt) this.#firstAt = this.#lastAt;
    this.#count += number;
  }

  addTokens(logprobs) {
    for (const each of logprobs ?? []) {
      this.tokens.push({
        text: each.token,
        logprob: Math.max(each.logprob, -100),
        top: each.top_logprobs.map((one) => ({ text: one.token, logprob: Math.max(one.logprob, -100) })),
      });
    }
  }

  addCall(delta) {
    const call = (this.toolCalls[delta.index] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = delta.id;
    if (delta.function?.name) call.name += delta.function.name;
    if (delta.function?.arguments) call.arguments += delta.function.arguments;
  }

  // Figures of the answer so far: tokens, tokens per second, seconds to the first token.
  get stats() {
    const count = this.usage?.completion || this.#count;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const stats = { tokens: this.numBefore + count };
    if (this.#firstAt) stats.firstTokenS = (this.#firstAt - this.#sentAt) / 1000;
    if (count >= MIN_RATE_TOKENS && seconds >= MIN_RATE_S) stats.perSecond = (count - 1) / seconds;
    if (this.usage) Object.assign(stats, { prompt: this.usage.prompt, cached: this.usage.cached });
    return stats;
  }

  // The fields that the node gets when the answer has ended.
  fields() {
    const fields = { content: this.text, finish: this.finish, stats: this.stats };
    if (this.reasoning) fields.reasoning = this.reasoning;
    if (this.toolCalls.length) fields.toolCalls = this.toolCalls.filter(Boolean);
    if (this.tokens.length) fields.tokens = this.tokens;
    if (this.responseId) fields.responseId = this.responseId;
    if (this.requestId) fields.requestId = this.requestId;
    return fields;
  }
}
