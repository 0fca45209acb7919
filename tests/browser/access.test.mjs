// Who may do what in a browser: the log-in, its end, and pages of those who may only look.
import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { after, before, test } from "node:test";
import { LOOKS, PAGES, axe, follow, launch, visit } from "./lib/browser.mjs";
import { House, directory } from "./lib/gate.mjs";
import { proxy } from "./lib/servers.mjs";

const TOKENS = { ops: ["admin", "ops-token-of-the-test-0001"], watch: ["view", "watch-token-of-the-test-02"], loop: ["client", "loop-token-of-the-test-003"] };

let browser;
let house;
let lease;

before(async () => {
  browser = await launch();
  const file = path.join(await directory(), "tokens");
  await writeFile(file, Object.entries(TOKENS).map(([name, [scope, token]]) => `${name}:${scope}:${token}\n`).join(""), { mode: 0o600 });
  house = await House.start({ args: ["--token-file", file], token: TOKENS.ops[1] });
  ({ leases: [lease] } = await house.fill({ leases: 8, waiters: 8 }));
  await house.failedCloses(["line-3"]);
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

async function logIn(page, who, from = house.gate.url) {
  await page.goto(`${from}${from.endsWith("/") ? "" : "/"}login`);
  await page.locator("#token").fill(TOKENS[who][1]);
  await follow(page, page.locator("button[type=submit]"));
}

test("a page without a log-in is the form, which leads back to where one wished to go", async (t) => {
  for (const options of [{}, { javaScriptEnabled: false }]) {
    const { page, context } = await visit(t, browser, house.gate.url, options);
    const answer = await page.goto(`${house.gate.url}/queue?client=rollout-9`);
    assert.equal(answer.status(), 401);
    assert.doesNotMatch(await page.content(), /waits-|held-|rollout-0/, "it tells nothing of what is behind it");
    await page.locator("#token").fill("not-a-token-of-the-house");
    await follow(page, page.locator("button[type=submit]"));
    assert.match(await page.locator("[role=alert]").innerText(), /not known/);
    await page.locator("#token").fill(TOKENS.watch[1]);
    await follow(page, page.locator("button[type=submit]"));
    assert.equal(page.url(), `${house.gate.url}/queue?client=rollout-9`);
    assert.equal(await page.locator("#p-waiters tbody tr").count(), (await house.gate.state()).queue.waiting);
    const cookies = await context.cookies();
    assert.deepEqual(cookies.map((cookie) => [cookie.httpOnly, cookie.sameSite]), [[true, "Strict"]]);
    assert.ok(!cookies[0].value.includes(TOKENS.watch[1]), "the cookie is not the token");
  }
});

test("the log-in form is without findings", async (t) => {
  for (const options of Object.values(LOOKS)) {
    const { page, faults } = await visit(t, browser, `${house.gate.url}/login`, options);
    assert.deepEqual(await axe(page), []);
    assert.ok(await page.locator("#token").evaluate((field) => field === document.activeElement));
    assert.deepEqual(faults, []);
  }
});

test("who may only look sees every page whole, and no way to act", async (t) => {
  const { page, faults } = await visit(t, browser, `${house.gate.url}/login`);
  await logIn(page, "watch");
  const details = ["closes", `lease?id=${lease}`, "ticket?id=waits-1", "session?id=session-1"];
  for (const at of [...PAGES.map(([path]) => path), ...details]) {
    await page.goto(`${house.gate.url}/${at}`);
    assert.equal(await page.locator("#p-nav li").count(), PAGES.length);
    assert.equal(await page.locator("[data-dialog], [data-select], [data-key], a[href^=confirm], form[action=confirm], form[action=act]").count(), 0, at);
    assert.deepEqual(await axe(page), [], at);
  }
  assert.deepEqual(faults, []);
  const answer = await page.goto(`${house.gate.url}/confirm?do=pause`);
  assert.equal(answer.status(), 403);
  const acted = await page.request.post(`${house.gate.url}/act`, { form: { do: "pause" }, maxRedirects: 0 });
  assert.equal(acted.status(), 403);
  assert.equal((await house.gate.state()).features.paused, false);
});

test("an act of somebody who is logged in stands in the audit with their name", async (t) => {
  const { page } = await visit(t, browser, `${house.gate.url}/login`);
  await logIn(page, "ops");
  await page.goto(`${house.gate.url}/queue`);
  await page.locator('a[aria-label="Cancel ticket waits-4"]').click();
  await page.locator("#dialog button[type=submit]").click();
  await page.locator("#p-told p").waitFor();
  const [newest] = await house.gate.audit();
  assert.deepEqual([newest.who, newest.action], ["ops", "ticket_cancelled"]);
  await page.goto(`${house.gate.url}/settings`);
  assert.match(await page.locator("#p-audit tbody tr").first().innerText(), /ops/);
  const text = await page.content();
  for (const [name, [, token]] of Object.entries(TOKENS)) {
    assert.ok(text.includes(name), `the name ${name} is there`);
    assert.ok(!text.includes(token), `the token of ${name} is not`);
  }
});

test("a log-out ends all pages of the browser, and open ones lead to the form by themselves", async (t) => {
  const { page, context } = await visit(t, browser, `${house.gate.url}/login`);
  await logIn(page, "ops");
  const other = await context.newPage();
  await other.goto(`${house.gate.url}/leases`);
  const kept = await context.cookies();
  await page.goto(`${house.gate.url}/settings`);
  await follow(page, page.locator('form[action="logout"] button').first());
  assert.match(page.url(), /\/login$/);
  await other.locator("#token").waitFor();
  assert.equal((await page.goto(`${house.gate.url}/leases`)).status(), 401);
  // The cookie is of no use any more, not only gone.
  await context.addCookies(kept);
  assert.equal((await page.goto(`${house.gate.url}/leases`)).status(), 401);
});

test("log-in and log-out work below a path prefix", async (t) => {
  const before = await proxy(house.gate.url, "/tools/kvgate/");
  t.after(() => before.stop());
  const { page } = await visit(t, browser, `${before.url}queue`);
  await page.locator("#token").fill(TOKENS.ops[1]);
  await follow(page, page.locator("button[type=submit]"));
  assert.equal(page.url(), `${before.url}queue`);
  await page.goto(`${before.url}settings`);
  await follow(page, page.locator('form[action="logout"] button').first());
  assert.equal(page.url(), `${before.url}login`);
  await page.locator("#token").waitFor();
});
