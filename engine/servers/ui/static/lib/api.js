// Requests to the server that served this page. The API key is kept for the session of this tab alone.
import { Store } from "./store.js";

// The URL below which all API paths are. It has a prefix if a proxy adds one.
export const ROOT = new URL("../../../", import.meta.url);

const KEY = "engine.key";
let key = sessionStorage.getItem(KEY) ?? "";
// Whether the server has refused a request because of its key: "", "missing" or "wrong".
export const keyNeeded = new Store("");
// How many connections to the server have failed or were lost.
export const numLost = new Store(0);

export function setKey(given) {
  key = given.trim();
  sessionStorage.setItem(KEY, key);
  keyNeeded.set("");
}

export function hasKey() {
  return key !== "";
}

export class ApiError extends Error {
  constructor(status, fields, requestId) {
    super(fields.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = fields.code ?? null;
    this.param = fields.param ?? null;
    this.requestId = requestId;
  }
}

// Sends a request and returns its response, whose status is a success. `body` becomes JSON.
export async function request(path, { method, body, signal, headers } = {}) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), ROOT), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
    });
  } catch (error) {
    throw lost(error, "The server can't be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401) keyNeeded.set(key ? "wrong" : "missing");
  const text = await response.text();
  let fields = {};
  try {
    const parsed = JSON.parse(text);
    fields = typeof parsed.error === "string" ? { message: parsed.error } : (parsed.error ?? {});
  } catch {
    fields = { message: text.slice(0, 500) || undefined };
  }
  throw new ApiError(response.status, fields, response.headers.get("x-request-id"));
}

// The error of a connection that has failed.
function lost(error, message) {
  if (error.name === "AbortError") return error;
  numLost.set((number) => number + 1);
  return new ApiError(0, { message }, null);
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

export async function postJson(path, body, options) {
  return (await request(path, { ...options, body })).json();
}

// Yields `{ event, data }` for each server-sent event of a response. `data` is parsed JSON. Ends at
// "[DONE]" or when the response ends.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw lost(error, "The connection to the server was lost.");
      });
      if (done) return;
      pending += value.includes("\r") ? value.replace(/\r\n?/g, "\n") : value;
      let end;
      while ((end = pending.indexOf("\n\n")) >= 0) {
        const found = parseEvent(pending.slice(0, end));
        pending = pending.slice(end + 2);
        if (found === null) continue;
        if (found.data === "[DONE]") return;
        yield { event: found.event, data: JSON.parse(found.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
