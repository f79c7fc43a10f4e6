// What a user does with the chat.
import { answers, ask, openChat, settled, stubChat, write } from "../page.mjs";

export async function sends_and_streams({ page, url, check }) {
  await openChat({ page, url }, { params: { max_tokens: "96", temperature: "0", ignore_eos: true } });
  await write(page, "Say hello.");
  await page.locator(".message[aria-busy=true] .md").filter({ hasText: /\w/ }).waitFor();
  await settled(page);
  const figures = await answers(page).locator(".figures").innerText();
  check.match(figures, /^96 tokens · [\d.]+ tok\/s · first after [\d.]+ s · cut at max tokens/);
  check.match(await page.locator(".context").innerText(), /\d+ \/ 8,192/);
  check.equal(await page.locator(".conversation").innerText(), "Say hello.");
  const [told] = await page.getByRole("log").allTextContents();
  check.ok(told.includes((await answers(page).locator(".md").innerText()).slice(0, 20)), told);
}

export async function stops({ page, url, check }) {
  await openChat({ page, url }, { params: { max_tokens: "2000", ignore_eos: true } });
  await write(page, "Count to a thousand.");
  await page.locator(".message[aria-busy=true] .md").filter({ hasText: /\w/ }).waitFor();
  await page.locator(".message.user").getByRole("button", { name: "Delete with all that follows" }).click();
  await page.getByText("Stop the answer first.").waitFor();
  await page.keyboard.press("Escape");
  await settled(page);
  check.match(await answers(page).locator(".figures").innerText(), /stopped$/);
  check.ok((await answers(page).locator(".md").innerText()).length > 0);
}

export async function branches({ page, url, check }) {
  await openChat({ page, url });
  await ask(page, "First words.");
  await page.locator(".message.user").getByRole("button", { name: "Edit" }).click();
  await page.getByLabel("Edit the message").fill("Other words.");
  await page.getByLabel("Edit the message").press("Enter");
  await settled(page);
  check.equal(await page.locator(".message.user .branches").innerText(), "2/2");
  await answers(page).getByRole("button", { name: "Answer again" }).click();
  await settled(page);
  check.equal(await answers(page).locator(".branches").innerText(), "2/2");
  await page.locator(".message.user").getByRole("button", { name: "Previous branch" }).click();
  check.equal(await page.locator(".user-text").innerText(), "First words.");
  await page.locator("#composer").press("Escape");
  await page.keyboard.press("t");
  const rows = page.locator(".tree li");
  check.equal(await rows.count(), 5);
  check.equal(await page.locator(".tree .in-path").count(), 2);
  await rows.filter({ hasText: "Other words." }).getByRole("button").click();
  check.equal(await page.locator(".user-text").innerText(), "Other words.");

  await page.reload();
  check.equal(await page.locator(".user-text").innerText(), "Other words.");
  check.equal(await page.locator(".tree li").count(), 5);
}

export async function deletes_and_restores({ page, url, check }) {
  await stubChat(page, ["An answer."]);
  await openChat({ page, url });
  await ask(page, "Words to delete.");
  await page.locator(".message.user").getByRole("button", { name: "Delete with all that follows" }).click();
  await page.locator(".message").first().waitFor({ state: "detached" });
  await page.getByRole("button", { name: "Undo" }).click();
  await page.locator(".message.assistant", { hasText: "An answer." }).waitFor();
  await page.getByRole("button", { name: "Delete Words to delete." }).click();
  await page.locator(".conversation").waitFor({ state: "detached" });
  await page.getByRole("button", { name: "Undo" }).click();
  await page.locator(".message.assistant", { hasText: "An answer." }).waitFor();
  await page.reload();
  await page.locator(".message.assistant", { hasText: "An answer." }).waitFor();
  check.equal(await page.locator(".conversation").count(), 1);
}

