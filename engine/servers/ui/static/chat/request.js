// Turns a conversation and the settings into the body of a request.
import { server } from "../lib/server.js";
import { PARAMS, parsed, parsedJson } from "./params.js";
import { pathTo } from "./tree.js";

// The text of a message with its attached files.
export function fullText(node) {
  const files = (node.files ?? []).map(({ name, text }) => `\`\`\`${name}\n${text.replace(/\n?$/, "\n")}\`\`\``);
  return [...files, node.content].filter(Boolean).join("\n\n");
}

export function toolsOf(settings) {
  if (!settings.tools.trim()) return [];
  const given = parsedJson(settings.tools, "Tools");
  const list = Array.isArray(given) ? given : [given];
  return list.map((each) => (each?.type === "function" || each?.function ? { type: "function", function: each.function ?? each } : { type: "function", function: each }));
}

export function formatOf(settings) {
  if (settings.format === "json_object") return { type: "json_object" };
  if (settings.format !== "json_schema") return null;
  if (!settings.schema.trim()) throw new Error("Write a JSON schema in the settings, or choose another format.");
  const given = parsedJson(settings.schema, "The JSON schema");
  return { type: "json_schema", json_schema: given.schema ? given : { name: "answer", schema: given } };
}

// What the server says suits a model: what the model's files recommend, or a low temperature.
export function usualSampling(model) {
  return server.value.models.find((each) => each.id === model)?.chat_sampling ?? {};
}

function sampling(settings, model) {
  const body = { ...usualSampling(model) };
  for (const param of PARAMS) {
    const value = parsed(param, settings.params[param.name]);
    if (value !== undefined) body[param.name] = value;
  }
  return settings.extra.trim() ? { ...body, ...parsedJson(settings.extra, "More fields") } : body;
}

function chatMessage(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "assistant") {
    const message = { role: "assistant", content: node.content };
    if (node.toolCalls?.length) {
      message.tool_calls = node.toolCalls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    return message;
  }
  if (!node.images?.length) return { role: "user", content: fullText(node) };
  const images = node.images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...images, { type: "text", text: fullText(node) }] };
}

// Answers without any content, such as failed ones, are not sent.
const isSent = (node) => node.role !== "assistant" || node.content || node.toolCalls?.length;

// The body of a request to /v1/chat/completions that answers the message `parent` of a conversation
// `{ nodes, parent, system }`. If the answer has `begun`, the model goes on with it.
export function chatBody({ nodes, parent, system }, settings, model, begun) {
  const body = { model, messages: pathTo(nodes, parent).filter(isSent).map(chatMessage), stream: true, stream_options: { include_usage: true } };
  if (system.trim()) body.messages.unshift({ role: "system", content: system });
  if (begun) {
    body.messages.push({ role: "assistant", content: begun });
    Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  }
  if (settings.answers > 1) body.n = settings.answers;
  const tools = toolsOf(settings);
  if (tools.length) Object.assign(body, { tools, tool_choice: settings.toolChoice });
  const format = formatOf(settings);
  if (format) body.response_format = format;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return { ...body, ...sampling(settings, model) };
}

function inputItems(node) {
  if (node.role === "tool") return [{ type: "function_call_output", call_id: node.callId, output: node.content }];
  if (node.role === "assistant") {
    const calls = (node.toolCalls ?? []).map((call) => ({ type: "function_call", call_id: call.id, name: call.name, arguments: call.arguments }));
    return [...(node.content ? [{ role: "assistant", content: node.content }] : []), ...calls];
  }
  if (!node.images?.length) return [{ role: "user", content: fullText(node) }];
  const images = node.images.map(({ url }) => ({ type: "input_image", image_url: url }));
  return [{ role: "user", content: [...images, { type: "input_text", text: fullText(node) }] }];
}

// As `chatBody`, for /v1/responses. The server keeps the answer. If it keeps the last answer of the
// path too, only what follows that answer is sent.
export function responseBody({ nodes, parent, system }, settings, model) {
  const path = pathTo(nodes, parent).filter(isSent);
  const last = path.findLastIndex((node) => node.role === "assistant");
  const previous = path[last]?.responseId;
  const input = (previous ? path.slice(last + 1) : path).flatMap(inputItems);
  const body = { model, input, stream: true, store: true };
  if (previous) body.previous_response_id = previous;
  if (system.trim()) body.instructions = system;
  const tools = toolsOf(settings);
  if (tools.length) Object.assign(body, { tools: tools.map((each) => ({ type: "function", ...each.function })), tool_choice: settings.toolChoice });
  const format = formatOf(settings);
  if (format) body.text = { format: format.type === "json_schema" ? { type: "json_schema", ...format.json_schema } : format };
  if (settings.logprobs) Object.assign(body, { include: ["message.output_text.logprobs"], top_logprobs: 5 });
  const { max_tokens, reasoning_effort, ...others } = sampling(settings, model);
  if (max_tokens !== undefined) body.max_output_tokens = max_tokens;
  if (reasoning_effort !== undefined) body.reasoning = { effort: reasoning_effort };
  return { ...body, ...others };
}
