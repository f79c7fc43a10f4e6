// Shows an answer token by token, coloured by probability, with the alternatives of the token that
// is pointed at.
import { html, useEffect, useRef, useState } from "../lib/html.js";

// Tokens are added to the page in groups of this many for each frame.
const MAX_PER_FRAME = 400;

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100%" : share < 0.01 ? "<0.01%" : `${share.toPrecision(share < 1 ? 2 : 3)}%`;
};

// 0 (unlikely) to 4 (nearly certain).
function grade(logprob) {
  const share = Math.exp(logprob);
  return [0.1, 0.3, 0.6, 0.9].findIndex((limit) => share < limit) < 0 ? 4 : [0.1, 0.3, 0.6, 0.9].findIndex((limit) => share < limit);
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");

export function TokenView({ tokens, run, onShow }) {
  const element = useRef(null);
  const [at, setAt] = useState(null);
  useEffect(() => {
    let frame = 0;
    const shown = element.current;
    shown.replaceChildren();
    const add = () => {
      frame = 0;
      const known = run?.tokens ?? tokens;
      const from = shown.childElementCount;
      const fragment = document.createDocumentFragment();
      for (let index = from; index < Math.min(known.length, from + MAX_PER_FRAME); index++) {
        const span = document.createElement("span");
        span.className = `token g${grade(known[index].logprob)}`;
        span.dataset.index = index;
        span.textContent = visible(known[index].text);
        fragment.append(span);
      }
      shown.append(fragment);
      if (shown.childElementCount < known.length) later();
      onShow?.();
    };
    const later = () => (frame ||= requestAnimationFrame(add));
    later();
    const unwatch = run?.watch(later);
    return () => {
      unwatch?.();
      cancelAnimationFrame(frame);
    };
  }, [tokens, run]);
  const known = run?.tokens ?? tokens;
  const pointed = (event) => {
    const span = event.target.closest(".token");
    setAt(span ? Number(span.dataset.index) : null);
  };
  const onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    setAt((old) => Math.min(Math.max((old ?? -1) + step, 0), known.length - 1));
  };
  return html`<div class="tokens-frame">
    <div
      class="tokens"
      ref=${element}
      tabindex="0"
      role="group"
      aria-label="Tokens of the answer; the arrow keys move between them"
      onMouseOver=${pointed}
      onClick=${pointed}
      onMouseLeave=${() => setAt(null)}
      onKeyDown=${onKey}
      onBlur=${() => setAt(null)}
    ></div>
    ${at !== null && known[at] && html`<${Alternatives} token=${known[at]} index=${at} parent=${element} />`}
  </div>`;
}

function Alternatives({ token, index, parent }) {
  const card = useRef(null);
  useEffect(() => {
    const span = parent.current.children[index];
    if (!span) return;
    span.classList.add("at");
    const box = span.getBoundingClientRect();
    const { style, offsetWidth, offsetHeight } = card.current;
    const below = box.bottom + offsetHeight + 8 < innerHeight;
    style.left = `${Math.max(8, Math.min(box.left, innerWidth - offsetWidth - 8))}px`;
    style.top = `${below ? box.bottom + 6 : box.top - offsetHeight - 6}px`;
    return () => span.classList.remove("at");
  }, [token, index]);
  const isListed = token.top.some((each) => each.text === token.text);
  const rows = isListed ? token.top : [...token.top, token];
  return html`<div class="alternatives" ref=${card} role="status">
    ${rows.map(
      (each) => html`<div class=${each.text === token.text ? "row-bar chosen" : "row-bar"}>
        <code>${JSON.stringify(each.text).slice(1, -1)}</code>
        <span class="track"><span style=${{ width: `${100 * Math.exp(each.logprob)}%` }}></span></span>
        <span class="num">${percent(each.logprob)}</span>
      </div>`,
    )}
  </div>`;
}
