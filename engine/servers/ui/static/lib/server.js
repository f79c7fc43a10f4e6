// What the server serves, and whether it is ready: one store that all pages share.
import { getJson, hasKey, keyNeeded, numLost } from "./api.js";
import { Store } from "./store.js";

const READY_EVERY_MS = 3000;
const WAITING_EVERY_MS = 700;
// A server that takes longer to tell of its models is down, too.
const MAX_WAIT_MS = 8000;

// What a server reports for a model whose context length another server does not tell.
const UNKNOWN_CONTEXT = 2 ** 20;

// The context length of a model, or null if nobody knows it.
export const contextOf = (model) => (model && model.max_model_len > 0 && model.max_model_len !== UNKNOWN_CONTEXT ? model.max_model_len : null);

// `state` is "connecting", "loading", "ready", "locked" (the key is missing) or "down".
export const server = new Store({ state: "connecting", models: [], detail: "" });

let timer = 0;

let looking = null;

// Asks the server how it is. Resolves when `server` says so.
export function refresh() {
  looking ??= lookAgain().finally(() => (looking = null));
  return looking;
}

async function lookAgain() {
  clearTimeout(timer);
  const next = await look();
  // Components are rendered again only if something has changed.
  if (JSON.stringify(next) !== JSON.stringify(server.value)) server.set(next);
  if (next.state !== "locked" && !document.hidden) {
    timer = setTimeout(refresh, next.state === "ready" ? READY_EVERY_MS : WAITING_EVERY_MS);
  }
}

async function look() {
  try {
    const { data } = await getJson("v1/models", { signal: AbortSignal.timeout(MAX_WAIT_MS) });
    const models = data.filter((each) => each.capabilities.includes("chat") || each.capabilities.includes("completions"));
    const usable = models.length ? models : data;
    const loading = usable.every((each) => each.state === "loading");
    return { state: loading ? "loading" : "ready", models: usable, detail: "" };
  } catch (error) {
    if (error.status === 401) return { ...server.value, state: "locked", detail: error.message };
    return { ...server.value, state: "down", detail: error.message };
  }
}

keyNeeded.watch((needed) => {
  if (!needed && hasKey()) Promise.resolve(looking).then(refresh);
});
// A connection that was lost may be that of one answer alone, so the server is asked at once.
numLost.watch(() => looking ?? refresh());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
