// Asks the server for answers and writes them into the conversation while they arrive.
import { events, request } from "../lib/api.js";
import { toast } from "../lib/parts.js";
import { refresh, server } from "../lib/server.js";
import { chatBody, responseBody } from "./request.js";
import { Run } from "./run.js";
import { change, changeIn, chat, draftOf, keepDraft, removeQuietly, runs, settings } from "./state.js";
import { tellWhileItGrows } from "./tabs.js";
import { childrenOf, newId, newNode } from "./tree.js";

// After this long without a pause, reading lets the page draw.
const MAX_TASK_MS = 8;
const RETRY_MS = 1000;
// So many times a request is sent again to a server that is ready and refuses it.
const MAX_REFUSALS = 10;
// How often an unfinished answer is kept, for the case that the page is closed.
const KEEP_EVERY_MS = 2000;

export function isRunning() {
  const { id } = chat.value.meta;
  return [...runs.value.values()].some((run) => run.conversation === id);
}

// The models that answer. Those that are not served any more are left out.
export function chosenModels() {
  const served = server.value.models.map((each) => each.id);
  const chosen = settings.value.models.filter((each) => served.includes(each));
  return chosen.length ? chosen : served.slice(0, 1);
}

// Adds a user's message below `parent` and asks for answers to it.
export function send(parent, fields) {
  const node = newNode(parent, "user", fields);
  change({ leaf: node.id }, [node]);
  return answer(node.id);
}

// Adds the result of a tool call. Answers are asked for when all calls have a result.
export function giveResult(assistant, results) {
  let parent = assistant.id;
  const added = results.map(({ callId, content }) => {
    const node = newNode(parent, "tool", { callId, content });
    parent = node.id;
    return node;
  });
  change({ leaf: parent }, added);
  return answer(parent);
}

// Asks all chosen models for answers to the message `parent`.
export function answer(parent) {
  const kept = settings.value;
  const { id } = chat.value.meta;
  const models = chosenModels();
  if (!models.length) models.push(""); // the server has told of no model yet
  const group = newId();
  const asked = [];
  let order = 0;
  for (const model of models) {
    const controller = new AbortController();
    const made = Array.from({ length: kept.answers }, () => {
      const fields = { model, group, order: order++, format: kept.format };
      return new Run(newNode(parent, "assistant", fields), id, controller);
    });
    asked.push({ model, made, controller });
  }
  return runAll(asked, parent, kept);
}

// Whether an answer was cut off, and the model can go on with it.
export function canContinue(node) {
  const isCut = ["error", "stopped", "interrupted", "length"].includes(node.finish);
  return isCut && Boolean(node.content) && !node.toolCalls?.length && !node.responseId;
}

// Asks the model for the rest of an answer.
export function continueAnswer(node) {
  const controller = new AbortController();
  const made = [new Run({ ...node, finish: undefined, error: undefined }, chat.value.meta.id, controller)];
  const kept = { ...settings.value, answers: 1, stored: false };
  return runAll([{ model: node.model, made, controller }], node.parent, kept);
}

// Asks again for an answer that failed. If nothing of it came and nothing follows, the new answer takes its place.
export function retry(node) {
  const isEmpty = !node.content && !node.toolCalls?.length && !childrenOf(chat.value.nodes, node.id).length;
  if (isEmpty) removeQuietly(node.id);
  return answer(node.parent);
}

// `asked` are the models with the answers that each of them writes.
async function runAll(asked, parent, kept) {
  const all = asked.flatMap(({ made }) => made);
  // An answer that is continued may have messages below it, which stay in sight.
  const leaf = chat.value.nodes.has(all[0].node.id) ? chat.value.meta.leaf : all[0].node.id;
  change({ leaf }, all.map(draftOf));
  runs.set(new Map([...runs.value, ...all.map((run) => [run.node.id, run])]));
  const { meta, nodes } = chat.value;
  const untell = all.map(tellWhileItGrows);
  const keeping = setInterval(() => {
    for (const run of all) if (runs.value.has(run.node.id)) keepDraft(run);
  }, KEEP_EVERY_MS);
  const conversation = { nodes, parent, system: meta.system };
  await Promise.all(asked.map((each) => runModel(conversation, kept, each)));
  clearInterval(keeping);
  for (const end of untell) end();
}

// Stops one answer, or all of the conversation that is shown.
export function stop(nodeId) {
  const { id } = chat.value.meta;
  for (const run of runs.value.values()) {
    if (run.conversation === id && (!nodeId || run.node.id === nodeId)) run.controller.abort();
  }
}

async function runModel(conversation, kept, { model, made, controller }) {
  let failure = null;
  try {
    await untilReady(made, controller.signal);
    const asked = model || chosenModels()[0];
    if (!asked) throw new Error("The server has no model that can chat.");
    for (const run of made) run.node = { ...run.node, model: asked };
    if (kept.stored) {
      await Promise.all(made.map((run) => respond(run, responseBody(conversation, kept, asked), controller.signal)));
    } else {
      await complete(made, chatBody(conversation, kept, asked, made[0].text), controller.signal);
    }
  } catch (error) {
    failure = error;
  }
  for (const run of made) finish(run, failure);
}

