// The page at /ui/lens: what the model makes of a token in each layer, and where its heads look.
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../lib/html.js";
import { loadStyle } from "../lib/parts.js";
import { server } from "../lib/server.js";
import { useShortcuts } from "../lib/shortcuts.js";
import { useStore } from "../lib/store.js";
import { choose, read, reading } from "../lens/reading.js";
import { chosenWeights, Heads, LensTable, Tokens, visible } from "../lens/views.js";

await loadStyle(new URL("../lens/lens.css", import.meta.url).href);

const EXAMPLE = "The capital of France is";

export default function Lens() {
  const shown = useStore(reading);
  const { state, models } = useStore(server);
  const readable = models.filter((each) => each.capabilities.includes("interp"));
  const weights = useMemo(() => chosenWeights(shown), [shown]);
  return html`<main class="page lens" tabindex="0">
    <div class="page-body">
      <h1>Lens</h1>
      <p class="muted lens-intro">
        What happens inside of the model when it reads a text. The <b>logit lens</b> shows, layer by layer, which token would come next if the model ended
        there: the answer often appears only in the upper layers. <b>Attention</b> shows which earlier tokens each head looks at.
      </p>
      ${state === "ready" && !readable.length && html`<p class="notice" role="status">No model of this server shows its activations. Decoder models on the native, torch and jax backends do.</p>`}
      <${Prompt} shown=${shown} models=${readable} />
      ${shown.error && html`<p class="notice bad" role="alert">${shown.error.message}</p>`}
      ${shown.tokens.length > 0 && html`<${Reading} shown=${shown} weights=${weights} />`}
    </div>
  </main>`;
}

function Prompt({ shown, models }) {
  const [prompt, setPrompt] = useState(shown.prompt || EXAMPLE);
  const [model, setModel] = useState(shown.model);
  const form = useRef(null);
  const isFirst = useRef(!shown.tokens.length && !shown.error);
  const name = models.some((each) => each.id === model) ? model : (models[0]?.id ?? "");
  const onSubmit = (event) => {
    event.preventDefault();
    if (prompt && name) read(prompt, name);
  };
  const submit = useCallback(() => form.current.requestSubmit(), []);
  // The page starts with an example, so that it is never empty.
  useEffect(() => {
    if (!name || !isFirst.current) return;
    isFirst.current = false;
    read(prompt, name);
  }, [name]);
  const onKey = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  const shortcuts = useMemo(
    () => [
      { keys: "Enter", text: "Read the prompt (Shift+Enter: a new line)" },
      { keys: "ArrowLeft", text: "Token before (among the tokens)" },
      { keys: "ArrowRight", text: "Token after (among the tokens)" },
      { keys: "ArrowUp", text: "Layer or head above (in its list)" },
      { keys: "ArrowDown", text: "Layer or head below (in its list)" },
    ],
    [submit],
  );
  useShortcuts("Lens", shortcuts);
  return html`<form class="card lens-form" ref=${form} onSubmit=${onSubmit}>
    <label class="field">
      <span>Prompt</span>
      <textarea class="area mono" id="lens-prompt" rows="3" value=${prompt} onInput=${(event) => setPrompt(event.target.value)} onKeyDown=${onKey}></textarea>
    </label>
    <div class="row">
      ${models.length > 1 && html`<label class="sr" for="lens-model">Model</label><select class="select lens-select" id="lens-model" value=${name} onChange=${(event) => setModel(event.target.value)}>${models.map((each) => html`<option value=${each.id}>${each.id}</option>`)}</select>`}
      <span class="grow"></span>
      <button class="btn primary" disabled=${!prompt || !name || shown.isBusy}>${shown.isBusy ? "Reading…" : "Read"}</button>
    </div>
  </form>`;
}

function Reading({ shown, weights }) {
  const { tokens, position, next, layers, layer } = shown;
  return html`<section class="card" aria-label="Tokens">
      <header class="card-head">
        <h2>Tokens</h2>
        <span class="muted">Choose one. After the last comes <code>${visible(next)}</code>.</span>
      </header>
      <${Tokens} shown=${shown} weights=${weights} />
    </section>
    <div class="lens-columns">
      <section class="card" aria-label="Logit lens">
        <header class="card-head"><h2>Logit lens</h2><span class="muted">of token ${position}, <code>${visible(tokens[position])}</code>: what would come next if the model ended after a layer</span></header>
        <${LensTable} shown=${shown} />
      </section>
      <section class="card" aria-label="Attention">
        <header class="card-head">
          <h2>Attention</h2>
          <label class="row lens-at">
            <span class="muted">layer</span>
            <select class="select lens-select" id="lens-layer" value=${String(layer)} onChange=${(event) => choose({ layer: Number(event.target.value) })}>${layers.map((each) => html`<option value=${String(each)}>${each}</option>`)}</select>
          </label>
        </header>
        <${Heads} shown=${shown} weights=${weights} />
      </section>
    </div>`;
}
