// Runs steps of `steps/*.mjs` in Chromium. It reads "file:step" lines from standard input, and
// writes a line of JSON for each of them.
//
// A step is an exported function that gets `{ page, context, url, check, axe }`. Each step has a browser
// profile of its own. A step fails if it throws, if the page logs an error or violates its policy,
// or if anything is requested from another origin.
import { strict as check } from "node:assert";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [url, modules, chromium] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const FLAGS = [
  ...["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
  ...["--disable-background-networking", "--disable-component-update", "--disable-sync"],
];
const TIMEOUT_MS = 60_000;

const browser = await require("playwright-core").chromium.launch({ executablePath: chromium, args: FLAGS });

async function run(name) {
  const [file, step] = name.split(":");
  const module = await import(`./steps/${file}.mjs`);
  const { causesErrors, ...options } = module.OPTIONS?.[step] ?? {};
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, colorScheme: "dark", ...options });
  context.setDefaultTimeout(TIMEOUT_MS);
  const problems = [];
  context.on("page", (page) => {
    page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
    page.on("dialog", (dialog) => (problems.push(`dialog: ${dialog.message()}`), dialog.dismiss()));
    page.on("console", (message) => {
      // A refused request is logged as an error too; steps that cause one look at the page.
      if (message.type() === "error" && !/Failed to load resource/.test(message.text())) problems.push(`console: ${message.text()}`);
    });
  });
  context.on("request", (request) => {
    const asked = new URL(request.url());
    if (asked.origin !== new URL(url).origin && !["data:", "blob:"].includes(asked.protocol)) problems.push(`request: ${asked.href}`);
  });
  const page = await context.newPage();
  const axe = require("axe-core").source;
  try {
    await module[step]({ page, context, url, check, axe });
    if (!causesErrors) check.deepEqual(problems, []);
    return null;
  } catch (error) {
    const seen = await page.locator("body").innerText({ timeout: 2000 }).catch(() => "");
    return `${error.stack}\n${problems.join("\n")}\nThe page shows:\n${seen.slice(0, 1500)}`;
  } finally {
    await context.close();
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const began = Date.now();
  const failure = await run(line.trim());
  process.stdout.write(`${JSON.stringify({ failure, seconds: (Date.now() - began) / 1000 })}\n`);
}
await browser.close();
