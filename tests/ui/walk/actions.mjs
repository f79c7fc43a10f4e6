// What the user of the walk does: each action is done in the page and in the model. `draw` gives numbers that the seed
// determines. An action that is not possible now returns false.

const message = (page, at) => page.locator(".message").nth(at);
const press = (page, at, name) => message(page, at).getByRole("button", { name, exact: true }).click();

// One of the messages that a tab shows which fits, with its place.
function pick(model, tab, draw, fits) {
  const found = model.path(tab).map((node, at) => ({ node, at })).filter(({ node }) => fits(node));
  return found.length ? found[Math.floor(draw() * found.length)] : null;
}

const pickOf = (list, draw) => list[Math.floor(draw() * list.length)];
const isIdle = (node) => !node.run;

async function typeAndSend({ model, page, tab, word, draw, walk }) {
  if (model.isRunning(tab)) return false;
  const given = { text: word(), files: [], images: 0 };
  const attached = draw();
  const picker = page.getByLabel("Files to attach");
  if (attached < 0.15) {
    given.files = [`${given.text}.txt`];
    await picker.setInputFiles({ name: given.files[0], mimeType: "text/plain", buffer: Buffer.from(`In ${given.files[0]}.\n`) });
  } else if (attached < 0.3) {
    given.images = 1;
    await picker.setInputFiles({ name: "dot.png", mimeType: "image/png", buffer: DOT });
  }
  if (attached < 0.3) await page.locator(".attached-list li").waitFor();
  await page.locator("#composer").fill(given.text);
  await page.locator("#composer").press("Enter");
  walk.asked(model.send(tab, given));
  return true;
}

const DOT = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");

async function type({ model, page, tab, word, draw }) {
  const text = draw() < 0.3 ? "" : word();
  await page.locator("#composer").fill(text);
  model.type(tab, text);
  return true;
}

async function chunk({ model, word, draw }) {
  const node = pickOf(model.allRuns().filter((each) => each.node.run.chat), draw)?.node;
  if (!node) return false;
  const text = ` ${word()}`;
  node.run.chat.write(text);
  node.text += text;
  return true;
}

async function end({ model, draw }) {
  const found = pickOf(model.allRuns().filter((each) => each.node.run.chat), draw);
  if (!found) return false;
  const how = draw();
  const { chat } = found.node.run;
  if (how < 0.15) chat.cut();
  else chat.end(how < 0.3 ? "length" : "stop");
  model.ended(found.conversation, found.node, how < 0.15 ? "failed" : how < 0.3 ? "cut at max tokens" : "");
  return true;
}

async function stop({ model, page, tab, draw }) {
  if (!model.isRunning(tab)) return false;
  if (draw() < 0.5) await page.getByRole("button", { name: "Stop", exact: true }).click();
  else await page.keyboard.press("Escape");
  for (const node of model.runs(tab.shown)) model.ended(tab.shown, node, "stopped");
  return true;
}

async function edit({ model, page, tab, word, draw, walk }) {
  const found = pick(model, tab, draw, isIdle);
  if (!found || model.isRunning(tab)) return false;
  const text = word();
  await press(page, found.at, "Edit");
  await page.getByLabel("Edit the message").fill(text);
  await page.getByLabel("Edit the message").press("Enter");
  if (found.node.role === "user") walk.asked(model.editUser(tab, found.node, text));
  else model.editAnswer(tab, found.node, text);
  return true;
}

async function again({ model, page, tab, draw, walk }) {
  const found = pick(model, tab, draw, isIdle);
  if (!found || model.isRunning(tab)) return false;
  const isAnswer = found.node.role === "assistant";
  await press(page, found.at, isAnswer ? "Answer again" : "Answer this");
  walk.asked(model.answer(tab, isAnswer ? found.node.parent : found.node.id));
  return true;
}

async function offer({ model, page, tab, draw, walk }) {
  const shown = model.expected(tab).messages;
  const found = pick(model, tab, draw, (node) => shown[model.path(tab).indexOf(node)].offers?.length);
  if (!found || model.isRunning(tab)) return false;
  const name = pickOf(shown[found.at].offers, draw);
  await press(page, found.at, name);
  walk.asked(name === "Retry" ? model.retry(tab, found.node) : model.resume(tab, found.node));
  return true;
}

