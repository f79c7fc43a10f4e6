// The page's router: `/` and `/ui/chat` are the chat, `/ui/NAME` is the page NAME.
import { ROOT } from "./api.js";
import { Store } from "./store.js";

const PAGES = ["chat", "live", "requests", "lens"];

function current() {
  const name = location.pathname.slice(ROOT.pathname.length).replace(/^ui\/?/, "");
  return {
    page: PAGES.includes(name) ? name : "chat",
    query: Object.fromEntries(new URLSearchParams(location.search)),
  };
}

// `{ page, query }`, where `query` has the parameters of the URL.
export const route = new Store(current());

export function urlOf(page, query = {}) {
  const url = new URL(page === "chat" ? "" : `ui/${page}`, ROOT);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  return url.href;
}

export function go(page, query = {}) {
  history.pushState(null, "", urlOf(page, query));
  route.set(current());
}

addEventListener("popstate", () => route.set(current()));

// Links inside of the page do not load it again.
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-page]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey) return;
  if (event.shiftKey || event.altKey) return;
  event.preventDefault();
  history.pushState(null, "", link.href);
  route.set(current());
});
