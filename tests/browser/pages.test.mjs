// Every page, in light, dark and on a phone: nothing that a screen reader or a keyboard would miss, no
// word on the console, nothing from elsewhere; complete without script, and below a path prefix.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { LOOKS, PAGES, axe, follow, launch, open, visit, watch } from "./lib/browser.mjs";
import { House, until } from "./lib/gate.mjs";
import { proxy } from "./lib/servers.mjs";

let browser;
let house;
/** Addresses beside those of the navigation. */
let others;

before(async () => {
  browser = await launch();
  house = await House.start();
  const { gate } = house;
  const { leases } = await house.fill({ leases: 60, waiters: 70 });
  const [close] = await house.failedCloses(["line-3", "line-4"]);
  await gate.call("PATCH", "/v1/settings", { max_wait_s: 80_000 });
  await gate.call("DELETE", "/v1/tickets/held-59");
  for (let step = 1; step < 4; step += 1) await gate.post("/v1/steps", { run: "exp-7", step });
  others = {
    Closes: "closes",
    "Ticket that waits": "ticket?id=waits-5",
    "Ticket that holds a lease": "ticket?id=held-1",
    "Ticket that is not known": "ticket?id=nobody",
    Lease: `lease?id=${leases[2]}`,
    Session: "session?id=session-2",
    Close: `close?id=${close}`,
    "Search with one finding": "search?q=waits-7",
    "Search with many findings": "search?q=line",
    "Search without a finding": "search?q=nobody",
    "A filter that nothing fits": "queue?client=nobody",
    "Confirmation of one": "confirm?do=cancel&ticket=waits-5",
    "Confirmation of many": `confirm?do=revoke&lease=${leases[2]}&lease=${leases[3]}`,
    "Confirmation of a close": "confirm?do=close&session=session-2",
    "Confirmation of a pause": "confirm?do=pause",
    "A fault": "queue?nothing=1",
    "A problem": "problems/overloaded",
  };
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

/** One heading, no finding of axe-core, no wider than the window. */
async function sound(page, name) {
  assert.equal(await page.locator("h1").count(), 1, `${name}: h1`);
  assert.deepEqual(await axe(page), [], name);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  assert.ok(wide <= 0, `${name} is ${wide} px wider than the window`);
}

for (const [look, options] of Object.entries(LOOKS)) {
  for (const [path, name] of PAGES) {
    test(`${name} in ${look} is without findings`, async (t) => {
      const { page, faults } = await visit(t, browser, `${house.gate.url}/${path}`, options);
      await sound(page, name);
      assert.deepEqual(faults, []);
    });
  }

  test(`details, searches, confirmations and faults in ${look} are without findings`, async (t) => {
    const { page, faults } = await visit(t, browser, house.gate.url, options);
    const found = [];
    for (const [name, at] of Object.entries(others)) {
      await page.goto(`${house.gate.url}/${at}`);
      await sound(page, name).catch((error) => found.push(error.message));
    }
    assert.deepEqual(found, []);
    assert.deepEqual(faults, []);
  });

  test(`open dialogs in ${look} are without findings`, async (t) => {
    const { page } = await visit(t, browser, `${house.gate.url}/queue`, options);
    await page.locator('a[data-dialog][href*="pause"]').click();
    await page.locator("#dialog[open] button[type=submit]").waitFor();
    assert.deepEqual(await axe(page), []);
    await page.keyboard.press("Escape");
    await page.locator("#dialog").waitFor({ state: "hidden" });
    await page.keyboard.press("?");
    await page.locator("#help[open]").waitFor();
    assert.deepEqual(await axe(page), []);
  });
}

test("each page is complete without script", async (t) => {
  const { page, faults } = await visit(t, browser, house.gate.url, { javaScriptEnabled: false });
  for (const [path, name] of PAGES) {
    await page.goto(`${house.gate.url}/${path}`);
    assert.match(await page.title(), new RegExp(name));
    assert.ok((await page.locator("main").innerText()).length > 40, name);
    // Where text is typed, a page that loads itself anew would take it away.
    const refreshes = await page.locator("noscript meta[http-equiv=refresh]").count();
    assert.equal(refreshes, path === "settings" ? 0 : 1, name);
    for (const [, other] of PAGES) assert.equal(await page.locator("nav a", { hasText: other }).count(), 1);
  }
  assert.deepEqual(faults, []);
});

test("every page is reached on a phone", async (t) => {
  const { page } = await visit(t, browser, house.gate.url, LOOKS.phone);
  for (const [path, name] of [...PAGES.slice(1), PAGES[0]]) {
    await follow(page, page.locator("nav a", { hasText: name }));
    assert.equal(page.url(), `${house.gate.url}/${path}`);
    assert.ok((await page.locator("h1").boundingBox()).width > 20, `the heading of ${name} is seen`);
  }
});

test("search, filters and pages of a list work without script", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/queue`, { javaScriptEnabled: false });
  const ids = () => page.locator("#p-waiters tbody tr").evaluateAll((rows) => rows.map((row) => row.dataset.id));
  const seen = await ids();
  assert.equal(seen.length, 50);
  for (;;) {
    const next = page.locator("#p-waiters footer a[rel=next]");
    if (!(await next.count())) break;
    await follow(page, next);
    seen.push(...(await ids()));
  }
  const known = (await house.gate.get("/v1/queue?limit=1000")).json.items.map((item) => item.ticket_id);
  assert.deepEqual(seen, known, "all pages together are the queue, in its order");

  await page.goto(`${house.gate.url}/queue`);
  await page.locator("#p-filter input[name=q]").fill("line-12");
  await follow(page, page.locator("#p-filter button"));
  assert.deepEqual(await ids(), ["waits-12"]);
  await follow(page, page.locator("#p-filter a", { hasText: "Show all" }));
  assert.equal((await ids()).length, 50);

  await page.locator("#search").fill("waits-7");
  await Promise.all([page.waitForURL(/(ticket\?id=|search\?q=)waits-7/), page.locator("#search").press("Enter")]);
  assert.match(await page.locator("main").innerText(), /waits-7/);
});

test("every filter of every list narrows it, and is told by the address", async (t) => {
  const { page } = await visit(t, browser, house.gate.url);
  const lists = {
    queue: { q: "waits-1", session_id: "line-5", scope: "train", client: "rollout-9" },
    leases: { q: "held-2", session_id: "session-1", scope: "train", client: "rollout-1" },
    sessions: { q: "line-1" },
    closes: { q: "line-3", session_id: "line-3", state: "done", failed: "true" },
    decisions: { q: "held-2", session_id: "session-1", ticket_id: "waits-3", action: "wait" },
  };
  for (const [list, filters] of Object.entries(lists)) {
    for (const [name, value] of Object.entries(filters)) {
      const query = new URLSearchParams({ [name]: value });
      const { items } = (await house.gate.get(`/v1/${list}?${query}&limit=1000`)).json;
      assert.ok(items.length > 0, `${list}?${query} finds something`);
      await page.goto(`${house.gate.url}/${list}?${query}`);
      const rows = await page.locator(`[data-list=${list}] [data-id]`).evaluateAll((rows) => rows.map((row) => row.dataset.id));
      const ids = items.map((item) => String({ queue: item.ticket_id, leases: item.lease_id, sessions: item.session_id, closes: item.close_id, decisions: item.number }[list]));
      if (list === "decisions") ids.reverse();
      assert.deepEqual(rows, ids.slice(0, 50), `${list}?${query}`);
    }
  }
  await page.goto(`${house.gate.url}/queue`);
  await page.locator("#p-filter input[name=q]").fill("waits-33");
  await follow(page, page.locator("#p-filter button"));
  assert.equal(new URL(page.url()).searchParams.get("q"), "waits-33");
  assert.equal(await page.locator("#p-waiters tbody tr").count(), 1);
});

test("pages work below a path prefix", async (t) => {
  const before = await proxy(house.gate.url, "/tools/kvgate/");
  t.after(() => before.stop());
  const { page, faults } = await visit(t, browser, before.url);
  const missing = [];
  page.on("response", (got) => got.status() === 404 && missing.push(got.url()));
  let updates = 0;
  before.seen = (request) => (updates += "kvgate-parts" in request.headers ? 1 : 0);
  for (const [path, name] of PAGES) {
    await follow(page, page.locator("nav a", { hasText: name }));
    assert.equal(page.url(), `${before.url}${path}`);
    updates = 0;
    await until(`an update of ${name}`, () => updates > 0);
    assert.ok(await page.locator("#away").isHidden());
  }
  await page.goto(`${before.url}queue`);
  await page.locator("#p-waiters tbody tr").nth(4).locator("a[data-dialog]").click();
  await page.locator("#dialog button[type=submit]").click();
  await page.locator("#p-told p").waitFor();
  assert.match(page.url(), /\/tools\/kvgate\/queue\?told=/);
  await follow(page, page.locator("#p-waiters tbody tr").first().locator("a").first());
  assert.match(page.url(), /\/tools\/kvgate\/ticket\?id=/);
  assert.deepEqual(missing, []);
  assert.deepEqual(faults, []);
});

test("no header or page lets anything in from elsewhere", async () => {
  for (const at of [...PAGES.map(([path]) => path), ...Object.values(others)]) {
    const answer = await house.gate.get(`/${at}`, { accept: "text/html" });
    const policy = answer.headers.get("content-security-policy");
    assert.match(policy, /default-src 'none'/, at);
    assert.doesNotMatch(policy, /unsafe/, at);
    assert.doesNotMatch(answer.text, /\sstyle=|<style|\son\w+="|javascript:/i, at);
    assert.doesNotMatch(answer.text, /<script(?![^>]*\ssrc=")/, at);
    // A problem's page may stand below a prefix as well, one step further down.
    assert.doesNotMatch(answer.text, /(?:href|src|action)="(?:\/|[a-z]+:)/, `${at}: links are relative`);
  }
});

test("a page that a browser has kept is whole when it is shown again", async (t) => {
  const { page, context, faults } = await visit(t, browser, `${house.gate.url}/steps`);
  const fresh = await house.gate.get("/steps");
  const again = await house.gate.get("/steps", { "if-none-match": fresh.headers.get("etag") });
  // A browser takes over what such an answer says.
  if (again.status === 304) assert.equal(again.headers.get("content-security-policy"), null);
  for (let tab = 0; tab < 5; tab += 1) {
    const other = await context.newPage();
    const heard = watch(other, house.gate.url);
    await other.goto(`${house.gate.url}/steps`);
    await other.reload();
    assert.deepEqual(heard, []);
    assert.ok(await other.evaluate(() => typeof htmx === "object" && document.styleSheets.length === 1));
    await other.close();
  }
  await page.reload();
  assert.deepEqual(faults, []);
});

test("the theme follows the system until one is chosen, and stays chosen", async (t) => {
  const { page } = await visit(t, browser, house.gate.url, { colorScheme: "light" });
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await paper();
  await page.emulateMedia({ colorScheme: "dark" });
  const dark = await paper();
  assert.notEqual(light, dark);
  await page.locator("#theme").click();
  assert.equal(await paper(), light);
  await page.reload();
  assert.equal(await paper(), light, "it is kept");
  await page.locator("#theme").click();
  await page.emulateMedia({ colorScheme: "light" });
  assert.equal(await paper(), dark, "the system changes nothing any more");
});

test("nothing moves where reduced motion is asked for", async () => {
  for (const [path, name] of PAGES) {
    const { page, context } = await open(browser, `${house.gate.url}/${path}`, { reducedMotion: "reduce" });
    const moving = await page.evaluate(() =>
      [...document.querySelectorAll("*")].filter((element) => {
        const style = getComputedStyle(element);
        const seconds = [...style.transitionDuration.split(","), ...(style.animationName === "none" ? [] : style.animationDuration.split(","))];
        return seconds.some((text) => parseFloat(text) > 0.01);
      }).length,
    );
    assert.equal(moving, 0, name);
    await context.close();
  }
});
