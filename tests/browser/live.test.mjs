// The open page: it updates, waits while it is away, and comes back by itself; many tabs at once.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { PAGES, launch, open, watch } from "./lib/browser.mjs";
import { Gate, until } from "./lib/gate.mjs";

let browser;

before(async () => {
  browser = await launch();
});
after(() => browser?.close());

const figure = (page) => page.locator("#p-node").innerText();

test("U04: a page outlives a kill and a restart, and says so while the service is away", async (t) => {
  const demo = await Gate.start(["demo", "--speed", "4"]);
  t.after(() => demo.stop());
  const { context, page } = await open(browser, demo.url);
  const first = await figure(page);
  await until("an update", async () => (await figure(page)) !== first);
  await demo.kill();
  await page.locator("#away").waitFor({ state: "visible" });
  assert.match(await page.locator("#away").innerText(), /No connection since/);
  assert.ok(await page.evaluate(() => document.documentElement.classList.contains("is-away")));
  demo.listen = new URL(demo.url).host;
  await demo.run();
  await page.locator("#away").waitFor({ state: "hidden" });
  const back = await figure(page);
  await until("an update after the restart", async () => (await figure(page)) !== back);
  await context.close();
});

test("U01: ten tabs of one browser update, and an eleventh opens", async (t) => {
  const demo = await Gate.start(["demo", "--speed", "4"]);
  t.after(() => demo.stop());
  const context = await browser.newContext();
  const faults = [];
  const pages = [];
  for (let tab = 0; tab < 11; tab += 1) {
    const page = await context.newPage();
    faults.push(watch(page, demo.url));
    await page.goto(`${demo.url}/${PAGES[tab % PAGES.length][0]}`);
    pages.push(page);
  }
  const before = await Promise.all(pages.map(figure));
  await Promise.all(pages.map((page, tab) => until(`an update of tab ${tab}`, async () => (await figure(page)) !== before[tab])));
  assert.deepEqual(faults.flat(), []);
  await context.close();
});
