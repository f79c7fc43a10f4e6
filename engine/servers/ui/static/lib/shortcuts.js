// Keyboard shortcuts, and the dialog that lists them.
import { html, useEffect } from "./html.js";
import { Dialog } from "./parts.js";
import { Store } from "./store.js";

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
export const MOD = isMac ? "⌘" : "Ctrl";

export const helpOpen = new Store(false);
const groups = new Map([["Everywhere", [{ keys: "?", text: "Show these shortcuts" }]]]);

// Adds shortcuts while a component is shown. A shortcut is `{ keys, text, run }`, where `keys` is
// such as "j", "Alt+ArrowUp" or "Mod+Enter". One with a plain key does not work inside of fields.
export function useShortcuts(group, shortcuts) {
  useEffect(() => {
    groups.set(group, shortcuts);
    const onKey = (event) => {
      const found = shortcuts.find((each) => each.run && matches(each.keys, event));
      if (!found || document.querySelector("dialog[open]")) return;
      if (isTyping(event) && !/Mod|Alt|Escape/.test(found.keys)) return;
      if (found.run(event) !== false) event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => {
      removeEventListener("keydown", onKey);
      if (groups.get(group) === shortcuts) groups.delete(group);
    };
  }, [group, shortcuts]);
}

function matches(keys, event) {
  const parts = keys.split("+");
  const key = parts.pop();
  const mod = event.metaKey || event.ctrlKey;
  if (parts.includes("Mod") !== mod || parts.includes("Alt") !== event.altKey) return false;
  if (key.length > 1 && parts.includes("Shift") !== event.shiftKey) return false;
  if (key.length === 1 && parts.includes("Shift") && !event.shiftKey) return false;
  return event.key.toLowerCase() === key.toLowerCase();
}

function isTyping(event) {
  return event.target.closest?.("input, textarea, select, [contenteditable]") !== null;
}

addEventListener("keydown", (event) => {
  if (event.key !== "?" || isTyping(event) || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  helpOpen.set(true);
});

const NAMES = { Mod: MOD, ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };

export function HelpDialog() {
  return html`<${Dialog} title="Keyboard shortcuts" onClose=${() => helpOpen.set(false)}>
    <div class="stack">
      ${[...groups].reverse().map(
        ([name, shortcuts]) => html`<section class="keys">
          <h3>${name}</h3>
          <dl>
            ${shortcuts.map(
              ({ keys, text }) => html`<div><dt>${text}</dt><dd>${keys.split("+").map((key) => html`<kbd>${NAMES[key] ?? key}</kbd>`)}</dd></div>`,
            )}
          </dl>
        </section>`,
      )}
    </div>
  <//>`;
}
