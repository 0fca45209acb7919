// The keyboard does what links and buttons do, and nothing while somebody types.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { PAGES, launch, visit } from "./lib/browser.mjs";
import { House, until } from "./lib/gate.mjs";

let browser;
let house;

before(async () => {
  browser = await launch();
  house = await House.start();
  await house.fill({ leases: 8, waiters: 12 });
  await house.failedCloses(["line-3", "line-4"]);
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

const KEYS = { "": "o", queue: "q", leases: "l", engines: "e", sessions: "s", decisions: "d", steps: "r", settings: "t" };

test("g and a letter lead to each page", async (t) => {
  const { page, faults } = await visit(t, browser, `${house.gate.url}/leases`);
  for (const [path] of [...PAGES.slice(1), PAGES[0]]) {
    await page.keyboard.press("g");
    await Promise.all([page.waitForURL(`${house.gate.url}/${path}`), page.keyboard.press(KEYS[path])]);
    await page.waitForLoadState();
  }
  assert.deepEqual(faults, []);
});

const current = (page) => page.evaluate(() => document.querySelector("[data-cur]")?.dataset.id);
const chosen = (page) => page.locator("[data-select]:checked").evaluateAll((boxes) => boxes.map((box) => box.value));

test("j and k move, x selects, c and Escape ask and leave, Enter opens", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  await page.keyboard.press("j");
  await page.keyboard.press("j");
  await page.keyboard.press("j");
  assert.equal(await current(page), "waits-2");
  await page.keyboard.press("k");
  assert.equal(await current(page), "waits-1");

  // What the row offers, while nothing is chosen.
  await page.keyboard.press("c");
  await page.locator("#dialog[open] button[type=submit]").waitFor();
  assert.match(await page.locator("#dialog").innerText(), /Cancel ticket waits-1/);
  await page.keyboard.press("Escape");
  await page.locator("#dialog").waitFor({ state: "hidden" });

  // What is chosen, after that.
  await page.keyboard.press("x");
  await page.keyboard.press("j");
  await page.keyboard.press("x");
  assert.deepEqual(await chosen(page), ["waits-1", "waits-2"]);
  await page.keyboard.press("c");
  await page.locator("#dialog[open] button[type=submit]").waitFor();
  assert.match(await page.locator("#dialog").innerText(), /Cancel 2 tickets/);
  await page.keyboard.press("Escape");
  await page.locator("#dialog").waitFor({ state: "hidden" });
  await page.keyboard.press("x");
  assert.deepEqual(await chosen(page), ["waits-1"]);

  await Promise.all([page.waitForURL(/ticket\?id=waits-2/), page.keyboard.press("Enter")]);
});

test("r retries the row, then what is chosen", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/closes?failed=true`);
  await page.keyboard.press("j");
  await page.keyboard.press("r");
  await page.locator("#dialog[open] button[type=submit]").waitFor();
  assert.match(await page.locator("#dialog").innerText(), /Retry close/);
  await page.keyboard.press("Escape");
  await page.locator("#dialog").waitFor({ state: "hidden" });
  await page.keyboard.press("x");
  await page.keyboard.press("j");
  await page.keyboard.press("x");
  await page.keyboard.press("r");
  await page.locator("#dialog[open] button[type=submit]").waitFor();
  assert.match(await page.locator("#dialog").innerText(), /Retry 2 closes/);
});

test("a point holds the page and lets it go on", async (t) => {
  const { page, context } = await visit(t, browser, `${house.gate.url}/queue`);
  const other = await context.newPage();
  await other.goto(`${house.gate.url}/queue`);
  const ticks = (of) => {
    const seen = { count: 0 };
    of.on("request", (request) => (seen.count += "kvgate-parts" in request.headers() ? 1 : 0));
    return seen;
  };
  const [held, going] = [ticks(page), ticks(other)];
  await until("an update", () => held.count > 0);
  await page.keyboard.press(".");
  assert.ok(await page.locator("#held").isVisible());
  const before = held.count;
  going.count = 0;
  await until("updates of another page", () => going.count > 3);
  // One may have been on its way.
  assert.ok(held.count <= before + 1, `${held.count - before} updates while it was held`);
  await page.keyboard.press(".");
  await until("updates again", () => held.count > before + 2);
  assert.ok(await page.locator("#held").isHidden());
});

test("a hidden page asks for nothing, and is fresh as soon as it is seen", async (t) => {
  const { page, context } = await visit(t, browser, `${house.gate.url}/queue`);
  const other = await context.newPage();
  await other.goto(`${house.gate.url}/queue`);
  let hidden = 0;
  let seen = 0;
  page.on("request", () => (hidden += 1));
  other.on("request", () => (seen += 1));
  await until("an update", () => hidden > 0);
  const show = (state) =>
    page.evaluate((state) => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => state });
      document.dispatchEvent(new Event("visibilitychange"));
    }, state);
  await show(true);
  const before = hidden;
  seen = 0;
  await until("updates of another page", () => seen > 3);
  assert.ok(hidden <= before + 1, `${hidden - before} requests while hidden`);
  await show(false);
  await until("updates again", () => hidden > before + 2);
});

test("? shows the keys, / searches, and no key does anything while somebody types", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  await page.keyboard.press("?");
  await page.locator("#help[open]").waitFor();
  // Behind a dialog no key does anything.
  await page.keyboard.press("j");
  assert.equal(await current(page), undefined);
  await page.keyboard.press("Escape");
  await page.locator("#help").waitFor({ state: "hidden" });

  await page.keyboard.press("/");
  assert.ok(await page.locator("#search").evaluate((field) => field === document.activeElement));
  const words = "gq jk x c r . ? /";
  await page.keyboard.type(words);
  assert.equal(await page.locator("#search").inputValue(), words);
  assert.equal(page.url(), `${house.gate.url}/queue`);
  assert.equal(await current(page), undefined);
  assert.equal(await page.locator("dialog[open]").count(), 0);
  assert.ok(await page.locator("#held").isHidden());
  await page.keyboard.press("Escape");
  await page.keyboard.press("j");
  assert.equal(await current(page), "waits-0");
  // Chords belong to the browser.
  await page.keyboard.press("Control+j");
  assert.equal(await current(page), "waits-0");
});

test("everything is reached by the tab key, and the focus is seen", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.className), "skip");
  const wanted = await page.evaluate(() => {
    const all = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, summary")];
    return all.filter((element) => element.checkVisibility() && !element.disabled).length;
  });
  const reached = new Set();
  const unseen = [];
  for (let step = 0; step <= wanted + 5; step += 1) {
    const [key, marked] = await page.evaluate(() => {
      const element = document.activeElement;
      globalThis.known ??= new Map();
      if (!globalThis.known.has(element)) globalThis.known.set(element, globalThis.known.size);
      const style = getComputedStyle(element);
      return [globalThis.known.get(element), style.outlineStyle !== "none" || style.boxShadow !== "none" || element === document.body ? "" : element.outerHTML.slice(0, 90)];
    });
    reached.add(key);
    if (marked) unseen.push(marked);
    await page.keyboard.press("Tab");
  }
  assert.deepEqual(unseen, []);
  assert.ok(reached.size >= wanted, `${reached.size} of ${wanted} were reached`);
});
