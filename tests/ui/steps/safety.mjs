// What a model writes runs nothing, and the page keeps its promises to browsers and their users.
import { HOSTILE } from "../hostile.mjs";
import { answers, ask, faults, openChat, stubChat, write, settled } from "../page.mjs";

export const OPTIONS = {
  ten_thousand_tokens_block_nothing: { viewport: { width: 640, height: 480 } },
  the_policy_is_strict_and_enforced: { causesErrors: true },
  works_on_a_phone: { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true },
};
const KEY = "k".repeat(32);

// All elements below `.md` whose tag, attributes or address is not one that the page uses.
function strangers() {
  const tags = "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul".toUpperCase().split(" ");
  const attributes = ["align", "class", "data-lang", "href", "rel", "start", "tabindex", "target", "title", "type"];
  const ofFormulas = "span math semantics annotation mrow mi mn mo mtext mspace mstyle msup msub msubsup mfrac msqrt mroot mover munder munderover mtable mtr mtd mpadded svg path".split(" ");
  return [...document.querySelectorAll(".md *")]
    .filter((each) => !each.closest(".katex") || !ofFormulas.includes(each.localName))
    .filter((each) => !tags.includes(each.tagName) || [...each.attributes].some(({ name }) => !attributes.includes(name)) || (each.href && !/^(https?|mailto):/.test(each.href)))
    .map((each) => each.outerHTML.slice(0, 200));
}

export async function hostile_text_runs_nothing({ page, url, check }) {
  check.equal(HOSTILE.length, 54);
  await page.addInitScript(() => (window.ran = []));
  await stubChat(page, HOSTILE.map((each) => `${each}\n\n`), { every: 5 });
  await openChat({ page, url });
  await ask(page, "Attack.");
  check.deepEqual(await page.evaluate(strangers), []);
  // The same, cut in many places, as a stream would show it.
  await page.evaluate(async (cases) => {
    const base = document.querySelector("script[type=module]").src;
    const { MarkdownView, renderBlock } = await import(new URL("lib/markdown.js", base).href);
    const root = document.querySelector(".md");
    for (const each of cases) {
      for (let end = 2; end <= each.length; end += 3) root.append(renderBlock(each.slice(0, end)));
      const place = document.createElement("div");
      root.append(place);
      new MarkdownView(place).update(each, true);
    }
    for (const each of root.querySelectorAll("*")) {
      for (const kind of ["mouseover", "focus", "error", "load", "toggle", "animationend"]) each.dispatchEvent(new Event(kind));
    }
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 100)));
  }, HOSTILE);
  check.deepEqual(await page.evaluate(strangers), []);
  check.deepEqual(await page.evaluate(() => window.ran), []);
  check.equal(await page.title(), "engine");
}

export async function hostile_names_and_results_run_nothing({ page, url, check }) {
  const bad = '<img src=x onerror="ran.push(1)">';
  await page.addInitScript(() => (window.ran = []));
  const delta = { content: "", reasoning_content: bad, tool_calls: [{ index: 0, id: bad, function: { name: bad, arguments: JSON.stringify({ [bad]: bad }) } }] };
  const body = `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: "tool_calls" }] })}\n\ndata: [DONE]\n\n`;
  await page.route("**/v1/chat/completions", (route) => route.fulfill({ contentType: "text/event-stream", headers: { "x-engine-warnings": bad }, body }));
  await openChat({ page, url });
  await ask(page, bad);
  await page.keyboard.press("Escape");
  await page.keyboard.press("t");
  check.equal(await page.locator("main img").count(), 0);
  check.ok((await page.locator(".call").innerText()).includes(bad));
  check.deepEqual(await page.evaluate(() => window.ran), []);
}

export async function deep_texts_are_shown({ page, url, check }) {
  const deep = "[".repeat(5000) + "]".repeat(5000);
  const delta = { content: ">".repeat(5000), tool_calls: [{ index: 0, id: "call", function: { name: "look", arguments: deep } }] };
  const body = `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: "tool_calls" }] })}\n\ndata: [DONE]\n\n`;
  await page.route("**/v1/chat/completions", (route) => route.fulfill({ contentType: "text/event-stream", body }));
  await openChat({ page, url });
  await ask(page, "Look.");
  check.ok((await answers(page).locator(".md").innerText()).includes(">>>>"));
  check.ok((await page.locator(".call").innerText()).includes("[[[["));
}

