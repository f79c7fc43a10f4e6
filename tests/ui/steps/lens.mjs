// The page Lens shows what the server reads inside the model.
import { faults } from "../page.mjs";

export const OPTIONS = { the_lens_fits_a_phone: { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true, colorScheme: "light" } };

const token = (page, index) => page.locator(".lens-token").nth(index);
const likeliest = (page) => page.locator(".lens-table tbody tr").first().locator("td code").first();

export async function lens_and_attention_of_a_token({ page, url, check, axe }) {
  const asked = [];
  page.on("request", (request) => asked.push(new URL(request.url()).pathname));
  await page.goto(url);
  await page.locator("#composer").waitFor();
  check.deepEqual(asked.filter((each) => each.includes("lens")), []); // nothing, until it is opened
  await page.getByRole("link", { name: "Lens" }).click();
  await page.locator(".lens-largest li").first().waitFor(); // an example
  check.deepEqual(await page.locator(".lens-token").allInnerTexts(), ["The", "·capital", "·of", "·France", "·is"]);
  check.equal(await page.locator(".lens-table tbody tr").count(), 30);
  check.equal(await likeliest(page).innerText(), "·Paris");
  check.equal(await page.locator(".lens-head").count(), 10); // nine, and their mean
  check.deepEqual(await faults(page, axe), []);

  // By keyboard: another token, another layer, another head.
  await token(page, 4).press("ArrowLeft");
  await page.locator("h3", { hasText: "·France" }).waitFor();
  check.equal(await page.evaluate(() => document.activeElement.innerText), "·France");
  const layer = page.locator(".lens-layer[aria-pressed=true]");
  const before = Number(await layer.innerText());
  await layer.press("ArrowUp");
  await page.waitForFunction((wanted) => document.querySelector("#lens-layer").value === wanted, String(before + 1));
  await page.locator(".lens-head[aria-pressed=true]").press("End");
  await page.locator("h3", { hasText: "Head 8: where “·France” looks" }).waitFor();
  const shares = (await page.locator(".lens-largest .num:last-child").allInnerTexts()).map(parseFloat);
  check.ok(shares.length === 4 && Math.abs(shares.reduce((a, b) => a + b) - 100) < 0.3, String(shares));
  await token(page, 0).click();
  await page.locator("h3", { hasText: "“The” looks" }).waitFor();
  check.deepEqual(await page.locator(".lens-largest .num:last-child").allInnerTexts(), ["100%"]);
  const count = asked.length;
  await token(page, 3).click(); // nothing is asked for twice
  await page.locator("h3", { hasText: "·France" }).waitFor();
  check.equal(asked.length, count);
  check.deepEqual(new Set(asked.filter((each) => each.includes("/v1/"))), new Set(["/v1/models", "/v1/interp/run"]));
}

export async function the_lens_fits_a_phone({ page, url, check, axe }) {
  await page.goto(`${url}/ui/lens`);
  await page.locator(".lens-largest li").first().waitFor();
  await page.locator("#lens-prompt").fill("<b>One</b>\nand a rather long line with many words, so that the tokens need several rows");
  await page.getByRole("button", { name: "Read" }).tap();
  await page.locator(".lens-token", { hasText: "tokens" }).waitFor();
  await page.locator(".lens-largest li").first().waitFor();
  check.equal(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth), 0);
  check.deepEqual(await faults(page, axe), []);
  const message = "interp: this layer has no attention.";
  await page.route("**/v1/interp/run", (route) => route.fulfill({ status: 400, json: { error: { message } } }));
  await page.locator("#lens-layer").selectOption("3");
  await page.getByRole("alert").filter({ hasText: message }).waitFor();
  check.equal(await page.locator(".lens-table tbody tr").count(), 30); // the lens stays
}
