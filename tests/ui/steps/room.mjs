// The pages Live and Requests show what a real server does.
import { faults } from "../page.mjs";

const answer = (page, url, tokens) =>
  page.evaluate(
    async ([url, tokens]) => {
      const body = { messages: [{ role: "user", content: "Tell me a long story." }], max_tokens: tokens, ignore_eos: true };
      const models = await (await fetch(`${url}/v1/models`)).json();
      const sent = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...body, model: models.data[0].id }) };
      return (await (await fetch(`${url}/v1/chat/completions`, sent)).json()).id;
    },
    [url, tokens],
  );

export async function the_live_view_moves({ page, url, check, axe }) {
  await page.goto(`${url}/ui/live`);
  const tokens = page.locator(".lane-what").first();
  await page.locator(".tile").first().waitFor();
  const answered = answer(page, url, 60);
  await tokens.waitFor();
  const before = await tokens.innerText();
  await page.waitForFunction((text) => document.querySelector(".lane-what")?.innerText !== text, before);
  check.deepEqual(await faults(page, axe), []);
  check.ok(await answered);
  // The batch is empty again, and the cache holds the prompt.
  await page.waitForFunction(() => !document.querySelector(".lane"));
  check.ok((await page.locator(".tree rect").count()) > 0);
}

export async function the_waterfall_opens({ page, url, check, axe }) {
  await page.goto(`${url}/ui/requests`);
  const id = await answer(page, url, 8);
  const entry = page.locator(`.list a[href*="${id}"]`);
  await entry.click();
  await page.locator(".waterfall .fall").first().waitFor();
  const names = await page.locator(".fall-name").allInnerTexts();
  check.ok(names.includes("prefill") && names.includes("decode"), String(names));
  check.ok((await page.locator(".why").innerText()).length > 10);
  check.deepEqual(await faults(page, axe), []);
  await page.reload();
  await page.locator(".waterfall .fall").first().waitFor();
  await page.locator(".detail").getByRole("button", { name: "Close" }).click();
  check.equal(await page.locator(".waterfall").count(), 0);
}

export async function a_page_without_a_key_asks_once({ page, url, check }) {
  for (const [name, ms] of [["live", 2000], ["requests", 3500]]) {
    let asked = 0;
    await page.route("**/v1/**", (route) => {
      asked += route.request().url().includes("/v1/admin/");
      return route.fulfill({ status: 401, json: { error: { message: "A valid API key is needed." } } });
    });
    await page.goto(`${url}/ui/${name}`);
    await page.getByLabel("API key").waitFor();
    await page.waitForTimeout(ms);
    check.ok(asked <= 1, `${name} asked ${asked} times`);
    // A dialog that was closed stays closed until it is asked for.
    await page.keyboard.press("Escape");
    await page.getByRole("button", { name: "Enter a key" }).waitFor();
    await page.waitForTimeout(500);
    check.equal(await page.getByLabel("API key").count(), 0);
    check.ok(asked <= 1, `${name} asked ${asked} times`);
    await page.getByRole("button", { name: "Enter a key" }).click();
    await page.getByLabel("API key").waitFor();
    await page.unroute("**/v1/**");
  }
}