export async function the_policy_is_strict_and_enforced({ page, url, check }) {
  const response = await page.goto(url);
  const policy = response.headers()["content-security-policy"];
  check.ok(!/unsafe|https?:|\*/.test(policy), policy);
  const blocked = await page.evaluate(async () => {
    const seen = [];
    addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
    const script = document.createElement("script");
    try {
      script.textContent = "window.ran = 1";
      document.body.append(script);
    } catch {
      seen.push("trusted-types");
    }
    try {
      document.body.innerHTML += "<p>";
    } catch {
      seen.push("innerHTML");
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
    return { seen, ran: window.ran };
  });
  check.equal(blocked.ran, undefined);
  check.ok(blocked.seen.includes("innerHTML"), String(blocked.seen));
}

export async function the_first_load_is_small({ page, url, check }) {
  const loaded = [];
  page.on("requestfinished", (request) => loaded.push(request));
  await openChat({ page, url });
  await page.waitForLoadState("networkidle");
  const files = await Promise.all(loaded.map(async (request) => [request.url(), (await request.sizes()).responseBodySize]));
  const own = files.filter(([name]) => /static\/(?!vendor).*\.js$/.test(name));
  const sum = (list, column) => list.reduce((total, each) => total + each[column], 0);
  check.ok(own.length > 20 && sum(own, 1) < 60_000, JSON.stringify(own));
  check.ok(sum(files, 1) < 115_000, JSON.stringify(files));
}

export async function the_key_is_kept_for_the_session_of_the_tab({ page, context, url, check }) {
  // A server with a key refuses without one; the page's own server has none.
  const answer = async (route) => {
    const isRight = route.request().headers().authorization === `Bearer ${KEY}`;
    if (isRight) return route.continue();
    return route.fulfill({ status: 401, json: { error: { message: "A valid API key is needed.", type: "x", param: null, code: null } } });
  };
  await page.route("**/v1/**", answer);
  await page.goto(url);
  const field = page.getByLabel("API key");
  await field.fill("wrong");
  await field.press("Enter");
  await page.getByText("does not know this key").waitFor();
  await field.fill(KEY);
  await field.press("Enter");
  await page.locator("#state", { hasText: "Ready" }).waitFor();
  const kept = await page.evaluate(() => JSON.stringify([{ ...localStorage }, document.cookie]));
  check.ok(!kept.includes(KEY));
  check.deepEqual(await context.cookies(), []);
  await page.reload();
  await page.locator("#state", { hasText: "Ready" }).waitFor();
  const other = await context.newPage();
  await other.route("**/v1/**", answer);
  await other.goto(url);
  await other.getByLabel("API key").waitFor();
}

const WORDS = "The quick **brown** fox `jumps` over the [lazy](https://example.org) dog and writes a rather long line about it. ".split(/(?<= )/);

// Ten thousand tokens of paragraphs, lists, a table and code.
function longAnswer() {
  const chunks = [];
  while (chunks.length < 10_000) {
    for (let each = 0; each < 12; each++) chunks.push(...WORDS);
    chunks.push("\n\n## A heading\n\n");
    for (let each = 0; each < 30; each++) chunks.push("- ", ...WORDS.slice(0, 6), "\n");
    chunks.push("\n| a | b |\n|---|---|\n");
    for (let each = 0; each < 30; each++) chunks.push("| one ", "| two ", "|\n");
    chunks.push("\n```python\n");
    for (let each = 0; each < 150; each++) chunks.push("value ", "= ", "function(1)", "\n");
    chunks.push("```\n\n");
  }
  return chunks.slice(0, 10_000);
}

// The longest time that one task took of the main thread's CPU, in milliseconds. Time in which
// another process had the CPU does not count.
async function longestTask(page, context, work) {
  const session = await context.newCDPSession(page);
  const found = [];
  session.on("Tracing.dataCollected", ({ value }) => found.push(...value));
  const ended = new Promise((resolve) => session.on("Tracing.tracingComplete", resolve));
  await session.send("Tracing.start", { transferMode: "ReportEvents", traceConfig: { includedCategories: ["toplevel"], recordMode: "recordContinuously" } });
  await work();
  await session.send("Tracing.end");
  await ended;
  const main = new Set(found.filter((each) => each.name === "thread_name" && each.args.name === "CrRendererMain").map((each) => `${each.pid} ${each.tid}`));
  const tasks = found.filter((each) => /RunTask$/.test(each.name) && each.ph === "X" && main.has(`${each.pid} ${each.tid}`));
  return { count: tasks.length, longest: Math.max(...tasks.map((each) => (each.tdur ?? each.dur) / 1000)) };
}

export async function ten_thousand_tokens_block_nothing({ page, context, url, check }) {
  await stubChat(page, longAnswer());
  await openChat({ page, url });
  const { count, longest } = await longestTask(page, context, async () => {
    await write(page, "Write a lot.");
    await settled(page);
  });
  check.ok(count > 500, `only ${count} tasks were seen`);
  check.ok(longest < 50, `a task took ${longest} ms`);
  check.match(await answers(page).locator(".figures").innerText(), /^10,000 tokens/);
  check.ok((await page.locator(".md .code").count()) > 3);
}

export async function blocks_do_not_depend_on_chunks({ page, url, check }) {
  await page.goto(url);
  const wrong = await page.evaluate(async (texts) => {
    const { BlockSplitter } = await import(new URL("lib/blocks.js", document.querySelector("script[type=module]").src).href);
    const found = [];
    for (const text of texts) {
      const whole = JSON.stringify(new BlockSplitter().feed(text, true));
      for (const step of [1, 3, 64, 1000]) {
        const splitter = new BlockSplitter();
        const parts = [];
        for (let end = step; end < text.length; end += step) parts.push(...splitter.feed(text.slice(0, end), false));
        parts.push(...splitter.feed(text, true));
        if (JSON.stringify(parts) !== whole) found.push([step, text.slice(0, 80)]);
      }
    }
    return found;
  }, [...HOSTILE, longAnswer().join("").slice(0, 9000), "A sentence of words. ".repeat(500) + "\n\nend", "- a\n\n  b\n- c\n  ```\n  x\n\n  ```\n\nafter"]);
  check.deepEqual(wrong, []);
}

const TEXT = "# Title\n\nSome *text* with `code`, [a link](https://example.org).\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nlet a;\n```\n";

export async function axe_finds_no_fault({ page, url, check, axe }) {
  await stubChat(page, [TEXT]);
  await openChat({ page, url }, { models: ["first", "second"], format: "json_schema", tools: '[{"name": "f"}]' });
  check.deepEqual(await faults(page, axe), []);
  await ask(page, "Hello.");
  await page.locator("#composer").press("Escape");
  for (const keys of ["s", "t"]) {
    await page.keyboard.press(keys);
    check.deepEqual(await faults(page, axe), []);
  }
  await page.keyboard.press("?");
  await page.getByRole("dialog").waitFor();
  check.deepEqual(await faults(page, axe), []);
  await page.keyboard.press("Escape");
  await page.getByRole("button", { name: "Use light colours" }).click();
  check.deepEqual(await faults(page, axe), []);
}

export async function works_on_a_phone({ page, url, check, axe }) {
  await stubChat(page, [TEXT, "word ".repeat(80)]);
  await openChat({ page, url });
  await ask(page, "Hello.");
  const overflow = () => page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check.equal(await overflow(), 0);
  await page.getByRole("button", { name: "Conversations" }).tap();
  await page.getByRole("button", { name: "New chat" }).tap();
  await page.locator(".sidebar").waitFor({ state: "detached" });
  await page.getByRole("button", { name: "Settings", exact: true }).tap();
  await page.locator(".panel").waitFor();
  check.equal(await overflow(), 0);
  check.deepEqual(await faults(page, axe), []);
}

export async function keys_reach_everything({ page, url, check }) {
  await stubChat(page, ["One."]);
  await openChat({ page, url });
  await page.keyboard.type("Typed at once.");
  await page.keyboard.press("Enter");
  await settled(page);
  await page.keyboard.press("Escape");
  await page.keyboard.press("r");
  await page.locator(".message.assistant .branches", { hasText: "2/2" }).waitFor();
  await page.keyboard.press("[");
  await page.locator(".message.assistant .branches", { hasText: "1/2" }).waitFor();
  await page.keyboard.press("k");
  await page.keyboard.press("k");
  await page.keyboard.press("e");
  await page.getByLabel("Edit the message").press("Escape");
  await page.keyboard.press("n");
  check.equal(await page.locator(".message").count(), 0);
  await page.locator("#composer:focus").waitFor(); // else the focus could come after the next keys
  await page.keyboard.press("?");
  check.equal(await page.getByRole("dialog").count(), 0); // it was typed into the field
  await page.locator("#composer").press("Escape");
  await page.keyboard.press("?");
  check.match(await page.getByRole("dialog").innerText(), /Answer again[\s\S]*Show these shortcuts/);
}
