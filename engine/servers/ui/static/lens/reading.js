// What the page Lens has read of a prompt. It asks /v1/interp/run alone, and nothing twice.
import { postJson } from "../lib/api.js";
import { Store } from "../lib/store.js";

const TOP = 5;

// `position`, `layer` and `head` are what the user has chosen; head null is the mean of all heads.
// `lens` has the rows of each position that was read, `patterns` the weights (heads, positions) by
// "layer position", and `failures` what the server refused, by the same keys.
export const reading = new Store({ prompt: "", model: "", isBusy: false, error: null, tokens: [], next: "", layers: [], position: 0, layer: 0, head: null, lens: new Map(), patterns: new Map(), failures: new Map() });

let current = new AbortController();

const change = (fields) => reading.set({ ...reading.value, ...fields });
const withEntry = (map, key, value) => new Map(map).set(key, value);
export const patternKey = (layer, position) => `${layer} ${position}`;

function ask(interp) {
  const { prompt, model } = reading.value;
  return postJson("v1/interp/run", { prompt, model: model || undefined, interp }, { signal: current.signal });
}

// Computes the prompt, and reads the lens of its last token.
export async function read(prompt, model) {
  current.abort();
  current = new AbortController();
  const { signal } = current;
  change({ prompt, model, isBusy: true, error: null });
  try {
    const answer = await ask({ lens: { layers: "all", top: TOP, positions: "last" } });
    if (signal.aborted) return;
    const { tokens, num_prompt, lens } = answer.interp;
    const layers = lens.map((each) => each.layer);
    const { layer, head } = reading.value;
    const isKnown = reading.value.tokens.length && layers.includes(layer);
    const position = num_prompt - 1;
    change({ isBusy: false, tokens: tokens.slice(0, num_prompt), next: answer.next_token.text, layers, position, layer: isKnown ? layer : layers[layers.length >> 1], head: isKnown ? head : null, lens: new Map([[position, lens]]), patterns: new Map(), failures: new Map() });
    load();
  } catch (error) {
    if (!signal.aborted) change({ isBusy: false, error, tokens: [] });
  }
}

// Changes the chosen position, layer or head, and reads what is not known of them.
export function choose(fields) {
  change(fields);
  if (fields.head === undefined) load();
}

async function load() {
  const { position, layer, lens, patterns, failures } = reading.value;
  const key = patternKey(layer, position);
  const { signal } = current;
  const isNew = (map, name) => !map.has(name) && !failures.has(name);
  const take = async (name, interp, keep) => {
    try {
      const answer = await ask(interp);
      if (!signal.aborted) keep(answer.interp);
    } catch (error) {
      if (!signal.aborted) change({ failures: withEntry(reading.value.failures, name, error.message) });
    }
  };
  const wanted = [];
  if (isNew(lens, position)) wanted.push(take(position, { lens: { layers: "all", top: TOP, positions: [position] } }, (told) => change({ lens: withEntry(reading.value.lens, position, told.lens) })));
  if (isNew(patterns, key)) wanted.push(take(key, { attention: { layers: [layer], positions: [position] } }, (told) => keepPattern(key, told)));
  await Promise.all(wanted);
}

function keepPattern(key, told) {
  if (!told.inline) {
    const message = "The weights of this prompt are too many to be sent here. Use a shorter prompt, or raise interp.inline_kb.";
    return change({ failures: withEntry(reading.value.failures, key, message) });
  }
  change({ patterns: withEntry(reading.value.patterns, key, told.attention[0].values[0]) });
}
