// Conversations as files, and conversations that the server keeps.
import { getJson } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { Dialog, toast } from "../lib/parts.js";
import { addConversation, chat, conversations, nodesOf } from "./state.js";
import { exported, FORMAT, imported, newestLeaf, newMeta, newNode, titleOf } from "./tree.js";

const MAX_CHAIN = 200;

function save(name, data) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// Saves the whole tree of the conversation that is shown.
export function exportShown() {
  const { meta, nodes } = chat.value;
  const name = meta.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase();
  save(`${name || "conversation"}.json`, exported(meta, nodes));
}

export async function exportAll() {
  const all = await Promise.all(conversations.value.map(async (meta) => exported(meta, await nodesOf(meta.id))));
  save("conversations.json", { format: `${FORMAT}s`, version: 1, conversations: all });
}

export async function importFile(file) {
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  const given = data?.format === `${FORMAT}s` && Array.isArray(data.conversations) ? data.conversations : [data];
  // All are read before the first one is kept, so that a faulty file changes nothing.
  const all = given.map(imported);
  for (const each of all) await addConversation(each);
  toast(all.length === 1 ? `Imported ${all[0].meta.title}.` : `Imported ${all.length} conversations.`);
}

const textOf = (content) => (typeof content === "string" ? content : content.map((part) => part.text ?? "").join(""));

// The conversation that ends with the stored response `id`.
async function storedConversation(id) {
  const chain = [];
  for (let next = id; next && chain.length < MAX_CHAIN; next = chain[0].previous_response_id) {
    chain.unshift(await getJson(`v1/responses/${encodeURIComponent(next)}`));
  }
  const nodes = new Map();
  let parent = null;
  const add = (role, fields) => {
    const node = newNode(parent, role, fields);
    nodes.set(node.id, node);
    parent = node.id;
  };
  for (const response of chain) {
    const { data } = await getJson(`v1/responses/${encodeURIComponent(response.id)}/input_items?order=asc&limit=100`);
    for (const item of data) {
      if (item.type === "function_call_output") add("tool", { content: textOf(item.output), callId: item.call_id });
      else if (item.role === "user") add("user", { content: textOf(item.content) });
    }
    add("assistant", answerOf(response));
  }
  const first = [...nodes.values()][0];
  const meta = newMeta({ title: titleOf(first?.content ?? id), leaf: newestLeaf(nodes, null), system: chain.at(-1).instructions ?? "" });
  return { meta, nodes };
}

function answerOf(response) {
  const fields = { model: response.model, responseId: response.id, content: "", finish: response.status === "completed" ? "stop" : "length" };
  const calls = [];
  for (const item of response.output) {
    if (item.type === "message") fields.content += textOf(item.content);
    else if (item.type === "function_call") calls.push({ id: item.call_id, name: item.name, arguments: item.arguments });
    else if (item.type === "reasoning") fields.reasoning = (item.content ?? item.summary ?? []).map((part) => part.text).join("");
  }
  if (calls.length) fields.toolCalls = calls;
  return fields;
}

export function OpenStored({ onClose }) {
  const [id, setId] = useState("");
  const [failure, setFailure] = useState("");
  const onSubmit = async (event) => {
    event.preventDefault();
    try {
      await addConversation(await storedConversation(id.trim()));
      onClose();
    } catch (error) {
      setFailure(error.message);
    }
  };
  return html`<${Dialog} title="Open a stored conversation" onClose=${onClose}>
    <form class="stack" onSubmit=${onSubmit}>
      <label class="field">
        <span>Id of its last response. An answer that is kept on the server has a button that copies it.</span>
        <input class="input mono" autofocus placeholder="resp_…" value=${id} onInput=${(event) => setId(event.target.value)} />
      </label>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
      <div class="row"><span class="grow"></span><button class="btn primary" disabled=${!id.trim()}>Open</button></div>
    </form>
  <//>`;
}
