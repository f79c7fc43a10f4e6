// Colours of code, and formulas. The libraries for them are loaded when an answer first needs them.
import DOMPurify from "dompurify";
import { loadStyle } from "./parts.js";

// Longer code stays without colours, and a longer formula is shown as it was written.
const MAX_CODE = 20_000;
const MAX_FORMULA = 2000;
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

const styleOf = (path) => new URL(path, import.meta.url).href;
const once = (load) => {
  let loading = null;
  return () => (loading ??= load().catch(() => null));
};
const highlighter = once(async () => {
  const [module] = await Promise.all([import("../vendor/highlight/highlight.min.js"), loadStyle(styleOf("colours.css"))]);
  return module.default;
});
let katex = null;
const mathematics = once(async () => {
  await Promise.all([import("../vendor/katex/katex.min.js"), loadStyle(styleOf("../vendor/katex/katex.min.css"))]);
  katex = globalThis.katex;
});

// Colours an element with code that will not change any more.
export async function colour(code, lang) {
  const text = code.textContent;
  if (!lang || text.length > MAX_CODE) return;
  const highlight = await highlighter();
  if (!highlight?.getLanguage(lang)) return;
  const coloured = DOMPurify.sanitize(highlight.highlight(text, { language: lang, ignoreIllegals: true }).value, COLOURS);
  if (coloured.textContent === text) code.replaceChildren(coloured);
}

// Shows the formulas below `root`, which are elements that the parser has marked.
export function showFormulas(root) {
  const found = [...root.querySelectorAll("[data-tex]")];
  if (!found.length) return;
  for (const each of found) each.removeAttribute("data-tex");
  if (katex) found.forEach(showFormula);
  else mathematics().then(() => katex && found.forEach(showFormula));
}

function showFormula(element) {
  const raw = element.textContent;
  const displayMode = /^(\$\$|\\\[)/.test(raw);
  const ends = displayMode || raw.startsWith("\\") ? 2 : 1;
  if (raw.length > MAX_FORMULA) return;
  const shown = document.createElement("span");
  try {
    katex.render(raw.slice(ends, -ends), shown, { displayMode, throwOnError: true, trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 });
  } catch {
    return; // it is no formula, so what was written stays
  }
  if (displayMode) Object.assign(shown, { className: "formula", tabIndex: 0 });
  element.replaceWith(shown);
}
