// What the steps do with the page.

// Opens the chat with settings, which are those of a user who has typed them.
export async function openChat({ page, url }, settings = {}, path = "/") {
  const kept = { params: { max_tokens: "12", temperature: "0" }, ...settings };
  await page.addInitScript((value) => {
    if (!localStorage.getItem("engine.chat")) localStorage.setItem("engine.chat", value);
  }, JSON.stringify(kept));
  await page.goto(url + path);
  await page.locator("#composer").waitFor();
}

export async function write(page, text) {
  await page.locator("#composer").fill(text);
  await page.locator("#composer").press("Enter");
}

// Waits until no answer is being written.
export async function settled(page) {
  await page.waitForFunction(() => {
    const all = [...document.querySelectorAll(".message")];
    const isShown = (each) => each.ariaBusy === "false" && !each.querySelector(".md-tail")?.childNodes.length;
    return all.at(-1)?.matches(".assistant") && all.every(isShown);
  });
}

export async function ask(page, text) {
  await write(page, text);
  await settled(page);
}

export const answers = (page) => page.locator(".message.assistant");

// Makes the page's fetch answer chats with `chunks`, which are texts. `every` of them come each
// `ms` milliseconds. The connection is lost after `breaksAt` of them.
export async function stubChat(page, chunks, { every = 20, ms = 4, breaksAt = Infinity } = {}) {
  await page.addInitScript(
    ({ chunks, every, ms, breaksAt }) => {
      const real = window.fetch;
      window.fetch = (target, options) => {
        if (!String(target).endsWith("v1/chat/completions")) return real(target, options);
        const encoder = new TextEncoder();
        let next = 0;
        const event = (choice) => encoder.encode(`data: ${JSON.stringify({ choices: [{ index: 0, ...choice }] })}\n\n`);
        const body = new ReadableStream({
          async pull(controller) {
            await new Promise((resolve) => setTimeout(resolve, ms));
            for (let sent = 0; sent < every && next < chunks.length; sent++) {
              controller.enqueue(event({ delta: { content: chunks[next++] }, finish_reason: null }));
            }
            if (next >= (breaksAt ?? Infinity)) return controller.error(new TypeError("network error"));
            if (next < chunks.length) return;
            controller.enqueue(event({ delta: {}, finish_reason: "stop" }));
            controller.enqueue(encoder.encode("data: [DONE]\n\n"));
            controller.close();
          },
        });
        return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
      };
    },
    { chunks, every, ms, breaksAt },
  );
}

// What axe-core finds wrong with the page.
export async function faults(page, axe) {
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.violations.map((each) => `${each.id}: ${each.nodes.map((node) => node.html.slice(0, 200)).join(" | ")}`);
}
