// The page at /ui/live.
import { html } from "../lib/html.js";

export default function Live() {
  return html`<main class="page"><div class="page-body"><h1>Live</h1></div></main>`;
}
