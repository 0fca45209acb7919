// The open page: it updates, waits while the service is away, and comes back by itself; many tabs at once.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { PAGES, launch, visit, watch } from "./lib/browser.mjs";
import { Gate, House, until } from "./lib/gate.mjs";
import { proxy } from "./lib/servers.mjs";

let browser;

before(async () => {
  browser = await launch();
});
after(() => browser?.close());

/** What changes with each look: how long the service runs. */
const uptime = (page) => page.locator("#p-node").innerText();
/** A page that was loaded anew does not know its mark any more. */
const mark = (page) => page.evaluate(() => (globalThis.marked = true));
const marked = (page) => page.evaluate(() => globalThis.marked === true);

async function updates(page) {
  const before = await uptime(page);
  await until("an update", async () => (await uptime(page)) !== before);
}

test("every page of a running demo updates in place, without a word on the console", async (t) => {
  const demo = await Gate.start(["demo", "--speed", "4"]);
  t.after(() => demo.stop());
  await until("a queue", async () => (await demo.state()).queue.waiting > 10);
  const { page, faults } = await visit(t, browser, demo.url);
  for (const [path, name] of PAGES) {
    await page.goto(`${demo.url}/${path}`);
    await mark(page);
    const region = page.locator(path === "settings" ? "#p-store" : "main");
    const before = await region.innerText();
    await until(`a change of ${name}`, async () => (await region.innerText()) !== before);
    await updates(page);
    assert.ok(await marked(page), `${name} was not loaded anew`);
  }
  assert.deepEqual(faults, []);
});

test("U04: a page outlives a kill and a restart, and says so while the service is away", async (t) => {
  const house = await House.start();
  t.after(() => house.stop());
  await house.fill();
  const { gate } = house;
  const { page } = await visit(t, browser, `${gate.url}/queue`);
  await mark(page);
  await updates(page);
  const waiting = await page.locator("nav [data-fig='queue.waiting']").innerText();
  await gate.kill();
  await page.locator("#away").waitFor({ state: "visible" });
  assert.match(await page.locator("#away").innerText(), /No connection since/);
  assert.ok(await page.evaluate(() => document.documentElement.classList.contains("is-away")), "the figures are greyed");
  assert.equal(await page.locator("nav [data-fig='queue.waiting']").innerText(), waiting, "the last figures stay");
  await gate.run();
  await page.locator("#away").waitFor({ state: "hidden" });
  await updates(page);
  assert.ok(await marked(page), "without a reload");
  assert.equal(await page.locator("nav [data-fig='queue.waiting']").innerText(), waiting, "the queue outlived it as well");
});

test("U04: thirty pages behind a proxy that answers 503 say so, and come back by themselves, spread out", async (t) => {
  const house = await House.start();
  t.after(() => house.stop());
  await house.fill();
  const before = await proxy(house.gate.url);
  t.after(() => before.stop());
  const context = await browser.newContext();
  t.after(() => context.close());
  // The waits that pages choose are what spreads them out.
  await context.addInitScript(() => {
    const real = globalThis.setTimeout;
    globalThis.waits = [];
    globalThis.setTimeout = (run, ms, ...more) => {
      globalThis.waits.push(ms);
      return real(run, ms, ...more);
    };
  });
  const pages = [];
  for (let tab = 0; tab < 30; tab += 1) {
    const page = await context.newPage();
    await page.goto(`${before.url}steps`);
    await mark(page);
    pages.push(page);
  }
  before.down = true;
  for (const page of pages) await page.locator("#away").waitFor({ state: "visible" });
  for (const page of pages) assert.match(await page.locator("#away").innerText(), /since .*answers 503/s);
  await until("a few tries of each", async () => {
    const tries = await Promise.all(pages.map((page) => page.evaluate(() => globalThis.waits.filter((ms) => ms > 1_000 && ms < 3_500 && !Number.isInteger(ms)).length)));
    return tries.every((count) => count > 1);
  });
  const waits = await Promise.all(pages.map((page) => page.evaluate(() => globalThis.waits.findLast((ms) => !Number.isInteger(ms)))));
  before.down = false;
  for (const page of pages) await page.locator("#away").waitFor({ state: "hidden" });
  assert.ok(Math.max(...waits) <= 4_000, "none waits for long");
  assert.ok(new Set(waits.map(Math.round)).size > 20, `they do not come back together: ${waits}`);
  assert.deepEqual(await Promise.all(pages.map(marked)), pages.map(() => true));
});

