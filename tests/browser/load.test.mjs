// A long queue neither freezes a page nor makes it grow (U03).
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { PAGES, launch, visit } from "./lib/browser.mjs";
import { until } from "./lib/gate.mjs";
import { longQueue } from "./lib/queue.mjs";

const PAGE_BYTES_MAX = 300 * 1_024;

let browser;
let house;

before(async () => {
  browser = await launch();
  house = await longQueue();
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

test("U03: with 10,000 waiters and 5,000 leases no page is above 300 KiB", async () => {
  const filtered = ["queue?q=name-99", "leases?client=rollout-of-a-long-name-7", "sessions?q=name", "search?q=name", "decisions?action=wait"];
  for (const at of [...PAGES.map(([path]) => path), ...filtered]) {
    const { status, text } = await house.gate.get(`/${at}`);
    assert.equal(status, 200, at);
    assert.ok(Buffer.byteLength(text) < PAGE_BYTES_MAX, `${at}: ${Buffer.byteLength(text)} bytes`);
  }
});

test("U03: three browsers are open, acquires and cancels go on, and every page keeps up", async (t) => {
  const pages = [];
  for (const at of ["", "queue", "leases"]) {
    const { page } = await visit(t, browser, `${house.gate.url}/${at}`);
    pages.push(page);
  }
  const rows = await pages[1].locator("#p-waiters tbody tr").count();
  assert.equal(rows, 50);
  const total = () => pages[1].locator("#p-waiters [data-fig='queue.waiting']").innerText();
  assert.equal(await total(), "10,000");
  let at = 0;
  for (let round = 0; round < 10; round += 1) {
    const looks = await Promise.all(pages.map((page) => page.locator("#p-node").innerText()));
    for (const end = at + 40; at < end; at += 1) {
      const ticket = `comes-${at}`;
      const asked = await house.gate.post("/v1/leases", { ticket_id: ticket, session_id: ticket, reservation_tokens: 10, wait_s: 0 });
      assert.equal(asked.status, 202, asked.text);
      house.presence.tickets.add(ticket);
    }
    for (let number = at - 40; number < at - 20; number += 1) {
      house.presence.tickets.delete(`comes-${number}`);
      const gone = await house.gate.call("DELETE", `/v1/tickets/comes-${number}`);
      assert.equal(gone.json.outcome, "withdrawn");
    }
    await Promise.all(pages.map((page, number) => until("an update", async () => (await page.locator("#p-node").innerText()) !== looks[number])));
  }
  await until("the total on the page", async () => (await total()) === "10,200");
  assert.equal(await pages[1].locator("#p-waiters tbody tr").count(), rows, "the page does not grow");
  const size = await pages[1].evaluate(() => document.documentElement.outerHTML.length);
  assert.ok(size < PAGE_BYTES_MAX, `${size} characters`);
});

test("U03: one of ten thousand is found by its id", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  await page.keyboard.press("/");
  await page.keyboard.type("waits-of-a-long-name-8765");
  await page.keyboard.press("Enter");
  await page.waitForURL(/8765/);
  await page.locator("main", { hasText: "waits-of-a-long-name-8765" }).waitFor();
});
