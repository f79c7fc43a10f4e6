// The page at /ui/requests.
import { html } from "../lib/html.js";

export default function Requests() {
  return html`<main class="page"><div class="page-body"><h1>Requests</h1></div></main>`;
}
