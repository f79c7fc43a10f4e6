// The page's frame: the bar on top, the key dialog, and the page that the URL names.
import { keyNeeded, setKey } from "./lib/api.js";
import { html, render, useEffect, useState } from "./lib/html.js";
import { Dialog, IconButton, Toasts } from "./lib/parts.js";
import { route, urlOf } from "./lib/router.js";
import { refresh, server } from "./lib/server.js";
import { HelpDialog, helpOpen } from "./lib/shortcuts.js";
import { Store, useStore } from "./lib/store.js";

// A page is a module whose default export is a component. It is loaded when it is first shown.
const PAGES = {
  chat: { title: "Chat", load: () => import("./pages/chat.js") },
  live: { title: "Live", load: () => import("./pages/live.js") },
  requests: { title: "Requests", load: () => import("./pages/requests.js") },
  lens: { title: "Lens", load: () => import("./pages/lens.js") },
};
const STATES = {
  connecting: "Connecting",
  loading: "Loading the model",
  ready: "Ready",
  locked: "Key needed",
  down: "Not reachable",
};

// Whether the key dialog was closed without a key. It then opens only when it is asked for.
const keyClosed = new Store(false);
keyNeeded.watch(() => keyClosed.set(false));

function Frame() {
  const { page } = useStore(route);
  const { state } = useStore(server);
  const needed = useStore(keyNeeded);
  const closed = useStore(keyClosed);
  const help = useStore(helpOpen);
  useEffect(() => {
    document.title = page === "chat" ? "engine" : `${PAGES[page].title} · engine`;
  }, [page]);
  return html`<div class="frame">
    <header class="bar">
      <a class="brand" href=${urlOf("chat")} data-page aria-label="engine">
        <img src=${new URL("icon.svg", import.meta.url).href} alt="" /><span>engine</span>
      </a>
      <nav class="nav" aria-label="Pages">
        ${Object.entries(PAGES).map(
          ([name, { title }]) =>
            html`<a href=${urlOf(name)} data-page aria-current=${name === page ? "page" : undefined}>${title}</a>`,
        )}
      </nav>
      <span class="grow"></span>
      ${needed && closed && html`<button class="btn" onClick=${() => keyClosed.set(false)}>Enter a key</button>`}
      <span class="pill" role="status" id="state">
        <span class=${`dot ${state}`}></span><span class="wide-only">${STATES[state]}</span>
      </span>
      <${ThemeButton} />
      <${IconButton} icon="help" label="Keyboard shortcuts" keys="?" onClick=${() => helpOpen.set(true)} />
    </header>
    <div>${state === "down" && html`<p class="notice bad strip">The server can't be reached. Trying again…</p>`}</div>
    <${Page} name=${page} />
    ${needed && !closed && html`<${KeyDialog} wrong=${needed === "wrong"} />`}
    ${help && html`<${HelpDialog} />`}
    <${Toasts} />
  </div>`;
}

function Page({ name }) {
  const [loaded, setLoaded] = useState({});
  const [failure, setFailure] = useState(null);
  useEffect(() => {
    setFailure(null);
    PAGES[name]
      .load()
      .then((module) => setLoaded((known) => ({ ...known, [name]: module.default })))
      .catch((error) => setFailure(error));
  }, [name]);
  const Loaded = loaded[name];
  if (Loaded) return html`<${Loaded} />`;
  return html`<main class="page">
    ${failure && html`<div class="page-body"><p class="notice bad">The page could not be loaded: ${failure.message}</p></div>`}
  </main>`;
}

function ThemeButton() {
  const root = document.documentElement;
  const [theme, setTheme] = useState(root.dataset.theme);
  const other = theme === "dark" ? "light" : "dark";
  const onClick = () => {
    root.dataset.theme = other;
    localStorage.setItem("engine.theme", other);
    setTheme(other);
    dispatchEvent(new CustomEvent("themechange"));
  };
  return html`<${IconButton} icon=${theme === "dark" ? "sun" : "moon"} label=${`Use ${other} colours`} onClick=${onClick} />`;
}

function KeyDialog({ wrong }) {
  const [given, setGiven] = useState("");
  const onSubmit = (event) => {
    event.preventDefault();
    if (given.trim()) setKey(given);
  };
  return html`<${Dialog} title="This server needs a key" onClose=${() => keyClosed.set(true)}>
    <form class="stack" onSubmit=${onSubmit}>
      <p class="muted key-note">This tab keeps the key until you close it. Other tabs ask for it again.</p>
      <label class="field">
        <span>API key</span>
        <input
          class="input mono"
          type="password"
          autocomplete="off"
          autofocus
          value=${given}
          aria-invalid=${wrong}
          onInput=${(event) => setGiven(event.target.value)}
        />
      </label>
      ${wrong && html`<p class="notice bad" role="alert">The server does not know this key.</p>`}
      <div class="row"><span class="grow"></span><button class="btn primary" disabled=${!given.trim()}>Continue</button></div>
    </form>
  <//>`;
}

render(html`<${Frame} />`, document.getElementById("app"));
refresh();
