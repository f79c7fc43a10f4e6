// Takes pictures of docs/ui.md: the chat and the lens. Arguments: the URL of a server with two backends of the default
// model, the folder with playwright-core, the path of Chromium, and the folder of the pictures.
import { createRequire } from "node:module";
import { ask, openChat } from "./page.mjs";

const [url, modules, chromium, folder] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const browser = await require("playwright-core").chromium.launch({ executablePath: chromium, args: ["--headless", "--no-sandbox", "--disable-gpu"] });
const WIDE = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844 };
const QUESTION = "Write a Python function that returns the larger of two numbers, then explain it.";

async function picture(name, { viewport = WIDE, colorScheme = "dark", settings = {} }, work) {
  const context = await browser.newContext({ viewport, colorScheme });
  const page = await context.newPage();
  page.setDefaultTimeout(120_000);
  await openChat({ page, url }, { params: { max_tokens: "150", temperature: "0" }, ...settings });
  await work(page);
  await page.waitForTimeout(300);
  await page.screenshot({ path: `${folder}/${name}.png` });
  await context.close();
}

await picture("chat", {}, async (page) => {
  await ask(page, "How many days are in a week?");
  await ask(page, QUESTION);
  await page.locator(".message.assistant").last().getByRole("button", { name: "Answer again" }).click();
  await page.waitForFunction(() => !document.querySelector('[aria-busy="true"]'));
  await page.getByRole("button", { name: "Branches" }).click();
});
const models = (await (await fetch(`${url}/v1/models`)).json()).data.map((each) => each.id);
await picture("compare", { colorScheme: "light", settings: { models: models.slice(0, 2) } }, async (page) => {
  await ask(page, QUESTION);
});
await picture("tokens", { settings: { logprobs: true, params: { max_tokens: "60", seed: "1" } } }, async (page) => {
  await ask(page, "Tell me about the sea.");
  await page.getByRole("button", { name: "Tokens" }).click();
  const [unlikely, any] = [page.locator(".token.g0, .token.g1"), page.locator(".token")];
  await ((await unlikely.count()) > 1 ? unlikely.nth(1) : any.nth(3)).hover();
});
await picture("phone", { viewport: PHONE, colorScheme: "light" }, async (page) => {
  await ask(page, QUESTION);
});
const lens = await (await browser.newContext({ viewport: { width: 1280, height: 1000 }, colorScheme: "dark" })).newPage();
await lens.goto(`${url}/ui/lens`);
await lens.locator(".lens-largest li").first().waitFor(); // the example
await lens.locator("#lens-prompt").fill("When Mary and John went to the store, John gave a drink to");
await lens.getByRole("button", { name: "Read" }).click();
await lens.locator(".lens-token", { hasText: "Mary" }).waitFor();
await lens.locator(".lens-largest li").first().waitFor();
await lens.locator("#lens-layer").selectOption("17");
await lens.getByRole("button", { name: "Head 4" }).click();
await lens.waitForTimeout(300);
await lens.screenshot({ path: `${folder}/lens.png` });
await browser.close();
