// A server for the page whose answers the test writes: it serves the page's files, one model, and chats that wait for
// what they are to say. It can be stopped, which cuts all connections, and started again on the same port.
import { readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const STATIC = new URL("../../../engine/servers/ui/static/", import.meta.url);
const FILES = new Map(
  readdirSync(STATIC, { recursive: true, withFileTypes: true })
    .filter((each) => each.isFile())
    .map((each) => join(each.parentPath, each.name))
    .map((path) => [relative(fileURLToPath(STATIC), path), readFileSync(path)]),
);
const TYPES = { ".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".svg": "image/svg+xml" };
const MODEL = { id: "scripted", object: "model", state: "loaded", max_model_len: 4096, capabilities: ["chat", "images"], backend: "test" };

export class ScriptedServer {
  #server = null;
  #waiting = []; // chats that nobody has taken yet
  #arrived = () => {};
  port = 0;

  get url() {
    return `http://127.0.0.1:${this.port}`;
  }

  async start() {
    this.#server = createServer((request, response) => this.#answer(request, response));
    await new Promise((resolve) => this.#server.listen(this.port, "127.0.0.1", resolve));
    this.port = this.#server.address().port;
  }

  async stop() {
    const ended = new Promise((resolve) => this.#server.close(resolve));
    this.#server.closeAllConnections();
    this.#waiting = [];
    await ended;
  }

  // The next chat that the page asks for.
  async nextChat(within) {
    const end = Date.now() + within;
    while (!this.#waiting.length) {
      if (Date.now() > end) throw new Error("the page sent no request");
      await Promise.race([new Promise((resolve) => (this.#arrived = resolve)), new Promise((resolve) => setTimeout(resolve, 50))]);
    }
    return this.#waiting.shift();
  }

  get numWaiting() {
    return this.#waiting.length;
  }

  async #answer(request, response) {
    const path = new URL(request.url, this.url).pathname;
    if (path === "/v1/models") return json(response, { object: "list", data: [MODEL] });
    if (path === "/v1/chat/completions") return this.#chat(request, response);
    return file(response, path === "/" ? "index.html" : path.replace("/ui/static/", ""));
  }

  async #chat(request, response) {
    let text = "";
    for await (const part of request) text += part;
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.flushHeaders();
    this.#waiting.push(new Chat(JSON.parse(text), response));
    this.#arrived();
  }
}

// One answer that the page waits for.
class Chat {
  constructor(body, response) {
    this.body = body;
    this.response = response;
  }

  write(content) {
    this.#event({ index: 0, delta: { content }, finish_reason: null });
  }

  end(reason) {
    this.#event({ index: 0, delta: {}, finish_reason: reason });
    this.response.end("data: [DONE]\n\n");
  }

  cut() {
    this.response.destroy();
  }

  // Whether the page has closed the connection.
  get isClosed() {
    return this.response.destroyed || this.response.closed;
  }

  #event(choice) {
    this.response.write(`data: ${JSON.stringify({ choices: [choice] })}\n\n`);
  }
}

function json(response, value) {
  response.writeHead(200, { "content-type": "application/json" });
  response.end(JSON.stringify(value));
}

function file(response, name) {
  const content = FILES.get(name);
  response.writeHead(content ? 200 : 404, { "content-type": TYPES[extname(name)] ?? "text/plain", "cache-control": "no-cache" });
  response.end(name === "index.html" ? content.toString().replaceAll("{{ui}}", "ui/") : content);
}
