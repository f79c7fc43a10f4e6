// The list of conversations.
import { html, useRef, useState } from "../lib/html.js";
import { IconButton, Icon, toast } from "../lib/parts.js";
import { useStore } from "../lib/store.js";
import { chat, conversations, openConversation, removeConversation, startConversation, view } from "./state.js";
import { exportAll, importFile, OpenStored } from "./transfer.js";

const DAY_MS = 86_400_000;

function ageOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  return time >= today - 7 * DAY_MS ? "Last seven days" : "Older";
}

const isNarrow = () => matchMedia("(max-width: 900px)").matches;

export function closeIfNarrow() {
  if (isNarrow()) view.set({ ...view.value, sidebar: false, panel: "" });
}

export function Sidebar() {
  const all = useStore(conversations);
  const { meta } = useStore(chat);
  const [sought, setSought] = useState("");
  const [asking, setAsking] = useState(false);
  const picker = useRef(null);
  const found = all.filter((each) => each.title.toLowerCase().includes(sought.trim().toLowerCase()));
  const ages = Map.groupBy(found, (each) => ageOf(each.updated));
  const onFile = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) await importFile(file).catch((error) => toast(error.message));
  };
  const open = (id) => {
    openConversation(id);
    closeIfNarrow();
  };
  return html`<aside class="sidebar" aria-label="Conversations">
    <button type="button" class="btn new" onClick=${() => (startConversation(), closeIfNarrow())}><${Icon} name="plus" /> New chat</button>
    <input class="input" type="search" placeholder="Search" aria-label="Search conversations" value=${sought} onInput=${(event) => setSought(event.target.value)} />
    <div class="conversations">
      ${[...ages].map(
        ([age, some]) => html`<section key=${age}>
          <h2>${age}</h2>
          <ul>
            ${some.map(
              (each) => html`<li key=${each.id} class=${each.id === meta.id ? "current" : ""}>
                <button type="button" class="conversation" aria-current=${each.id === meta.id} onClick=${() => open(each.id)}>${each.title || "Untitled"}</button>
                <${IconButton} icon="trash" class="small" label=${`Delete ${each.title || "Untitled"}`} onClick=${() => removeConversation(each.id)} />
              </li>`,
            )}
          </ul>
        </section>`,
      )}
      ${!all.length && html`<p class="muted empty">Conversations are kept in this browser.</p>`}
    </div>
    <div class="sidebar-foot">
      <input type="file" accept=".json,application/json" class="hidden" ref=${picker} aria-label="File to import" onChange=${onFile} />
      <button type="button" class="link" onClick=${() => picker.current.click()}>Import</button>
      <button type="button" class="link" disabled=${!all.length} onClick=${exportAll}>Export all</button>
      <button type="button" class="link" onClick=${() => setAsking(true)}>Open by id</button>
    </div>
    ${asking && html`<${OpenStored} onClose=${() => setAsking(false)} />`}
  </aside>`;
}
