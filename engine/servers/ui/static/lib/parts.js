// Parts that all pages use: icons, dialogs, short messages.
import { html, useEffect, useRef } from "./html.js";
import { Store, useStore } from "./store.js";

// Paths in a box of 24 by 24.
const ICONS = {
  attach: "M21 12.5 12.6 20.9a5.5 5.5 0 0 1-7.8-7.8l8.9-8.9a3.7 3.7 0 0 1 5.2 5.2l-8.9 8.9a1.8 1.8 0 0 1-2.6-2.6l8.2-8.2",
  branch: "M6 4v16M6 14c8 0 12-1 12-6M18 8V5M18 5m-2 0a2 2 0 1 0 4 0 2 2 0 1 0-4 0M6 20m-2 0a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H9a1 1 0 0 1-1-1V10a1 1 0 0 1 1-1zM16 9V5a1 1 0 0 0-1-1H5a1 1 0 0 0-1 1v10a1 1 0 0 0 1 1h3",
  down: "M6 9l6 6 6-6",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  edit: "M4 20h4L19.5 8.5a2.1 2.1 0 0 0-3-3L5 17z",
  help: "M9.2 9a2.9 2.9 0 1 1 4.3 2.5c-1 .6-1.5 1.2-1.5 2.3M12 17.4v.1",
  image: "M5 5h14a1 1 0 0 1 1 1v12a1 1 0 0 1-1 1H5a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1zM4 16l4.5-4.5 4 4L15 13l5 4.5M15.5 9.2v.1",
  left: "M15 6l-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8.2 8.2 0 0 1 9.5 4a8.2 8.2 0 1 0 10.5 10.5z",
  more: "M5 12v.1M12 12v.1M19 12v.1",
  plus: "M12 5v14M5 12h14",
  redo: "M20 11A8 8 0 1 0 18 17M20 5v6h-6",
  right: "M9 6l6 6-6 6",
  send: "M12 19V5M6 11l6-6 6 6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 7m-2 0a2 2 0 1 0 4 0 2 2 0 1 0-4 0M8 17m-2 0a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  split: "M5 5h14a1 1 0 0 1 1 1v12a1 1 0 0 1-1 1H5a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1zM12 5v14",
  stop: "M7 7h10v10H7z",
  sun: "M12 12m-4 0a4 4 0 1 0 8 0 4 4 0 1 0-8 0M12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  tokens: "M4 8h7M14 8h6M4 12h4M11 12h9M4 16h9M16 16h4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  up: "M6 15l6-6 6 6",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

// A button that shows an icon. `label` is its name for screen readers and its tooltip.
export function IconButton({ icon, label, keys, class: more = "", ...rest }) {
  const title = keys ? `${label} (${keys})` : label;
  return html`<button type="button" class=${`icon-btn ${more}`} aria-label=${label} title=${title} ...${rest}>
    <${Icon} name=${icon} />
  </button>`;
}

// A modal dialog. It is open as long as it is rendered; `onClose` must end that.
export function Dialog({ title, onClose, children, class: more = "" }) {
  const element = useRef(null);
  useEffect(() => {
    const opened = element.current;
    const before = document.activeElement;
    opened.showModal();
    return () => {
      opened.close();
      before?.focus?.();
    };
  }, []);
  const onCancel = (event) => {
    event.preventDefault();
    onClose();
  };
  const onClick = (event) => event.target === element.current && onClose();
  return html`<dialog ref=${element} class=${more} aria-label=${title} onCancel=${onCancel} onClick=${onClick}>
    <div class="dialog-head">
      <h2>${title}</h2>
      <${IconButton} icon="close" label="Close" onClick=${onClose} />
    </div>
    ${children}
  </dialog>`;
}

const TOAST_MS = 5000;
const toasts = new Store([]);

// Shows a short message for a few seconds. `action` is `{ label, run }`: a button beside it.
export function toast(text, action = null) {
  const entry = { text, action };
  toasts.set((shown) => [...shown.slice(-3), entry]);
  setTimeout(() => toasts.set((shown) => shown.filter((each) => each !== entry)), TOAST_MS);
}

export function Toasts() {
  const shown = useStore(toasts);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.map(
      (each) => html`<div class="toast">
        <span>${each.text}</span>
        ${each.action && html`<button type="button" onClick=${() => (each.action.run(), toasts.set((rest) => rest.filter((other) => other !== each)))}>${each.action.label}</button>`}
      </div>`,
    )}
  </div>`;
}

// Adds the style sheet of a page once. Resolves when it is loaded.
export function loadStyle(url) {
  const found = document.querySelector(`link[href="${url}"]`);
  if (found) return Promise.resolve();
  return new Promise((resolve) => {
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = url;
    link.onload = link.onerror = resolve;
    document.head.append(link);
  });
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    toast("The browser does not let this page write to the clipboard.");
    return false;
  }
}
