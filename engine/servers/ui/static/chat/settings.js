// The panel with all that is sent beside the messages.
import { getJson } from "../lib/api.js";
import { html, useEffect, useState } from "../lib/html.js";
import { IconButton } from "../lib/parts.js";
import { server } from "../lib/server.js";
import { useStore } from "../lib/store.js";
import { chosenModels } from "./generate.js";
import { PARAMS, parsed } from "./params.js";
import { formatOf, toolsOf, usualSampling } from "./request.js";
import { change, chat, settings } from "./state.js";

const MAX_MODELS = 4;
const EXAMPLE_TOOLS = JSON.stringify(
  [{ name: "get_weather", description: "The weather in a city.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }],
  null,
  2,
);
const EXAMPLE_SCHEMA = JSON.stringify(
  { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false },
  null,
  2,
);

const set = (fields) => settings.set({ ...settings.value, ...fields });

// What is wrong with the settings, or an empty text.
function problem(read) {
  try {
    read();
    return "";
  } catch (error) {
    return error.message;
  }
}

// The system prompt of the conversation that is shown, and of new ones.
function setSystem(system) {
  set({ system });
  change({ system });
}

const known = new Map(); // what the server uses where nothing is set, by the model

// The values of parameters that are not set, for the first model that answers.
function useDefaults() {
  useStore(server);
  const name = chosenModels()[0];
  const [defaults, setDefaults] = useState(known.get(name) ?? {});
  useEffect(() => {
    setDefaults(known.get(name) ?? {});
    if (!name || known.has(name)) return;
    getJson(`v1/models/${name.split("/").map(encodeURIComponent).join("/")}`).then(
      (model) => {
        known.set(name, model.defaults ?? {});
        setDefaults(known.get(name));
      },
      () => {}, // the fields then say "default"
    );
  }, [name]);
  return defaults;
}

// What a field without a value shows: the value in force.
function inForce({ name, hint, absent }, defaults) {
  const value = defaults[name];
  if (value === undefined) return hint ?? "default";
  const isNone = value === null || (typeof value === "object" && !Object.keys(value).length);
  if (isNone) return absent ?? "none";
  return Array.isArray(value) ? value.map((each) => JSON.stringify(each).slice(1, -1)).join("  ") : String(value);
}

export function Settings() {
  const defaults = { ...useDefaults(), ...usualSampling(chosenModels()[0]) };
  const kept = useStore(settings);
  const { meta } = useStore(chat);
  const changed = Object.values(kept.params).filter((each) => each !== "" && each !== false).length;
  return html`<div class="settings">
    <${Models} kept=${kept} />
    <label class="field">
      <span>System prompt</span>
      <textarea class="area" id="system" rows="3" placeholder="How the model should answer" value=${meta.system} onInput=${(event) => setSystem(event.target.value)}></textarea>
    </label>
    <section class="stack">
      <div class="row">
        <h3>Sampling</h3>
        <span class="grow"></span>
        ${changed > 0 && html`<button type="button" class="link" onClick=${() => set({ params: {} })}>Use defaults</button>`}
      </div>
      <div class="params">${PARAMS.filter((each) => each.main).map((each) => html`<${Param} key=${each.name} param=${each} kept=${kept} defaults=${defaults} />`)}</div>
      <details>
        <summary>More parameters</summary>
        <div class="params">${PARAMS.filter((each) => !each.main).map((each) => html`<${Param} key=${each.name} param=${each} kept=${kept} defaults=${defaults} />`)}</div>
      </details>
    </section>
    <${Format} kept=${kept} />
    <${Tools} kept=${kept} />
    <section class="stack">
      <h3>More</h3>
      <${Check} label="Probabilities of tokens" note="Shown by the button above the messages, or by the key p." checked=${kept.logprobs} onChange=${(logprobs) => set({ logprobs })} />
      <${Check} label="Keep conversations on the server" note="Messages go to /v1/responses. This browser keeps a copy, too." checked=${kept.stored} onChange=${(stored) => set({ stored })} />
      <${JsonField} id="extra" label="More fields of the request" value=${kept.extra} placeholder=${'{"priority": 1}'} onInput=${(extra) => set({ extra })} failure=${kept.extra.trim() && problem(() => JSON.parse(kept.extra))} />
    </section>
  </div>`;
}

function Models({ kept }) {
  const { models } = useStore(server);
  const chosen = chosenModels();
  const change = (index, id) => set({ models: chosen.map((each, at) => (at === index ? id : each)) });
  const label = (model) => (model.id === model.backend ? model.id : `${model.id} · ${model.backend}`);
  return html`<section class="stack">
    ${chosen.map(
      (id, index) => html`<div class="row model-row" key=${index}>
        <label class="field grow">
          <span>${index ? `Beside it` : "Model"}</span>
          <select class="select" value=${id} onChange=${(event) => change(index, event.target.value)}>
            ${models.map((each) => html`<option value=${each.id} selected=${each.id === id}>${label(each)}</option>`)}
          </select>
        </label>
        ${index > 0 && html`<${IconButton} icon="close" label=${`Remove ${id}`} onClick=${() => set({ models: chosen.filter((_, at) => at !== index) })} />`}
      </div>`,
    )}
    <div class="row">
      <label class="field answers"><span>Answers of each</span><input class="input" type="number" min="1" max="8" value=${kept.answers} onInput=${(event) => set({ answers: Math.min(Math.max(Math.trunc(Number(event.target.value)) || 1, 1), 8) })} /></label>
      <span class="grow"></span>
      <button type="button" class="btn compare" disabled=${!chosen.length || chosen.length >= MAX_MODELS} onClick=${() => set({ models: [...chosen, (models.find((each) => !chosen.includes(each.id)) ?? models[0]).id] })}>Compare with another</button>
    </div>
  </section>`;
}

function Param({ param, kept, defaults }) {
  const { name, label, kind, hint, min, max, step } = param;
  const value = kept.params[name] ?? "";
  const onInput = (next) => set({ params: { ...kept.params, [name]: next } });
  const failure = problem(() => parsed(param, value));
  if (kind === "flag") return html`<${Check} label=${label} checked=${Boolean(value)} onChange=${onInput} />`;
  const shared = { id: `param-${name}`, title: hint, value, "aria-invalid": Boolean(failure), onInput: (event) => onInput(event.target.value) };
  const isNumber = kind === "number" || kind === "whole";
  return html`<label class=${isNumber ? "field" : "field wide"}>
    <span title=${hint}>${label}</span>
    ${isNumber
      ? html`<input class="input num" type="number" placeholder=${inForce(param, defaults)} min=${min} max=${max} step=${step ?? 1} ...${shared} />`
      : html`<textarea class="area mono" rows="1" placeholder=${inForce(param, defaults)} ...${shared}></textarea>`}
    ${failure && html`<span class="failure">${failure}</span>`}
  </label>`;
}

function Check({ label, note, checked, onChange }) {
  return html`<label class="check"><input type="checkbox" checked=${checked} onChange=${(event) => onChange(event.target.checked)} /><span>${label}${note && html`<small>${note}</small>`}</span></label>`;
}

function JsonField({ id, label, value, placeholder, onInput, failure, example }) {
  return html`<div class="field">
    <span class="row"><label class="label" for=${id}>${label}</label><span class="grow"></span>${example && !value.trim() && html`<button type="button" class="link" onClick=${() => onInput(example)}>Example</button>`}</span>
    <textarea class="area mono" id=${id} rows=${value.trim() ? 6 : 2} spellcheck="false" placeholder=${placeholder} value=${value} aria-invalid=${Boolean(failure)} onInput=${(event) => onInput(event.target.value)}></textarea>
    ${failure && html`<span class="failure">${failure}</span>`}
  </div>`;
}

function Format({ kept }) {
  return html`<section class="stack">
    <label class="field">
      <span>Format of the answer</span>
      <select class="select" id="format" value=${kept.format} onChange=${(event) => set({ format: event.target.value })}>
        <option value="text">Text</option>
        <option value="json_object">JSON</option>
        <option value="json_schema">JSON by a schema</option>
      </select>
    </label>
    ${kept.format === "json_schema" && html`<${JsonField} id="schema" label="JSON schema" value=${kept.schema} example=${EXAMPLE_SCHEMA} placeholder=${'{"type": "object"}'} onInput=${(schema) => set({ schema })} failure=${kept.schema.trim() && problem(() => formatOf(kept))} />`}
  </section>`;
}

function Tools({ kept }) {
  const [names, setNames] = useState([]);
  const failure = problem(() => toolsOf(kept));
  useEffect(() => setNames(failure ? [] : toolsOf(kept).map((each) => each.function?.name ?? "?")), [kept.tools]);
  return html`<section class="stack">
    <${JsonField} id="tools" label="Tools" value=${kept.tools} example=${EXAMPLE_TOOLS} placeholder="A list of functions with JSON schemas" onInput=${(tools) => set({ tools })} failure=${failure} />
    ${names.length > 0 &&
    html`<label class="field"
      ><span>Use of ${names.join(", ")}</span>
      <select class="select" id="tool-choice" value=${kept.toolChoice} onChange=${(event) => set({ toolChoice: event.target.value })}>
        <option value="auto">If the model wants to</option>
        <option value="required">Always</option>
        <option value="none">Never</option>
      </select></label
    >`}
  </section>`;
}
