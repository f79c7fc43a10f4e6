// A random walk of a user in Chromium: two tabs, several conversations, a server that is cut off and comes back. After
// each action both tabs must show exactly what the model says.
//
// Arguments: the folder with playwright-core and the path of Chromium. Reads lines of JSON from standard input: a seed with
// a number of steps, or a plan that was kept. Writes a line of JSON for each: null, or what differs and the plan, with
// `shrink` the shortest one that was found to cause it.
import { isDeepStrictEqual } from "node:util";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { ACTIONS } from "./actions.mjs";
import { Model } from "./model.mjs";
import { ScriptedServer } from "./server.mjs";

const PATIENCE_MS = 15_000;
const MAX_REPLAYS = 30;
const [modules, chromium] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"];
const browser = await require("playwright-core").chromium.launch({ executablePath: chromium, args: FLAGS });

// Numbers within 0..1 that a seed determines.
function numbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// The plan of a walk: `[action, tab, seed, index]` for each step. A step has its own seed, so any other can be left out.
function planOf({ seed, steps }) {
  const draw = numbers(seed);
  const total = ACTIONS.reduce((sum, [, weight]) => sum + weight, 0);
  return Array.from({ length: steps }, (_, index) => {
    let left = draw() * total;
    const [action] = ACTIONS.find(([, weight]) => (left -= weight) < 0);
    return [action.name, draw() < 0.6 ? 0 : 1, Math.floor(draw() * 2 ** 32), index];
  });
}

// What a tab shows, read from its page.
function shown() {
  const text = (element, selector) => element.querySelector(selector)?.innerText.trim() ?? "";
  const ends = ["cut at max tokens", "stopped", "interrupted", "failed", "edited"];
  const messages = [...document.querySelectorAll(".message")].map((each) => {
    const branches = text(each, ".branches");
    if (each.matches(".user")) {
      return { role: "user", text: text(each, ".user-text"), branches, files: [...each.querySelectorAll(".file summary")].map((one) => one.firstChild.data.trim()), images: each.querySelectorAll("img.attached").length };
    }
    const waits = text(each, ".waits");
    const figures = text(each, ".figures").split(" · ");
    const offers = [...each.querySelectorAll("button")].map((one) => one.innerText).filter((one) => ["Retry", "Continue"].includes(one));
    return { role: "assistant", text: text(each, ".md"), branches, busy: each.ariaBusy === "true", waits, end: figures.find((one) => ends.includes(one)) ?? "", offers };
  });
  const send = document.querySelector(".composer .round");
  const state = {
    status: document.querySelector("#state").innerText.trim(),
    title: document.querySelector(".title").value,
    current: document.querySelector('.conversation[aria-current="true"]')?.innerText ?? "",
    messages,
    draft: document.querySelector("#composer").value,
    button: send.ariaLabel + (send.disabled ? " (off)" : ""),
  };
  return { state, titles: [...document.querySelectorAll(".conversation")].map((each) => each.innerText) };
}

class Walk {
  model = new Model();
  server = new ScriptedServer();
  problems = [];

  async open() {
    await this.server.start();
    this.context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
    this.context.setDefaultTimeout(PATIENCE_MS);
    this.context.on("page", (page) => page.on("pageerror", (error) => this.problems.push(error.message)));
    this.pages = [await this.context.newPage(), await this.context.newPage()];
    for (const page of this.pages) {
      await page.goto(this.server.url);
      await page.locator("#composer").waitFor();
    }
  }

  async close() {
    await this.context.close();
    await this.server.stop();
  }

  asked(node) {
    this.wanted = node;
  }

  async step([name, at, seed, index]) {
    const tab = this.model.tabs[at];
    const page = this.pages[at];
    const [action] = ACTIONS.find(([each]) => each.name === name);
    await page.bringToFront();
    let words = 0;
    const word = () => `w${index}${"abc"[words++]}`;
    return action({ model: this.model, server: this.server, page, tab, draw: numbers(seed), word, walk: this });
  }

  // The requests that the server must have got, with the right messages.
  async answerRequests() {
    const waiting = this.model.allRuns().filter((each) => !each.node.run.chat);
    for (let left = waiting.length; this.model.isUp && left; left--) {
      const chat = await this.server.nextChat(PATIENCE_MS);
      const found = chat.body.messages.map(({ role, content }) => {
        const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
        return { role, text: parts.map((each) => each.text ?? "").join(""), images: parts.filter((each) => each.type === "image_url").length };
      });
      const fits = ({ node, conversation }) => !node.run.chat && isDeepStrictEqual(this.model.messages(conversation, node), found);
      const at = waiting.find(fits);
      if (!at) return `a request has other messages: ${JSON.stringify(found)}\nexpected: ${JSON.stringify(waiting.map(({ node, conversation }) => this.model.messages(conversation, node)))}`;
      const temperature = String(chat.body.temperature ?? "");
      if (temperature !== at.node.run.temperature) return `temperature ${temperature}, expected ${at.node.run.temperature}`;
      at.node.run.chat = chat;
    }
    return this.server.numWaiting ? "the page sent a request that nobody asked for" : null;
  }

  // What differs from the model, or null.
  async difference() {
    const end = Date.now() + PATIENCE_MS;
    const wrong = await this.answerRequests();
    if (wrong) return wrong;
    for (const [index, page] of this.pages.entries()) {
      for (;;) {
        const { state, titles } = await page.evaluate(shown);
        const expected = { ...this.model.expected(this.model.tabs[index]), titles: this.model.titles(titles) };
        const found = { ...state, titles };
        if (isDeepStrictEqual(found, expected)) break;
        if (Date.now() > end) return `tab ${index} shows\n${JSON.stringify(found)}\nexpected\n${JSON.stringify(expected)}`;
        await new Promise((resolve) => setTimeout(resolve, 15));
      }
    }
    return this.problems.length ? this.problems.join("\n") : null;
  }
}

// Walks a plan. Returns `{ at, told }` of the first step after which something differs, or null.
async function walk(plan) {
  const walked = new Walk();
  await walked.open();
  const done = [];
  try {
    for (const [at, step] of plan.entries()) {
      let told;
      try {
        done.push(`${step[0]}(${step[1]})`);
        if (!(await walked.step(step))) {
          done.pop();
          continue;
        }
        told = await walked.difference();
      } catch (error) {
        told = error.stack;
      }
      if (told) return { at, told: `after ${done.join(" ")}:\n${told}` };
    }
    return null;
  } finally {
    await walked.close();
  }
}

// Leaves out steps as long as something still differs.
async function shrunk(plan, failure) {
  let best = { plan: plan.slice(0, failure.at + 1), told: failure.told };
  let replays = 0;
  for (let size = best.plan.length >> 1; size >= 1; size >>= 1) {
    for (let from = 0; from + size < best.plan.length && replays < MAX_REPLAYS; ) {
      const fewer = [...best.plan.slice(0, from), ...best.plan.slice(from + size)];
      const found = (replays++, await walk(fewer));
      if (found) best = { plan: fewer.slice(0, found.at + 1), told: found.told };
      else from += size;
    }
  }
  return best;
}

for await (const line of createInterface({ input: process.stdin })) {
  const given = JSON.parse(line);
  const plan = given.plan ?? planOf(given);
  const failure = await walk(plan);
  const short = failure && given.shrink ? await shrunk(plan, failure) : failure && { plan, told: failure.told };
  process.stdout.write(`${JSON.stringify(short)}\n`);
}
await browser.close();