export async function exports_and_imports_the_tree({ page, url, check }) {
  await openChat({ page, url });
  await ask(page, "Words to keep.");
  await answers(page).getByRole("button", { name: "Answer again" }).click();
  await settled(page);
  const text = await answers(page).locator(".md").innerText();
  const downloading = page.waitForEvent("download");
  await page.getByRole("button", { name: "Export the conversation" }).click();
  const file = await (await downloading).path();
  await page.getByRole("button", { name: "Delete Words to keep." }).click();
  await page.locator(".conversation").waitFor({ state: "detached" });
  await page.getByLabel("File to import").setInputFiles({ name: "a.json", mimeType: "application/json", buffer: Buffer.from('{"format": "other"}') });
  await page.locator(".toast", { hasText: "not an exported conversation" }).waitFor();
  await page.getByLabel("File to import").setInputFiles(file);
  await page.locator(".message.user", { hasText: "Words to keep." }).waitFor();
  check.equal(await answers(page).locator(".branches").innerText(), "2/2");
  check.equal(await answers(page).locator(".md").innerText(), text);
}

export async function compares_backends_and_answers({ page, url, check }) {
  await openChat({ page, url }, { models: ["first", "second"], answers: 2 });
  await ask(page, "Say hello.");
  const columns = page.locator(".columns .message");
  check.equal(await columns.count(), 4);
  check.deepEqual(await columns.locator(".who").allInnerTexts(), ["first", "first", "second", "second"]);
  const texts = await columns.locator(".md").allInnerTexts();
  check.equal(new Set(texts).size, 1); // the same weights at temperature 0
  check.ok(texts[0].length > 0);
  await columns.nth(2).getByRole("button", { name: "Continue from this one" }).click();
  await ask(page, "And again.");
  check.equal(await page.locator(".columns").count(), 2);
  await page.reload();
  await page.locator(".columns").nth(1).waitFor();
  check.match(await columns.nth(2).getAttribute("class"), /chosen/);
}

export async function follows_a_json_schema({ page, url, check }) {
  await openChat({ page, url }, { params: { max_tokens: "60", temperature: "0" } });
  await page.getByRole("button", { name: "Settings", exact: true }).click();
  await page.locator("#format").selectOption("json_schema");
  await page.getByRole("button", { name: "Example" }).first().click();
  await page.locator("#schema").fill('{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}');
  await ask(page, "Is water wet?");
  check.match(await answers(page).locator(".parsed").innerText(), /Valid JSON[\s\S]*ok[\s\S]*(true|false)/);
  await page.locator("#schema").fill("{");
  check.match(await page.locator(".failure").innerText(), /is not JSON/);
}

