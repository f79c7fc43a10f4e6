// What is written and not sent yet. Each conversation has its own, and all new ones share one. This tab keeps the texts.
import { Store } from "../lib/store.js";

const KEPT = "engine.drafts";
const NEW = "new";
export const NOTHING = { text: "", images: [], files: [] };

const drafts = new Map();
try {
  for (const [key, text] of Object.entries(JSON.parse(sessionStorage.getItem(KEPT)) ?? {})) drafts.set(key, { ...NOTHING, text: String(text) });
} catch {
  sessionStorage.removeItem(KEPT); // it is not JSON
}

// The draft of the conversation that is shown, with the `key` of that conversation.
export const draft = new Store({ ...(drafts.get(NEW) ?? NOTHING), key: NEW });

// Shows the draft of `conversation`, which is null for a new one.
export function showDraft(conversation) {
  const key = conversation ?? NEW;
  if (key !== draft.value.key) draft.set({ ...(drafts.get(key) ?? NOTHING), key });
}

// Changes fields of a draft: of the one that is shown, unless `key` names another.
export function setDraft(change, key = draft.value.key) {
  const old = drafts.get(key) ?? NOTHING;
  const next = { ...old, ...change(old) };
  if (next.text || next.images.length || next.files.length) drafts.set(key, next);
  else drafts.delete(key);
  if (key === draft.value.key) draft.set({ ...next, key });
  sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries([...drafts].map(([name, { text }]) => [name, text]))));
}
