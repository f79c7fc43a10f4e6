// Shows Markdown that a model writes. The text is not trusted: HTML in it is shown as text, the
// parser's output goes through DOMPurify, images become links, and nothing is loaded.
import DOMPurify from "dompurify";
import { Marked } from "marked";
import { BlockSplitter } from "./blocks.js";
import { html, useEffect, useLayoutEffect, useRef } from "./html.js";
import { copyText } from "./parts.js";
import { colour, showFormulas } from "./rich.js";

// How long one task may parse blocks, in milliseconds. The rest waits for the next frame.
const BUDGET_MS = 10;
// A growing text is shown at most once in this many milliseconds.
const SHOW_EVERY_MS = 40;
const SAFE_URL = /^(https?:|mailto:)/i;
const PURIFY = {
  ALLOWED_TAGS: [
    ...["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li"],
    ...["ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "span"],
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "data-lang", "data-tex"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);

// Formulas: $x$, \(x\), $$x$$ and \[x\]. A dollar before a space or after a price begins or ends none.
const DISPLAYED = String.raw`\$\$[^]+?\$\$|\\\[[^]+?\\\]`;
const INLINE = String.raw`\\\([^]+?\\\)|\$(?![\s$])(?:[^$\x60\\\n]|\\[^])+?(?<!\s)\$(?!\d)`;

function formula(level, pattern, start) {
  const begins = new RegExp(`^(?:${pattern})`);
  return {
    name: `formula${level}`,
    level,
    start: (source) => source.search(start),
    tokenizer(source) {
      const found = begins.exec(source);
      return found ? { type: `formula${level}`, raw: found[0] } : undefined;
    },
    renderer: ({ raw }) => `<span data-tex="1">${escaped(raw)}</span>`,
  };
}

const marked = new Marked({
  extensions: [formula("block", DISPLAYED, /\$\$|\\\[/), formula("inline", `${DISPLAYED}|${INLINE}`, /\$|\\[([]/)],
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escaped(text)),
    image: ({ href, text }) =>
      SAFE_URL.test(href) ? `<a href="${escaped(href)}">${escaped(text || href)}</a>` : escaped(text || href),
    link({ href, title, tokens }) {
      const label = this.parser.parseInline(tokens);
      if (!SAFE_URL.test(href)) return label;
      return `<a href="${escaped(href)}"${title ? ` title="${escaped(title)}"` : ""}>${label}</a>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) =>
      `<pre data-lang="${escaped((lang ?? "").split(/\s/)[0])}"><code>${escaped(text)}</code></pre>`,
  },
});

// The HTML of a block. If it is nested so deeply that the parser fails, its source is shown.
function parsed(source) {
  try {
    return marked.parse(source);
  } catch {
    return `<pre><code>${escaped(source)}</code></pre>`;
  }
}

// A fragment with the elements of one block.
export function renderBlock(source) {
  const fragment = DOMPurify.sanitize(parsed(source), PURIFY);
  showFormulas(fragment);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const lang = pre.getAttribute("data-lang") ?? "";
    pre.removeAttribute("data-lang");
    const frame = codeFrame(lang);
    pre.replaceWith(frame);
    frame.append(pre);
    pre.tabIndex = 0;
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table-frame";
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function codeFrame(lang) {
  const frame = document.createElement("div");
  frame.className = "code";
  frame.dataset.lang = lang.toLowerCase();
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = lang.slice(0, 30) || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "code-copy";
  button.textContent = "Copy";
  head.append(name, button);
  frame.append(head);
  return frame;
}

// Keeps the elements of a text that grows. Only the last block is parsed again.
export class MarkdownView {
  #root;
  #tail = document.createElement("div");
  #splitter = new BlockSplitter();
  #waiting = []; // blocks that have ended and are not shown yet
  #text = "";
  #done = false;
  #timer = 0;
  #frame = 0;
  #shownAt = -SHOW_EVERY_MS;
  #shownTail = "";
  #code = null; // the text node of the open code block
  #onShow;

  constructor(root, onShow) {
    this.#root = root;
    this.#onShow = onShow;
    this.#tail.className = "md-tail";
    root.replaceChildren(this.#tail);
  }

  // Shows `text`, which must begin with the text that was given before.
  update(text, done) {
    if (text === this.#text && done === this.#done) return;
    const wasShown = this.#text !== "";
    this.#text = text;
    this.#done = done;
    if (done && wasShown) {
      // Only the end of the text is new.
      this.close();
      this.#timer = 0;
      this.#show();
      return;
    }
    if (this.#timer || this.#frame) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#nextFrame();
    }, this.#shownAt + SHOW_EVERY_MS - performance.now());
  }

  #nextFrame() {
    this.#frame = requestAnimationFrame(() => this.#show());
  }

  continues(text) {
    return !this.#done && text.startsWith(this.#text);
  }

  get isDone() {
    return this.#done;
  }

  get text() {
    return this.#text;
  }

  close() {
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
  }

  #show() {
    this.#frame = 0;
    const began = (this.#shownAt = performance.now());
    this.#waiting.push(...this.#splitter.feed(this.#text, this.#done));
    let number = 0;
    while (number < this.#waiting.length && performance.now() - began < BUDGET_MS) {
      this.#append(this.#waiting[number++]);
    }
    this.#waiting.splice(0, number);
    if (this.#waiting.length) this.#nextFrame();
    else this.#showTail();
    this.#onShow?.();
  }

  #append(source) {
    const block = document.createElement("div");
    block.className = "md-block";
    block.append(renderBlock(source));
    this.#tail.before(block);
    for (const frame of block.querySelectorAll(".code")) colour(frame.querySelector("code"), frame.dataset.lang);
  }

  #showTail() {
    const source = this.#text.slice(this.#splitter.openAt);
    if (source === this.#shownTail) return;
    const head = this.#splitter.openHead;
    if (this.#splitter.openKind === "fence") this.#showCode(source);
    else {
      this.#code = null;
      this.#tail.replaceChildren(...(source.trim() ? [renderBlock(head + source)] : []));
    }
    this.#shownTail = source;
  }

  // Adds what is new to an open code block, without parsing it.
  #showCode(source) {
    const newline = source.indexOf("\n");
    const body = newline < 0 ? "" : source.slice(newline + 1);
    if (this.#code && source.startsWith(this.#shownTail)) {
      if (body.length > this.#code.length) this.#code.appendData(body.slice(this.#code.length));
      return;
    }
    const frame = codeFrame(source.slice(0, newline < 0 ? undefined : newline).replace(/^\s*[`~]+/, "").trim());
    const pre = document.createElement("pre");
    const code = document.createElement("code");
    this.#code = document.createTextNode(body);
    pre.tabIndex = 0;
    code.append(this.#code);
    pre.append(code);
    frame.append(pre);
    this.#tail.replaceChildren(frame);
  }
}

async function onClick(event) {
  const button = event.target.closest?.(".code-copy");
  if (!button) return;
  const copied = await copyText(button.closest(".code").querySelector("pre").textContent);
  if (!copied) return;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Shows `text`, or the growing text of `run` while there is one.
export function Markdown({ text, run, onShow }) {
  const element = useRef(null);
  const view = useRef(null);
  useLayoutEffect(() => {
    const old = view.current;
    const fits = old && (old.continues(text) || (!run && old.isDone && old.text === text));
    if (!fits && !(run && old && !old.isDone)) {
      old?.close();
      view.current = new MarkdownView(element.current, onShow);
    }
    if (!run) view.current.update(text, true);
  }, [text, run]);
  useEffect(() => {
    if (!run) return;
    const update = () => view.current.update(run.text, false);
    update();
    return run.watch(update);
  }, [run]);
  useEffect(() => () => view.current?.close(), []);
  return html`<div class="md" ref=${element} onClick=${onClick}></div>`;
}