test("U01: ten tabs of one browser update, an eleventh opens, and an action in the first works", async (t) => {
  const house = await House.start();
  t.after(() => house.stop());
  await house.fill();
  const context = await browser.newContext();
  t.after(() => context.close());
  const faults = [];
  const pages = [];
  const tab = async (path) => {
    const page = await context.newPage();
    faults.push(watch(page, house.gate.url));
    await page.goto(`${house.gate.url}/${path}`);
    pages.push(page);
  };
  for (let number = 0; number < 10; number += 1) await tab(PAGES[(number + 1) % PAGES.length][0]);
  await Promise.all(pages.map(updates));
  await tab("");
  await Promise.all(pages.map(updates));
  const [first] = pages;
  await first.locator('a[aria-label="Cancel ticket waits-1"]').click();
  await first.locator("#dialog button[type=submit]").click();
  await first.locator("#p-told p").waitFor();
  assert.equal((await house.gate.get("/v1/tickets/waits-1")).json.action, "cancelled");
  assert.equal((await house.gate.get("/v1/state")).status, 200);
  assert.deepEqual(faults.flat(), []);
});

test("focus, selection, typed text, open details and ticked boxes survive updates", async (t) => {
  const house = await House.start();
  t.after(() => house.stop());
  await house.fill();
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  await mark(page);
  const row = page.locator("#p-waiters tr[data-id=waits-6]");
  await row.locator("[data-select]").check();
  await page.locator("#p-filter input[name=q]").fill("half a wo");
  await page.locator("#search").fill("typed");
  await page.locator("#search").evaluate((field) => field.setSelectionRange(1, 3));
  const position = row.locator("[data-col=position]");
  assert.equal(await position.innerText(), "7");
  const leave = async (ticket, then) => {
    await house.gate.call("DELETE", `/v1/tickets/${ticket}`);
    await until(`place ${then}`, async () => (await position.innerText()) === then);
    await updates(page);
  };

  // The row moves up while the field has the focus and a part of its text is selected.
  await leave("waits-2", "6");
  assert.deepEqual(
    await page.locator("#search").evaluate((field) => [field === document.activeElement, field.value, field.selectionStart, field.selectionEnd]),
    [true, "typed", 1, 3],
  );
  assert.equal(await page.locator("#p-filter input[name=q]").inputValue(), "half a wo");
  assert.deepEqual(await page.locator("[data-select]:checked").evaluateAll((boxes) => boxes.map((box) => box.value)), ["waits-6"]);

  // The focus and a selection in the row itself move with it.
  const link = row.locator("a").first();
  await link.focus();
  await link.evaluate((element) => getSelection().selectAllChildren(element));
  await leave("waits-3", "5");
  assert.ok(await link.evaluate((element) => element === document.activeElement));
  assert.equal(await page.evaluate(() => getSelection().toString()), "waits-6");

  await page.goto(`${house.gate.url}/decisions`);
  await mark(page);
  const open = page.locator("#p-decisions li[data-id]").nth(2);
  const id = await open.getAttribute("data-id");
  await open.locator("summary").click();
  const count = await page.locator("#p-decisions li[data-id]").first().getAttribute("data-id");
  await house.gate.call("DELETE", "/v1/tickets/waits-4");
  await until("a new decision", async () => (await page.locator("#p-decisions li[data-id]").first().getAttribute("data-id")) !== count);
  assert.deepEqual(await page.locator("#p-decisions details[open]").evaluateAll((all) => all.map((one) => one.closest("li").dataset.id)), [id]);
  assert.ok(await marked(page));

  await page.goto(`${house.gate.url}/settings`);
  await page.locator("#in-headroom").fill("0.7");
  await house.gate.call("PATCH", "/v1/settings", { max_wait_s: 70_000 });
  await page.locator("#p-audit tbody tr").first().waitFor();
  assert.equal(await page.locator("#in-headroom").inputValue(), "0.7");
});

test("a page loads itself anew when the version of the service changed, but not while somebody types", async (t) => {
  const house = await House.start();
  t.after(() => house.stop());
  const before = await proxy(house.gate.url);
  t.after(() => before.stop());
  const { page, faults } = await visit(t, browser, `${before.url}queue`);
  await mark(page);
  await updates(page);
  await page.locator("#search").fill("in the middle of it");
  let changed = 0;
  // Only updates tell another version: the document that is loaded then has the version of its own files.
  before.headers = (headers, request) => {
    if (!("kvgate-parts" in request.headers)) return headers;
    changed += 1;
    return { ...headers, "kvgate-assets": "0000abcd" };
  };
  await until("a few updates of another version", () => changed > 2);
  assert.ok(await marked(page), "typed text is not lost");
  await page.locator("#search").fill("");
  await until("a reload", async () => !(await marked(page).catch(() => true)));
  before.headers = (headers) => headers;
  await updates(page);
  assert.deepEqual(faults, []);
});