export async function calls_a_tool({ page, url, check }) {
  await openChat({ page, url }, { params: { max_tokens: "60", temperature: "0" } });
  await page.keyboard.press("Escape");
  await page.keyboard.press("s");
  await page.locator(".field", { hasText: "Tools" }).last().getByRole("button", { name: "Example" }).click();
  await page.locator("#tool-choice").selectOption("required");
  await ask(page, "What is the weather in Paris?");
  check.match(await answers(page).locator(".call").first().innerText(), /get_weather[\s\S]*city[\s\S]*"/);
  await page.locator("#tool-choice").selectOption("none");
  await page.getByLabel("Result of get_weather").first().fill('{"temperature": 21}');
  await page.getByRole("button", { name: /Give .* to the model/ }).click();
  await settled(page);
  check.ok((await page.locator(".message.tool").count()) > 0);
  check.ok((await answers(page).last().locator(".md").innerText()).length > 0);
}

export async function shows_probabilities({ page, url, check }) {
  await openChat({ page, url }, { logprobs: true, params: { max_tokens: "6", temperature: "0" } });
  await ask(page, "Say hello.");
  await page.getByRole("button", { name: "Tokens" }).click();
  await page.locator(".token").nth(1).hover();
  const shown = page.locator(".alternatives .row-bar");
  check.equal(await shown.count(), 5);
  check.match(await page.locator(".alternatives .chosen").innerText(), /%/);
}

export async function attaches_text_and_refuses_images({ page, url, check }) {
  await openChat({ page, url });
  const picker = page.getByLabel("Files to attach");
  await picker.setInputFiles([
    { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("A note.") },
    { name: "cat.png", mimeType: "image/png", buffer: Buffer.from("89504e47", "hex") },
    { name: "blob.bin", mimeType: "application/octet-stream", buffer: Buffer.from([0, 1, 2]) },
  ]);
  await page.locator(".toast", { hasText: "can't read images" }).waitFor();
  await page.locator(".toast", { hasText: "blob.bin is not a text file" }).waitFor();
  const sent = page.waitForRequest(/chat\/completions/);
  await ask(page, "Read it.");
  const { messages } = (await sent).postDataJSON();
  check.equal(messages.at(-1).content, "```notes.txt\nA note.\n```\n\nRead it.");
}

export async function sends_images_to_models_that_read_them({ page, url, check }) {
  await page.route("**/v1/models", async (route) => {
    const response = await route.fetch();
    const body = await response.json();
    for (const model of body.data) model.capabilities.push("images");
    await route.fulfill({ response, json: body });
  });
  let sent = null;
  await page.route("**/v1/chat/completions", (route) => {
    sent = route.request().postDataJSON();
    return route.fulfill({ contentType: "text/event-stream", body: 'data: {"choices": [{"index": 0, "delta": {"content": "A dot."}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n' });
  });
  await openChat({ page, url });
  const dot = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");
  await page.getByLabel("Files to attach").setInputFiles({ name: "dot.png", mimeType: "image/png", buffer: dot });
  await page.locator(".attached-list img").waitFor();
  await ask(page, "What is it?");
  const [image, text] = sent.messages.at(-1).content;
  check.equal(image.image_url.url, `data:image/png;base64,${dot.toString("base64")}`);
  check.equal(text.text, "What is it?");
  await page.locator(".message.user img.attached").waitFor();
}

export async function keeps_an_answer_that_is_interrupted({ page, url, check }) {
  await stubChat(page, Array(1000).fill("word "), { every: 1, ms: 50 });
  await openChat({ page, url });
  await write(page, "Go on.");
  const isKept = async () => {
    const { readNodes } = await import(new URL("chat/database.js", document.querySelector("script[type=module]").src).href);
    const nodes = await readNodes(sessionStorage.getItem("engine.conversation"));
    return [...nodes.values()].some((each) => each.role === "assistant" && each.content.includes("word"));
  };
  while (!(await page.evaluate(isKept))) await page.waitForTimeout(100);
  await page.reload();
  await answers(page).locator(".md", { hasText: "word" }).waitFor();
  check.match(await answers(page).locator(".figures").innerText(), /interrupted/);
}

export async function keeps_conversations_on_the_server({ page, url, check }) {
  await openChat({ page, url }, { stored: true });
  await ask(page, "Remember the number 7.");
  const sent = page.waitForRequest(/v1\/responses/);
  await ask(page, "Which number?");
  const body = (await sent).postDataJSON();
  check.equal(body.input.length, 1);
  check.match(body.previous_response_id, /^resp_/);
  const last = await page.evaluate(async () => {
    const { chat } = await import(document.querySelector("script[type=module]").src.replace("app.js", "chat/state.js"));
    return chat.value.nodes.get(chat.value.meta.leaf).responseId;
  });
  await page.getByRole("button", { name: "Delete Remember the number 7." }).click();
  await page.getByRole("button", { name: "Open by id" }).click();
  await page.getByLabel(/Id of its last response/).fill(last);
  await page.getByRole("button", { name: "Open", exact: true }).click();
  await page.locator(".message.user", { hasText: "Which number?" }).waitFor();
  check.deepEqual(await page.locator(".user-text").allInnerTexts(), ["Remember the number 7.", "Which number?"]);
  check.equal(await answers(page).count(), 2);
}

export async function shows_what_the_server_refuses({ page, url, check }) {
  await openChat({ page, url }, { params: { max_tokens: "999999" } });
  await ask(page, "Hello.");
  check.match(await answers(page).getByRole("alert").innerText(), /max_tokens|context/);
}

export async function folds_reasoning({ page, url, check }) {
  await page.route("**/v1/chat/completions", (route) =>
    route.fulfill({
      contentType: "text/event-stream",
      body: [{ reasoning_content: "Let me think." }, { content: "Done." }].map((delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: delta.content ? "stop" : null }] })}\n\n`).join("") + "data: [DONE]\n\n",
    }),
  );
  await openChat({ page, url });
  await ask(page, "Think.");
  check.equal(await page.locator(".reasoning-text").isVisible(), false);
  await page.locator(".reasoning summary").click();
  check.equal(await page.locator(".reasoning-text").innerText(), "Let me think.");
  check.equal((await answers(page).locator(".md").innerText()).trim(), "Done.");
}

export async function waits_while_the_model_loads({ page, url, check }) {
  let state = "loading";
  await page.route("**/v1/models", async (route) => {
    const response = await route.fetch();
    const body = await response.json();
    for (const model of body.data) model.state = state;
    await route.fulfill({ response, json: body });
  });
  await stubChat(page, ["Here ", "I am."]);
  await openChat({ page, url });
  await write(page, "Are you there?");
  await page.locator(".actions.running", { hasText: "loading" }).waitFor();
  check.match(await page.locator("#state").innerText(), /Loading the model/);
  state = "loaded";
  await settled(page);
  check.equal((await answers(page).locator(".md").innerText()).trim(), "Here I am.");
}

export async function a_refusal_is_shown_in_the_end({ page, url, check }) {
  await page.addInitScript(() => {
    const real = window.setTimeout;
    window.setTimeout = (done, ms, ...rest) => real(done, ms / 50, ...rest);
  });
  let asked = 0;
  await page.route("**/v1/chat/completions", (route) => {
    asked += 1;
    return route.fulfill({ status: 503, json: { error: { message: "The engine is overloaded." } } });
  });
  await openChat({ page, url });
  await write(page, "Are you there?");
  await page.getByText("The engine is overloaded.").waitFor();
  check.ok(asked > 1 && asked < 20, `asked ${asked} times`);
}

export async function continues_an_answer_that_was_cut({ page, url, check }) {
  await openChat({ page, url }, { params: { max_tokens: "8", temperature: "0" } });
  await ask(page, "Tell me about the sea.");
  const before = (await answers(page).locator(".md").innerText()).trim();
  await answers(page).getByRole("button", { name: "Continue" }).click();
  await page.waitForFunction((text) => document.querySelector(".message.assistant .md").innerText.trim().length > text.length, before);
  await settled(page);
  const after = (await answers(page).locator(".md").innerText()).trim();
  check.ok(after.startsWith(before), `${before} | ${after}`);
  check.match(await answers(page).locator(".figures").innerText(), /^16 tokens/);
}

export async function a_lost_connection_is_told_in_sight({ page, url, check }) {
  await stubChat(page, Array(200).fill("A line.\n\n"), { every: 20, ms: 20, breaksAt: 120 });
  await openChat({ page, url });
  await write(page, "Go on.");
  const failed = page.locator(".failed", { hasText: "The connection to the server was lost." });
  await failed.waitFor();
  check.deepEqual(await failed.getByRole("button").allInnerTexts(), ["Retry", "Continue"]);
  await page.waitForFunction(() => {
    const [failed, dock] = [".failed", ".dock"].map((each) => document.querySelector(each).getBoundingClientRect());
    return failed.top > 0 && failed.bottom <= dock.top;
  });
  check.ok((await answers(page).locator(".md").innerText()).startsWith("A line."));
}

export async function long_messages_fold_and_toasts_cover_nothing({ page, url, check }) {
  await stubChat(page, ["Read."]);
  await openChat({ page, url });
  await ask(page, "A line.\n".repeat(100));
  const height = () => page.locator(".user-text").evaluate((each) => each.clientHeight);
  const folded = await height();
  await page.getByRole("button", { name: /Show all/ }).click();
  check.ok((await height()) > 4 * folded);
  await page.locator(".message.user").getByRole("button", { name: "Delete with all that follows" }).click();
  const [toast, dock] = [await page.locator(".toasts").boundingBox(), await page.locator(".dock").boundingBox()];
  check.ok(toast.y + toast.height < dock.y);
}

export async function settings_show_the_values_in_force({ page, url, check }) {
  await openChat({ page, url }, { params: {} });
  await page.keyboard.press("Escape");
  await page.keyboard.press("s");
  const usual = (await (await fetch(`${url}/v1/models`)).json()).data[0].chat_sampling.temperature;
  await page.waitForFunction((value) => document.querySelector("#param-temperature")?.placeholder === value, String(usual));
  check.equal(await page.locator("#param-max_tokens").getAttribute("placeholder"), "no limit");
  check.equal(await page.locator("#param-dry_base").getAttribute("placeholder"), "1.75");
}

const FORMULAS = "Inline $a^2$ and \\(b_1\\), prices of $5 and $10, `$code$`.\n\n$$\\frac{1}{2}\n= x$$\n\n\\[\n\\sqrt{2}\n\\]\n\n$\\wrong{$\n\n";
const TABLE = "| l | c | r |\n|:--|:-:|--:|\n| a | b | c |\n\n```python\ndef f(x):\n    return \"text\" # note\n```\n";

export async function shows_formulas_colours_and_aligned_tables({ page, url, check }) {
  const asked = [];
  page.on("request", (request) => asked.push(new URL(request.url()).pathname));
  await stubChat(page, ["Plain text."]);
  await openChat({ page, url });
  await ask(page, "Hello.");
  check.deepEqual(asked.filter((each) => /katex|highlight/.test(each)), []); // nothing, until it is needed
  await stubChat(page, (FORMULAS + TABLE).match(/[^]{1,3}/g));
  await page.reload();
  await ask(page, "Show me.");
  const shown = answers(page).last();
  await shown.locator(".hljs-keyword").first().waitFor();
  await page.waitForFunction(() => document.querySelectorAll(".katex").length === 4);
  check.equal(await shown.locator(".formula").count(), 2);
  const text = await shown.locator(".md").innerText();
  check.ok(text.includes("prices of $5 and $10, $code$"), text);
  check.ok(text.includes("$\\wrong{$"), text);
  check.deepEqual(await shown.locator("tbody td").evaluateAll((all) => all.map((each) => getComputedStyle(each).textAlign)), ["left", "center", "right"]);
  check.equal(await page.evaluate(() => document.fonts.check("16px KaTeX_Main")), true);
}

// A PDF file with one page, which has this text.
function pdfOf(text) {
  const drawn = `BT /F1 12 Tf 20 100 Td (${text}) Tj ET`;
  const page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>";
  const objects = ["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page, `<< /Length ${drawn.length} >>\nstream\n${drawn}\nendstream`, "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"];
  return Buffer.from(`%PDF-1.4\n${objects.map((each, index) => `${index + 1} 0 obj\n${each}\nendobj\n`).join("")}trailer << /Root 1 0 R /Size 6 >>\n%%EOF\n`);
}

export async function attaches_the_text_of_pdfs({ page, url, check }) {
  await stubChat(page, ["Read."]);
  await openChat({ page, url });
  const picker = page.getByLabel("Files to attach");
  await picker.setInputFiles([
    { name: "a.pdf", mimeType: "application/pdf", buffer: pdfOf("Words in a file.") },
    { name: "empty.pdf", mimeType: "application/pdf", buffer: pdfOf("") },
    { name: "bad.pdf", mimeType: "application/pdf", buffer: Buffer.from("no PDF") },
  ]);
  await page.locator(".attached-list li", { hasText: "a.pdf" }).waitFor();
  await page.locator(".toast", { hasText: "empty.pdf has no text" }).waitFor();
  await page.locator(".toast", { hasText: "bad.pdf can't be read" }).waitFor();
  await ask(page, "Read it.");
  await page.locator(".file summary").click();
  check.equal(await page.locator(".file pre").innerText(), "Words in a file.");
}