function finish(run, failure) {
  const fields = run.fields();
  if (failure && !fields.finish) {
    if (failure.name === "AbortError") fields.finish = "stopped";
    else Object.assign(fields, { finish: "error", error: failure.message });
    if (failure.requestId) fields.requestId = failure.requestId;
  } else if (!fields.finish) {
    Object.assign(fields, { finish: "error", error: "The connection ended before the answer did." });
  }
  const left = new Map(runs.value);
  left.delete(run.node.id);
  changeIn(run.conversation, {}, [{ ...run.node, ...fields }], [run.node.id]);
  runs.set(left);
  run.end();
}

// Waits while the server is not there or its model is loading.
async function untilReady(made, signal) {
  for (;;) {
    signal.throwIfAborted();
    const { state } = server.value;
    if (state === "ready") break;
    for (const run of made) {
      run.waitsFor = { loading: "Waiting for the model, which is loading", locked: "Waiting for the key" }[state] ?? "Waiting for the server";
      run.tell();
    }
    await pause(200, signal);
  }
  for (const run of made) run.begin();
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stopped = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stopped);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", stopped);
  });
}

// Sends the request. A server whose model is still loading answers 503, one that needs a key 401; it is asked again.
async function opened(path, body, made, signal) {
  for (let refusals = 0; ; ) {
    try {
      const response = await request(path, { body, signal });
      const warnings = response.headers.get("x-engine-warnings");
      if (warnings) toast(warnings);
      for (const run of made) run.requestId = response.headers.get("x-request-id") ?? "";
      return response;
    } catch (error) {
      if (error.status !== 503 && error.status !== 401) throw error;
      await refresh();
      if (isReady(body.model) && ++refusals > MAX_REFUSALS) throw error;
      await pause(RETRY_MS, signal);
      await untilReady(made, signal);
    }
  }
}

function isReady(model) {
  const { state, models } = server.value;
  return state === "ready" && models.find((each) => each.id === model)?.state !== "loading";
}

// Lets the page draw if reading has gone on for long.
function makeYielder() {
  let last = performance.now();
  return async () => {
    if (performance.now() - last < MAX_TASK_MS) return;
    await new Promise((resolve) => setTimeout(resolve, 0));
    last = performance.now();
  };
}

async function complete(made, body, signal) {
  const yielded = makeYielder();
  for await (const { data } of events(await opened("v1/chat/completions", body, made, signal))) {
    if (data.error) throw new Error(data.error.message ?? String(data.error));
    for (const choice of data.choices ?? []) readChoice(made[choice.index], choice);
    if (data.usage) {
      const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = data.usage;
      for (const run of made) run.usage = { prompt, cached: details?.cached_tokens ?? 0, completion: made.length === 1 ? completion : 0 };
    }
    await yielded();
  }
}

function readChoice(run, { delta = {}, logprobs, finish_reason: reason }) {
  if (!run) return;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) run.reasoning += thought;
  if (delta.content) run.text += delta.content;
  for (const call of delta.tool_calls ?? []) run.addCall(call);
  if (thought || delta.content || delta.tool_calls) run.noteToken(logprobs?.content?.length || 1);
  run.addTokens(logprobs?.content);
  if (reason) run.finish = reason;
  run.tell();
}

async function respond(run, body, signal) {
  const yielded = makeYielder();
  for await (const { data } of events(await opened("v1/responses", body, [run], signal))) {
    readEvent(run, data);
    run.tell();
    await yielded();
  }
}

const ENDS = { "response.completed": "stop", "response.incomplete": "length" };

function readEvent(run, data) {
  if (data.type === "response.created") run.responseId = data.response.id;
  else if (data.type === "response.output_text.delta") {
    run.text += data.delta;
    run.addTokens(data.logprobs);
    run.noteToken(data.logprobs?.length || 1);
  } else if (data.type === "response.reasoning_text.delta" || data.type === "response.reasoning_summary_text.delta") {
    run.reasoning += data.delta;
    run.noteToken();
  } else if (data.type === "response.output_item.done" && data.item.type === "function_call") {
    const { call_id: id, name, arguments: given } = data.item;
    run.toolCalls.push({ id, name, arguments: given });
    run.noteToken();
  } else if (data.type in ENDS) {
    const { usage } = data.response;
    run.finish = run.toolCalls.length ? "tool_calls" : ENDS[data.type];
    if (usage) run.usage = { prompt: usage.input_tokens, cached: usage.input_tokens_details?.cached_tokens ?? 0, completion: usage.output_tokens };
  } else if (data.type === "response.failed" || data.type === "error") {
    throw new Error(data.response?.error?.message ?? data.message ?? "The response failed.");
  }
}
