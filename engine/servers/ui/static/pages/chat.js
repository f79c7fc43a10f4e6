// The page at /: conversations with a model.
import { html } from "../lib/html.js";

export default function Chat() {
  return html`<main class="page"><div class="page-body"><h1>Chat</h1></div></main>`;
}
