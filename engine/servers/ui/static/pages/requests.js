// The page at /ui/requests: the last requests, and why each took as long as it did.
import { getJson, keyNeeded } from "../lib/api.js";
import { html, useEffect, useState } from "../lib/html.js";
import { copyText, IconButton, loadStyle } from "../lib/parts.js";
import { go, route, urlOf } from "../lib/router.js";
import { useStore } from "../lib/store.js";
import { count, seconds, shortId } from "../room/format.js";
import { CAUSES, Waterfall } from "../room/waterfall.js";

await loadStyle(new URL("../room/room.css", import.meta.url).href);
await loadStyle(new URL("../room/requests.css", import.meta.url).href);

const REFRESH_MS = 3000;

function useJson(path, everyMs = 0) {
  const [state, setState] = useState({ data: null, error: null });
  const needed = useStore(keyNeeded);
  useEffect(() => {
    if (!path) return setState({ data: null, error: null });
    const stop = new AbortController();
    const load = () => {
      if (document.hidden || keyNeeded.value) return;
      getJson(path, { signal: stop.signal }).then(
        (data) => setState({ data, error: null }),
        (error) => error.name !== "AbortError" && setState((before) => ({ ...before, error })),
      );
    };
    load();
    const timer = everyMs ? setInterval(load, everyMs) : 0;
    return () => {
      stop.abort();
      clearInterval(timer);
    };
  }, [path, needed]);
  return state;
}

export default function Requests() {
  const { query } = useStore(route);
  const { data, error } = useJson("/v1/admin/requests?limit=200", REFRESH_MS);
  const [slowest, setSlowest] = useState(false);
  const found = data?.requests ?? [];
  const shown = slowest ? [...found].sort((a, b) => b.seconds - a.seconds) : found;
  return html`<main tabindex="0" class=${`page room requests ${query.id ? "with-detail" : ""}`}>
    <div class="page-body">
      <header class="list-head">
        <h1>Requests</h1>
        ${found.length > 0 && html`<span class="muted">the last ${count(found.length)}</span>`}
        <span class="grow"></span>
        <button type="button" class="btn" aria-pressed=${slowest} onClick=${() => setSlowest(!slowest)}>${slowest ? "Slowest first" : "Newest first"}</button>
      </header>
      ${error?.status && html`<p class="notice bad" role="alert">${error.message}</p>`}
      ${data && !found.length && html`<p class="empty">No request has ended yet. ${data.kept ? "Send one, and it appears here." : "The server keeps none: set requests.keep."}</p>`}
      <div class="split">
        ${found.length > 0 && html`<${List} requests=${shown} open=${query.id} />`}
        ${query.id && html`<${Detail} key=${query.id} id=${query.id} />`}
      </div>
    </div>
  </main>`;
}

function List({ requests, open }) {
  const longest = Math.max(...requests.map((each) => each.seconds));
  return html`<ol class="list" aria-label="Requests">
    ${requests.map(
      (each) => html`<li key=${each.id} class=${each.id === open ? "open" : ""}>
        <a href=${urlOf("requests", { id: each.id })} data-page aria-current=${each.id === open ? "true" : undefined}>
          <span class="list-top">
            <span class="mono">${shortId(each.id)}</span>
            <span class="muted num">${clock(each.at)}</span>
            <span class="grow"></span>
            ${each.error_code ? html`<span class="tag bad">${each.error_code}</span>` : each.cause && html`<span class="tag"><i class=${`swatch ${(CAUSES[each.cause] ?? CAUSES.other)[1]}`}></i>${(CAUSES[each.cause] ?? [each.cause])[0]}</span>`}
            <b class="num">${seconds(each.seconds)}</b>
          </span>
          <span class="mini"><span class=${`seg ${(CAUSES[each.cause] ?? CAUSES.other)[1]}`} style=${{ width: `${(100 * each.seconds) / longest}%` }}></span></span>
          <span class="list-why">${each.explanation}</span>
        </a>
      </li>`,
    )}
  </ol>`;
}

function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

function Detail({ id }) {
  const { data, error } = useJson(`/v1/admin/requests/${encodeURIComponent(id)}`);
  return html`<article class="detail card" aria-label="Why this request took as long as it did">
    <header class="card-head">
      <h2 class="mono" title=${id}>${id}</h2>
      <${IconButton} icon="copy" label="Copy the id" class="small" onClick=${() => copyText(id)} />
      <span class="grow"></span>
      <${IconButton} icon="close" label="Close" onClick=${() => go("requests")} />
    </header>
    ${error && html`<p class="notice bad" role="alert">${error.message}</p>`}
    ${data && html`<${Explanation} told=${data} />`}
  </article>`;
}

