// The waterfall of a request: its stages, chunks of prefill and preemptions on one time axis.
import { html } from "../lib/html.js";
import { count, seconds } from "./format.js";

// A short name and a colour for each cause.
export const CAUSES = {
  refused: ["refused", "c6"],
  upload: ["slow upload", "c6"],
  client: ["slow client", "c6"],
  replica_busy: ["replicas busy", "c6"],
  replica_failed: ["replica failed", "c6"],
  load: ["model loading", "c6"],
  tokenize: ["tokenizing", "c5"],
  grammar: ["grammar", "c4"],
  mask: ["grammar masks", "c4"],
  images: ["images", "c4"],
  step: ["running step", "c6"],
  slots: ["batch full", "c6"],
  budget: ["token budget", "c6"],
  blocks: ["KV blocks", "c6"],
  turn: ["tenant's turn", "c6"],
  priority: ["priority", "c6"],
  prefix: ["same prefix", "c5"],
  tier: ["cache tier", "c5"],
  prefill_node: ["prefill node", "c5"],
  cold: ["prefill", "c3"],
  divergence: ["changed prompt", "c3"],
  eviction: ["evicted", "c6"],
  cache_off: ["cache off", "c3"],
  shared_prefill: ["shared prefill", "c6"],
  preemption: ["preempted", "c6"],
  mixed: ["others' prefill", "c6"],
  decode: ["generation", "c1"],
  backend: ["backend", "c1"],
  revival: ["engine died", "c6"],
  other: ["other", "faint"],
};
const STAGES = {
  queue: "c6",
  prefill: "c3",
  decode: "c1",
  answer: "c1",
  send: "c5",
  receive: "c5",
  tokenize: "c5",
  route: "c4",
  "grammar check": "c4",
  "compile grammar": "c4",
  "encode images": "c4",
};
const TICKS = 5;

export function Waterfall({ told }) {
  const total = Math.max(told.seconds, 1e-6);
  const rows = told.spans.filter((each) => each.end_s - each.start_s >= total / 2000).map((each) => ({ ...each, colour: STAGES[each.name] ?? "faint", note: "" }));
  for (const choice of told.choices) rows.push(...inside(choice, told.choices.length > 1));
  return html`<h3>Waterfall</h3>
    <div class="waterfall" role="table" aria-label="Stages of the request">
      <div class="fall-axis" aria-hidden="true"><span></span><span class="ticks">${Array.from({ length: TICKS + 1 }, (_, index) => html`<i style=${{ left: `${(100 * index) / TICKS}%` }}><span>${index ? seconds((total * index) / TICKS) : "0"}</span></i>`)}</span></div>
      ${rows.map(
        (each) => html`<div class=${`fall ${each.sub ? "sub" : ""}`} role="row">
          <span class="fall-name" role="rowheader">${each.name}</span>
          <span class="fall-track" role="cell">
            ${each.parts ? each.parts.map((part) => html`<${Bar} ...${part} total=${total} colour=${each.colour} />`) : html`<${Bar} start_s=${each.start_s} end_s=${each.end_s} total=${total} colour=${each.colour} />`}
          </span>
          <span class="fall-time num" role="cell">${each.note || seconds(each.end_s - each.start_s)}</span>
        </div>`,
      )}
    </div>`;
}

function Bar({ start_s, end_s, total, colour, title }) {
  const left = (100 * start_s) / total;
  const width = Math.max((100 * ((end_s ?? total) - start_s)) / total, 0.25);
  return html`<span class=${`seg ${colour}`} style=${{ left: `${left}%`, width: `${width}%` }} title=${title ?? seconds((end_s ?? total) - start_s)}></span>`;
}

// The rows of one choice: its chunks of prefill and its preemptions.
function inside(choice, many) {
  const suffix = many ? ` #${choice.choice}` : "";
  const rows = [];
  if (choice.prefill.length > 1) {
    const parts = choice.prefill.map((each) => ({ ...each, title: `${each.tokens} tokens in ${seconds(each.end_s - each.start_s)}, in a batch of ${each.batch_size} with ${each.batch_tokens} tokens` }));
    rows.push({ name: `prefill chunks${suffix}`, colour: "c3", sub: true, parts, note: `${count(choice.prefill.length)} chunks` });
  }
  if (choice.preemptions.length) {
    const parts = choice.preemptions.map((each) => ({ ...each, title: `${each.lost_tokens} tokens were computed again` }));
    rows.push({ name: `preempted${suffix}`, colour: "c6", sub: true, parts, note: `${choice.preemptions.length}×` });
  }
  return rows;
}
