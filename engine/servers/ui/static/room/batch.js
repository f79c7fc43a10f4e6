// The batch: one bar for each running sequence, and the queue below it.
import { html } from "../lib/html.js";
import { urlOf } from "../lib/router.js";
import { count, seconds, shortId } from "./format.js";

const BLOCKED = {
  slots: "The batch is full.",
  budget: "Running requests use the whole token budget of the steps.",
  blocks: "Too few KV blocks are free.",
  step: "They are scheduled with the next step.",
};
const MAX_SHOWN = 24;

export function Batch({ engine, tenants }) {
  const rows = engine.running;
  const widest = Math.max(1, ...rows.map((each) => each.num_prompt + each.max_tokens));
  const scale = (tokens) => `${(100 * tokens) / widest}%`;
  return html`<section class="card batch" aria-label=${`Batch of ${engine.name}`}>
    <header class="card-head">
      <h2>Batch</h2>
      <span class="muted">${engine.name}</span>
      <span class="grow"></span>
      <span class="legend">
        <span><i class="swatch c2"></i>cached</span>
        <span><i class="swatch c3"></i>prefill</span>
        <span><i class="swatch c1"></i>generated</span>
      </span>
    </header>
    <ul class="lanes">
      ${rows.slice(0, MAX_SHOWN).map((row) => html`<${Lane} key=${`${row.request_id}-${row.choice}`} row=${row} scale=${scale} tenant=${tenants[row.tenant]} />`)}
    </ul>
    ${rows.length === 0 && html`<p class="empty">No request is running. ${engine.max_slots} places are free.</p>`}
    ${rows.length > MAX_SHOWN && html`<p class="muted more">and ${rows.length - MAX_SHOWN} more</p>`}
    <${Queue} engine=${engine} tenants=${tenants} />
  </section>`;
}

function Lane({ row, scale, tenant }) {
  const computed = Math.min(row.num_computed, row.num_prompt);
  const prefill = Math.max(computed - row.num_cached, 0);
  const inPrefill = row.num_generated === 0;
  const what = inPrefill ? `${count(computed)} of ${count(row.num_prompt)} prompt tokens` : `${count(row.num_generated)} of at most ${count(row.max_tokens)} tokens`;
  return html`<li class="lane">
    <span class="lane-name mono" title=${row.request_id}>${shortId(row.request_id)}${row.choice ? ` #${row.choice}` : ""}</span>
    <span class="track" role="img" aria-label=${what}>
      <span class="whole" style=${{ width: scale(row.num_prompt + row.max_tokens) }}></span>
      <span class="prompt" style=${{ width: scale(row.num_prompt) }}></span>
      <span class="seg c2" style=${{ width: scale(Math.min(row.num_cached, computed)) }}></span>
      <span class=${`seg c3 ${inPrefill ? "moving" : ""}`} style=${{ width: scale(prefill), left: scale(Math.min(row.num_cached, computed)) }}></span>
      <span class="seg c1" style=${{ width: scale(row.num_generated), left: scale(row.num_prompt) }}></span>
    </span>
    <span class="lane-what num">${what}</span>
    <span class="lane-meta num muted">${tenant && tenant !== "anyone" ? `${tenant} · ` : ""}${seconds(row.seconds)}${row.num_preemptions ? ` · preempted ${row.num_preemptions}×` : ""}</span>
  </li>`;
}

function Queue({ engine, tenants }) {
  const waiting = engine.waiting;
  if (!waiting.length) return null;
  const longest = Math.max(1, ...waiting.map((each) => each.num_prompt));
  const oldest = Math.max(...waiting.map((each) => each.seconds));
  return html`<div class="queue">
    <p><b class="num">${waiting.length}</b> waiting, the longest for <b class="num">${seconds(oldest)}</b>. ${BLOCKED[engine.blocked_by] ?? ""}</p>
    <div class="queue-bars" role="img" aria-label=${`${waiting.length} waiting requests`}>
      ${waiting.map((each) => html`<span class=${each.is_held ? "held" : ""} style=${{ height: `${20 + (80 * each.num_prompt) / longest}%` }} title=${`${each.request_id}: ${each.num_prompt} tokens, waiting ${seconds(each.seconds)}${tenants[each.tenant] ? `, ${tenants[each.tenant]}` : ""}`}></span>`)}
    </div>
  </div>`;
}