function Explanation({ told }) {
  const facts = [
    ["Total", seconds(told.seconds)],
    ["First token", seconds(told.ttft_s)],
    ["Prompt", told.prompt_tokens === null ? "–" : `${count(told.prompt_tokens)} tokens`],
    ["Cached", told.cached_tokens === null ? "–" : `${count(told.cached_tokens)} tokens`],
    ["Generated", told.completion_tokens === null ? "–" : `${count(told.completion_tokens)} tokens`],
    ["Route", `${told.route}${told.backend ? ` → ${told.backend}` : ""}`],
  ];
  return html`<p class="why">${told.explanation}</p>
    <dl class="facts">${facts.map(([name, value]) => html`<div class=${name === "Route" ? "wide" : ""}><dt>${name}</dt><dd class="num">${value}</dd></div>`)}</dl>
    <${Waterfall} told=${told} />
    ${told.causes.length > 0 && html`<h3>Where the time went</h3><${Causes} told=${told} />`}
    ${told.cache && html`<${Cache} cache=${told.cache} />`}
    ${told.choices.map((each) => html`<${Decode} choice=${each} many=${told.choices.length > 1} />`)}
    ${told.decisions.map((each) => html`<h3>Route</h3><p>${each.explanation}</p>`)}
    ${told.warnings.length > 0 && html`<h3>Warnings</h3><ul class="plain">${told.warnings.map((each) => html`<li>${each}</li>`)}</ul>`}`;
}

function Causes({ told }) {
  return html`<ul class="causes">
    ${told.causes.map((each) => {
      const [name, colour] = CAUSES[each.kind] ?? [each.kind, "faint"];
      return html`<li>
        <span class="cause-head"><i class=${`swatch ${colour}`}></i><b>${name}</b><span class="num">${seconds(each.seconds)}</span></span>
        <span class="track"><span class=${`seg ${colour}`} style=${{ width: `${Math.min(100, (100 * each.seconds) / told.seconds)}%` }}></span></span>
        <span class="cause-why">${each.sentence}</span>
      </li>`;
    })}
  </ul>`;
}

function Cache({ cache }) {
  const share = (tokens) => `${(100 * tokens) / Math.max(cache.prompt_tokens, 1)}%`;
  return html`<h3>Prompt in the cache</h3>
    <div class="stacked" role="img" aria-label=${`${cache.cached_tokens} of ${cache.prompt_tokens} tokens were cached`}>
      <span class="seg c2" style=${{ width: share(cache.cached_tokens) }}></span>
      <span class="seg c6" style=${{ width: share(cache.evicted_tokens) }}></span>
    </div>
    <p class="legend">
      <span><i class="swatch c2"></i>found <b class="num">${count(cache.cached_tokens)}</b></span>
      ${cache.evicted_tokens > 0 && html`<span><i class="swatch c6"></i>evicted <b class="num">${count(cache.evicted_tokens)}</b></span>`}
      <span><i class="swatch none"></i>new <b class="num">${count(cache.prompt_tokens - cache.cached_tokens - cache.evicted_tokens)}</b></span>
      ${cache.is_off && html`<span class="muted">the cache was off for this request</span>`}
    </p>
    ${cache.diverges_at !== null &&
    html`<p class="muted">It leaves the nearest cached prompt at token ${count(cache.diverges_at)}.</p>
      ${cache.prompt_goes_on != null && html`<dl class="diverges"><dt>this prompt</dt><dd class="mono">${cache.prompt_goes_on}</dd><dt>cached</dt><dd class="mono">${cache.cached_goes_on || "(ends)"}</dd></dl>`}`}`;
}

function Decode({ choice, many }) {
  const sizes = Object.entries(choice.decode.by_batch_size);
  if (!sizes.length) return null;
  const most = Math.max(...sizes.map(([, steps]) => steps));
  return html`<h3>Decode steps by batch size${many ? ` (choice ${choice.choice})` : ""}</h3>
    <ul class="kernels three">
      ${sizes.map(([size, steps], index) => html`<li><span class="kernel-name num">${label(sizes, index)}</span><span class="track"><span class="seg c1" style=${{ width: `${(100 * steps) / most}%` }}></span></span><span class="num kernel-ms">${count(steps)} steps</span></li>`)}
    </ul>`;
}

// The buckets have upper edges that are powers of two.
function label(sizes, index) {
  const edge = sizes[index][0];
  if (edge.startsWith(">")) return `more than ${edge.slice(1)}`;
  const low = Number(edge) / 2 + 1;
  return Number(edge) <= 2 ? edge : `${low}–${edge}`;
}
