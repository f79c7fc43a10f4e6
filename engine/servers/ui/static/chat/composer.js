// The field in which messages are written, with attached files and images.
import { html, useEffect, useLayoutEffect, useRef } from "../lib/html.js";
import { Icon, IconButton, toast } from "../lib/parts.js";
import { contextOf, server } from "../lib/server.js";
import { useStore } from "../lib/store.js";
import { chosenModels, isRunning, send, stop } from "./generate.js";
import { draft, NOTHING, setDraft } from "./drafts.js";
import { chat, runs, settings } from "./state.js";

const MAX_FILE = 1_000_000;
const MAX_PDF = 20_000_000;
const MAX_IMAGE = 5_000_000;
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

// The chosen models that can't read images.
function blindModels() {
  const chosen = chosenModels();
  return server.value.models.filter((each) => chosen.includes(each.id) && !each.capabilities.includes("images")).map((each) => each.id);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// The text of a file. Throws an error that says why there is none.
async function textOf(file) {
  const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const most = isPdf ? MAX_PDF : MAX_FILE;
  if (file.size > most) throw new Error(`${file.name} is larger than ${most / 1e6} MB.`);
  const text = isPdf ? await textOfPdf(file) : await file.text();
  if (text.includes("\0") || text.includes("\ufffd")) throw new Error(`${file.name} is not a text file.`);
  if (text.length > MAX_FILE) throw new Error(`${file.name} has more than ${MAX_FILE / 1e6} million characters.`);
  return text;
}

async function textOfPdf(file) {
  const { pdfText } = await import("../lib/pdf.js");
  const text = await pdfText(file).catch((error) => {
    throw new Error(`${file.name} can't be read: ${error.message}`);
  });
  if (!text) throw new Error(`${file.name} has no text. Its pages may be pictures.`);
  return text;
}

async function imageOf(file) {
  const blind = blindModels();
  if (blind.length) throw new Error(`${blind.join(" and ")} can't read images, so ${file.name} was not attached.`);
  if (!IMAGES.includes(file.type)) throw new Error(`${file.name}: images must be PNG, JPEG, WebP or GIF.`);
  if (file.size > MAX_IMAGE) throw new Error(`${file.name} is larger than 5 MB.`);
  return dataUrl(file);
}

// Reads files into `{ images, files }`. Files that can't be used are refused with a message.
async function readFiles(given) {
  const found = { images: [], files: [] };
  for (const file of given) {
    try {
      if (file.type.startsWith("image/")) found.images.push({ name: file.name, url: await imageOf(file) });
      else found.files.push({ name: file.name, text: await textOf(file) });
    } catch (error) {
      toast(error.message);
    }
  }
  return found;
}

export function Composer({ field }) {
  const { meta, nodes } = useStore(chat);
  const { state, models } = useStore(server);
  useStore(runs);
  useStore(settings);
  const { text, images, files } = useStore(draft);
  const picker = useRef(null);
  const running = isRunning();
  useLayoutEffect(() => grow(field.current), [text]);
  useEffect(() => {
    // On a phone, the focus would open the keyboard.
    if (!matchMedia("(pointer: coarse)").matches) field.current.focus({ preventScroll: true });
  }, [meta.id]);

  const attach = async (given) => {
    const { key } = draft.value;
    const found = await readFiles(given);
    setDraft((old) => ({ images: [...old.images, ...found.images], files: [...old.files, ...found.files] }), key);
  };
  const isEmpty = !text.trim() && !images.length && !files.length;
  const submit = () => {
    if (isEmpty || running) return;
    const blind = images.length ? blindModels() : [];
    if (blind.length) return toast(`${blind.join(" and ")} can't read images: remove them, or choose another model.`);
    const fields = { content: text };
    if (images.length) fields.images = images;
    if (files.length) fields.files = files;
    setDraft(() => NOTHING);
    send(meta.leaf && nodes.has(meta.leaf) ? meta.leaf : null, fields);
  };
  const onKey = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  const onPaste = (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  };
  const onDrop = (event) => {
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  };
  // Stop and Send have keys, which makes them two elements. Else a click on Stop would also submit the form, because its
  // button becomes Send while the click is handled.
  const placeholder = state === "loading" ? "The model is loading. Write meanwhile; the message is sent when it is ready." : "Write a message";
  return html`<form
    class="composer"
    onSubmit=${(event) => (event.preventDefault(), submit())}
    onDragOver=${(event) => event.preventDefault()}
    onDrop=${onDrop}
  >
    <${Attached} images=${images} files=${files} />
    <textarea id="composer" ref=${field} rows="1" aria-label="Message" placeholder=${placeholder} value=${text} onInput=${(event) => setDraft(() => ({ text: event.target.value }))} onKeyDown=${onKey} onPaste=${onPaste}></textarea>
    <div class="composer-row">
      <input type="file" class="hidden" multiple ref=${picker} aria-label="Files to attach" onChange=${(event) => (attach([...event.target.files]), (event.target.value = ""))} />
      <${IconButton} icon="attach" label="Attach text, PDFs or images" onClick=${() => picker.current.click()} />
      <${ContextMeter} nodes=${nodes} leaf=${meta.leaf} models=${models} />
      <span class="grow"></span>
      ${running
        ? html`<button key="stop" type="button" class="round stop" aria-label="Stop" title="Stop (Esc)" onClick=${() => stop()}><${Icon} name="stop" /></button>`
        : html`<button key="send" class="round" aria-label="Send" title="Send (Enter)" disabled=${isEmpty}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

function grow(field) {
  if (!field) return;
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, innerHeight * 0.4)}px`;
}

function Attached({ images, files }) {
  if (!images.length && !files.length) return null;
  const without = (kind, gone) => setDraft((old) => ({ [kind]: old[kind].filter((each) => each !== gone) }));
  return html`<ul class="attached-list">
    ${images.map((each) => html`<li><img src=${each.url} alt="" /><span>${each.name}</span><${IconButton} icon="close" class="small" label=${`Remove ${each.name}`} onClick=${() => without("images", each)} /></li>`)}
    ${files.map((each) => html`<li><span>${each.name}</span><${IconButton} icon="close" class="small" label=${`Remove ${each.name}`} onClick=${() => without("files", each)} /></li>`)}
  </ul>`;
}

// How much of the context the conversation has used.
function ContextMeter({ nodes, leaf, models }) {
  let node = nodes.get(leaf);
  while (node && !node.stats?.prompt) node = nodes.get(node.parent);
  if (!node) return null;
  const limit = contextOf(models.find((each) => each.id === node.model));
  const used = node.stats.prompt + node.stats.tokens;
  return html`<span class="context muted num" title="Tokens of the context that the conversation has used">
    ${limit && html`<span class="track"><span style=${{ width: `${Math.min(100, (100 * used) / limit)}%` }}></span></span>`}
    ${used.toLocaleString()} ${limit ? `/ ${limit.toLocaleString()}` : "tokens"}
  </span>`;
}