async function branch({ model, page, tab, draw }) {
  const siblings = (node) => tab.shown.children(node.parent);
  const found = pick(model, tab, draw, (node) => isIdle(node) && siblings(node).length > 1);
  if (!found) return false;
  const all = siblings(found.node);
  const at = all.indexOf(found.node);
  const by = at === 0 ? 1 : at === all.length - 1 ? -1 : draw() < 0.5 ? 1 : -1;
  await press(page, found.at, by > 0 ? "Next branch" : "Previous branch");
  model.step(tab, all[at + by]);
  return true;
}

async function remove({ model, page, tab, draw }) {
  const found = pick(model, tab, draw, isIdle);
  if (!found || model.isRunning(tab)) return false;
  await press(page, found.at, "Delete with all that follows");
  const undo = model.remove(tab, found.node);
  if (draw() < 0.5) return true;
  await page.getByRole("button", { name: "Undo" }).last().click();
  undo();
  return true;
}

// The place in the list of conversations that a tab shows.
async function openAt(page, model, conversation) {
  const titles = model.titles(await page.locator(".conversation").allInnerTexts());
  return titles.indexOf(conversation.title || "Untitled");
}

async function switchTo({ model, page, tab, draw }) {
  const conversation = pickOf(model.conversations, draw);
  if (!conversation) return false;
  await page.locator(".conversation").nth(await openAt(page, model, conversation)).click();
  model.open(tab, conversation);
  return true;
}

// Two clicks, of which the first is not waited for.
async function switchTwice({ model, page, tab, draw }) {
  if (model.conversations.length < 2) return false;
  const [first, second] = [pickOf(model.conversations, draw), pickOf(model.conversations, draw)];
  const places = [await openAt(page, model, first), await openAt(page, model, second)];
  await page.evaluate((all) => all.forEach((at) => document.querySelectorAll(".conversation")[at].click()), places);
  model.open(tab, second);
  return true;
}

async function startNew({ model, page, tab }) {
  await page.getByRole("button", { name: "New chat", exact: true }).click();
  model.startNew(tab);
  return true;
}

async function removeConversation({ model, page, tab, draw }) {
  const conversation = pickOf(model.conversations, draw);
  if (!conversation || draw() < 0.5) return false;
  const at = await openAt(page, model, conversation);
  await page.locator(".conversations li .icon-btn").nth(at).click();
  await page.locator(".toast", { hasText: `Deleted ${conversation.title || "the conversation"}.` }).last().waitFor();
  const undo = model.removeConversation(tab, conversation);
  if (draw() < 0.4) return true;
  await page.getByRole("button", { name: "Undo" }).last().click();
  undo();
  return true;
}

async function rename({ model, page, tab, word }) {
  const title = word();
  await page.getByLabel("Title of the conversation").fill(title);
  await page.getByLabel("Title of the conversation").press("Tab");
  model.rename(tab, title);
  return true;
}

async function reload({ model, page, tab }) {
  if (!model.isUp) return false;
  await page.reload();
  await page.locator("#composer").waitFor();
  model.reload(tab);
  return true;
}

async function set({ model, page, tab, word, draw }) {
  await page.getByRole("button", { name: "Settings", exact: true }).click();
  if (draw() < 0.5) {
    const text = word();
    await page.locator("#system").fill(text);
    model.setSystem(tab, text);
  } else {
    const value = String(Math.floor(draw() * 20) / 10);
    await page.locator("#param-temperature").fill(value);
    model.setTemperature(tab, value);
  }
  await page.getByRole("button", { name: "Close the panel" }).click();
  return true;
}

async function stopServer({ model, server }) {
  if (!model.isUp) return false;
  await server.stop();
  model.stopServer();
  return true;
}

async function startServer({ model, server }) {
  if (model.isUp) return false;
  await server.start();
  model.isUp = true;
  return true;
}

// How often each is tried.
export const ACTIONS = [
  [typeAndSend, 16], [chunk, 24], [end, 14], [stop, 5], [edit, 6], [again, 5], [offer, 6], [branch, 6], [remove, 3], [type, 4],
  [switchTo, 8], [switchTwice, 3], [startNew, 5], [removeConversation, 3], [rename, 3], [reload, 4], [set, 3], [stopServer, 2], [startServer, 6],
]; // prettier-ignore
