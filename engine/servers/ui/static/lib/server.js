// What the server serves, and whether it is ready: one store that all pages share.
import { getJson, hasKey, keyNeeded } from "./api.js";
import { Store } from "./store.js";

const READY_EVERY_MS = 15000;
const WAITING_EVERY_MS = 700;

// `state` is "connecting", "loading", "ready", "locked" (the key is missing) or "down".
export const server = new Store({ state: "connecting", models: [], detail: "" });

let timer = 0;

export async function refresh() {
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
    const { data } = await getJson("v1/models");
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
  if (!needed && hasKey()) refresh();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
