// The tokens of a prompt, the table of the logit lens, and the attention heads of a layer.
import { html, useEffect, useRef } from "../lib/html.js";
import { choose, patternKey } from "./reading.js";

const MAX_SHADE = 45; // percent; text stays readable on it
const NUM_LARGEST = 6;

const percent = (share) => (share >= 0.9995 ? "100%" : share < 0.0005 ? "0.0%" : `${(100 * share).toFixed(1)}%`);
// Small weights matter, too: a weight of 1 % has a tenth of the full shade.
const shade = (share) => ({ background: `color-mix(in srgb, var(--c1) ${(MAX_SHADE * Math.sqrt(share)).toFixed(1)}%, transparent)` });
// Spaces and ends of lines as signs, so that tokens can be told apart.
const SIGNS = { " ": "·", "\n": "⏎", "\t": "⇥" };
export const visible = (text) => (text === "" ? "∅" : text.replace(/[\s\p{C}]/gu, (sign) => SIGNS[sign] ?? `\\u${sign.codePointAt(0).toString(16)}`));

// The arrow keys that `steps` names move between the buttons of a group, of which one is in the
// order of the Tab key.
function moveFocus(event, steps, at, count, onMove) {
  const step = steps[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = Math.max(0, Math.min(count - 1, Number.isFinite(step) ? at + step : step > 0 ? count - 1 : 0));
  onMove(next);
  event.currentTarget.querySelectorAll("button")[next]?.focus();
}

const ENDS = { Home: -Infinity, End: Infinity };

// Tokens before the chosen one are shaded by the attention that it pays to them.
export function Tokens({ shown, weights }) {
  const { tokens, position } = shown;
  const onKey = (event) => moveFocus(event, { ArrowLeft: -1, ArrowRight: 1, ...ENDS }, position, tokens.length, (next) => choose({ position: next }));
  return html`<div class="lens-tokens" role="group" aria-label="Tokens of the prompt; the arrow keys move between them" onKeyDown=${onKey}>
    ${tokens.map((text, index) => {
      const weight = weights?.[index];
      const isChosen = index === position;
      return html`<button
        type="button"
        key=${index}
        class="lens-token mono"
        tabindex=${isChosen ? 0 : -1}
        aria-pressed=${isChosen}
        aria-label=${`Token ${index}: ${text.trim() || visible(text)}`}
        title=${weight === undefined || index > position ? `token ${index}` : `token ${index}: ${percent(weight)} of the attention`}
        style=${weight === undefined || index > position ? {} : shade(weight)}
        onClick=${() => choose({ position: index })}
      >${visible(text)}</button>`;
    })}
  </div>`;
}

export function LensTable({ shown }) {
  const { position, layer, lens, failures } = shown;
  const rows = lens.get(position);
  if (failures.has(position)) return html`<p class="notice bad" role="alert">${failures.get(position)}</p>`;
  if (!rows) return html`<p class="empty" role="status">Reading…</p>`;
  const onKey = (event) => {
    const at = rows.findIndex((each) => each.layer === layer);
    // The last layer is on top, so the upper row has the higher number.
    const last = rows.length - 1;
    moveFocus(event, { ArrowUp: -1, ArrowDown: 1, ...ENDS }, last - at, rows.length, (next) => choose({ layer: rows[last - next].layer }));
  };
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Next tokens by layer">
    <table class="lens-table">
      <caption class="sr">The likeliest next tokens after each layer, at token ${position}</caption>
      <thead><tr><th scope="col">Layer</th>${rows[0].top.map((_, rank) => html`<th scope="col">${rank + 1}.</th>`)}</tr></thead>
      <tbody onKeyDown=${onKey}>
        ${[...rows].reverse().map(
          (row) => html`<tr key=${row.layer} class=${row.layer === layer ? "chosen" : ""}>
            <th scope="row"><button type="button" class="lens-layer num" tabindex=${row.layer === layer ? 0 : -1} aria-pressed=${row.layer === layer} aria-label=${`Attention of layer ${row.layer}`} onClick=${() => choose({ layer: row.layer })}>${row.layer}</button></th>
            ${row.top.map((each) => html`<td style=${shade(Math.exp(each.logprob))} title=${`${JSON.stringify(each.token)}, id ${each.id}`}><span class="lens-cell"><code>${visible(each.token)}</code><span class="num">${percent(Math.exp(each.logprob))}</span></span></td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

// The weights of the chosen head for all positions, or the mean of all heads.
export function chosenWeights({ patterns, layer, position, head }) {
  const heads = patterns.get(patternKey(layer, position));
  if (!heads) return null;
  if (head !== null && heads[head]) return heads[head];
  return heads[0].map((_, index) => heads.reduce((sum, each) => sum + each[index], 0) / heads.length);
}

export function Heads({ shown, weights }) {
  const { patterns, failures, layer, position, head, tokens } = shown;
  const key = patternKey(layer, position);
  const heads = patterns.get(key);
  if (failures.has(key)) return html`<p class="notice bad" role="alert">${failures.get(key)}</p>`;
  if (!heads) return html`<p class="empty" role="status">Reading…</p>`;
  const mean = chosenWeights({ ...shown, head: null });
  const rows = [["mean", null, mean], ...heads.map((each, index) => [String(index), index, each])];
  const at = rows.findIndex((each) => each[1] === head);
  const onKey = (event) => moveFocus(event, { ArrowUp: -1, ArrowDown: 1, ...ENDS }, Math.max(at, 0), rows.length, (next) => choose({ head: rows[next][1] }));
  return html`<div class="lens-heads" role="group" aria-label="Heads; the arrow keys move between them" onKeyDown=${onKey}>
      ${rows.map(([name, index, values]) => {
        const most = largest(values, position, 1)[0];
        const isChosen = index === (at < 0 ? null : head);
        return html`<button type="button" key=${name} class="lens-head" tabindex=${isChosen ? 0 : -1} aria-pressed=${isChosen} onClick=${() => choose({ head: index })}>
          <span class="lens-head-name num">${index !== null && html`<span class="sr">Head </span>`}${name}</span>
          <${Strip} values=${values.slice(0, position + 1)} />
          <span class="lens-most"><code>${visible(tokens[most])}</code><span class="num">${percent(values[most])}</span></span>
        </button>`;
      })}
    </div>
    <h3>${head === null || at < 0 ? "Mean of all heads" : `Head ${head}`}: where “${visible(tokens[position])}” looks</h3>
    <ol class="lens-largest">
      ${largest(weights, position, NUM_LARGEST).map((index) => html`<li key=${index}><span class="num muted">${index}</span><code>${visible(tokens[index])}</code><span class="lens-bar"><span style=${{ width: `${100 * weights[index]}%` }}></span></span><span class="num">${percent(weights[index])}</span></li>`)}
    </ol>`;
}

function largest(values, position, count) {
  const order = Array.from({ length: position + 1 }, (_, index) => index);
  return order.sort((a, b) => values[b] - values[a]).slice(0, count);
}

// One pixel for each position, stretched to the width that there is.
function Strip({ values }) {
  const canvas = useRef(null);
  useEffect(() => {
    const draw = () => {
      const { current } = canvas;
      const paint = current.getContext("2d");
      paint.clearRect(0, 0, current.width, 1);
      paint.fillStyle = getComputedStyle(current).color;
      values.forEach((value, index) => {
        paint.globalAlpha = Math.sqrt(value);
        paint.fillRect(index, 0, 1, 1);
      });
    };
    draw();
    addEventListener("themechange", draw);
    return () => removeEventListener("themechange", draw);
  }, [values]);
  return html`<canvas ref=${canvas} class="lens-strip" width=${values.length} height="1" aria-hidden="true"></canvas>`;
}
