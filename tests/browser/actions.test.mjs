// What operators do from pages: each act through the dialog and without script, one and many, with its
// effect seen in the API and its line in the audit. Nothing happens before it is confirmed.
import assert from "node:assert/strict";
import { after, before, beforeEach, test } from "node:test";
import { follow, launch, visit } from "./lib/browser.mjs";
import { House, until } from "./lib/gate.mjs";

let browser;
let house;
let count = 0;

before(async () => {
  browser = await launch();
  house = await House.start();
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

/** Names that no other test has used. */
const fresh = (name) => `${name}-${(count += 1)}`;

/** Both ways lead to the same: the link or the button that is pressed, and what is told after it. */
const WAYS = {
  "through the dialog": {
    options: {},
    async confirm(page, pressed, button) {
      await pressed.click();
      const shown = page.locator("#dialog[open]");
      await shown.waitFor();
      const text = await shown.innerText();
      await shown.locator("button[type=submit]", { hasText: button }).click();
      await page.locator("#dialog").waitFor({ state: "hidden" });
      await page.locator("#p-told p").waitFor();
      return text;
    },
  },
  "without script": {
    options: { javaScriptEnabled: false },
    async confirm(page, pressed, button) {
      await follow(page, pressed);
      const text = await page.locator("#confirm").innerText();
      await follow(page, page.locator("#confirm button[type=submit]", { hasText: button }));
      await page.locator("#p-told p").waitFor();
      return text;
    },
  },
};

const grouped = (number) => number.toLocaleString("en-US");

/** What the audit has more than before, oldest first. */
let audited;
const newly = async () => (await house.gate.audit()).slice(0, -audited || undefined).reverse();

beforeEach(async () => {
  audited = (await house.gate.audit()).length;
});

/** Leases that leave no room, and waiters behind them, all of this test only. */
async function crowd(t, waiters) {
  const { budget } = await house.gate.state();
  const half = Math.floor(budget.available / 2);
  const held = [fresh("held"), fresh("held")];
  const waiting = Array.from({ length: waiters }, () => fresh("waits"));
  const results = await house.acquire([
    ...held.map((ticket) => [ticket, `of-${ticket}`, half]),
    ...waiting.map((ticket) => [ticket, `of-${ticket}`, half - 7]),
  ]);
  t.after(async () => {
    for (const ticket of [...waiting, ...held]) await house.gate.call("DELETE", `/v1/tickets/${ticket}`);
  });
  return { half, held, waiting, leases: results.slice(0, 2).map((result) => result.body.lease_id) };
}

for (const [way, { options, confirm }] of Object.entries(WAYS)) {
  const action = (name, run) =>
    test(`${name}, ${way}`, async (t) => {
      const go = async (at) => (await visit(t, browser, `${house.gate.url}/${at}`, options)).page;
      await run(t, go, (page, pressed, button) => confirm(page, pressed, button));
    });
  const answer = (ticket) => house.gate.get(`/v1/tickets/${ticket}`).then((got) => got.json.action);

  action("pause and resume", async (t, go, confirmed) => {
    const { waiting, half } = await crowd(t, 1);
    const page = await go("queue");
    const text = await confirmed(page, page.locator('a[href="confirm?do=pause"]'), "Pause gate");
    assert.match(text, new RegExp(`${grouped(half - 7)} tokens`), "the effect stands there in figures");
    assert.equal((await house.gate.state()).features.paused, true);
    assert.equal(await answer(waiting[0]), "bypass");
    await confirmed(page, page.locator('a[href="confirm?do=resume"]'), "Resume gate");
    assert.equal((await house.gate.state()).features.paused, false);
    const entries = await newly();
    assert.deepEqual(entries.map((entry) => [entry.who, entry.action]), [["local", "settings_changed"], ["local", "settings_changed"]]);
  });

  action("change settings and return them", async (t, go, confirmed) => {
    const page = await go("settings");
    const setting = async () => (await house.gate.get("/v1/settings")).json.headroom;
    const start = await setting();
    await page.locator("#in-headroom").fill("0.8");
    const text = await confirmed(page, page.locator("#p-runtime button", { hasText: "Review change" }), "Change settings");
    const { budget } = await house.gate.state();
    assert.match(text, new RegExp(`to ${grouped(budget.ceiling)} tokens`));
    assert.deepEqual(await setting(), { value: 0.8, origin: "run_time" });
    const back = page.locator('input[name="configured.headroom"]');
    await back.waitFor();
    await back.check();
    await confirmed(page, page.locator("#p-runtime button", { hasText: "Review change" }), "Change settings");
    assert.deepEqual(await setting(), start);
    const entries = await newly();
    assert.equal(entries.length, 2);
    assert.match(entries[0].detail, /headroom/);
    await until("both in the audit of the page", async () => {
      if (options.javaScriptEnabled === false) await page.reload();
      return (await page.locator("#p-audit tbody").innerText()).includes(entries[1].detail);
    });
  });

  action("a setting that cannot be is refused and changes nothing", async (t, go) => {
    const page = await go("settings");
    await page.locator("#in-headroom").fill("1.5");
    await page.locator("#p-runtime button", { hasText: "Review change" }).click();
    const told = page.locator(options.javaScriptEnabled === false ? ".sheet" : "#dialog[open]");
    await told.waitFor();
    assert.match(await told.innerText(), /headroom/i);
    assert.equal(await told.locator("button[type=submit]").count(), 0);
    assert.deepEqual(await newly(), []);
  });

  action("cancel one ticket", async (t, go, confirmed) => {
    const { waiting, half } = await crowd(t, 3);
    const page = await go("queue");
    const text = await confirmed(page, page.locator(`a[aria-label="Cancel ticket ${waiting[1]}"]`), "Cancel ticket");
    assert.match(text, new RegExp(`${grouped(half - 7)} tokens`));
    assert.equal(await answer(waiting[1]), "cancelled");
    assert.equal(await answer(waiting[0]), "wait");
    const entries = await newly();
    assert.deepEqual(entries.map((entry) => [entry.who, entry.action]), [["local", "ticket_cancelled"]]);
    assert.match(entries[0].detail, new RegExp(waiting[1]));
    await page.locator(`#p-waiters tr[data-id="${waiting[1]}"]`).waitFor({ state: "detached" });
  });

  action("cancel many tickets", async (t, go, confirmed) => {
    const { waiting, half } = await crowd(t, 4);
    const page = await go("queue");
    for (const ticket of waiting.slice(0, 3)) await page.locator(`input[data-select][value="${ticket}"]`).check();
    const text = await confirmed(page, page.locator("#f-p-waiters button"), "Cancel tickets");
    assert.match(text, new RegExp(`3 tickets.*${grouped(3 * (half - 7))} tokens`));
    for (const ticket of waiting.slice(0, 3)) assert.equal(await answer(ticket), "cancelled");
    assert.equal(await answer(waiting[3]), "wait");
    assert.equal((await newly()).length, 3);
  });

  action("revoke one lease", async (t, go, confirmed) => {
    const { leases, half, waiting } = await crowd(t, 1);
    const page = await go("leases");
    const text = await confirmed(page, page.locator(`a[aria-label="Revoke lease ${leases[0]}"]`), "Revoke lease");
    assert.match(text, new RegExp(`${grouped(half)} of`));
    assert.match(text, new RegExp(`Ticket ${waiting[0]} is next and fits`));
    assert.equal((await house.gate.get(`/v1/leases/${leases[0]}`)).json.code, "lease_expired");
    assert.equal((await house.gate.get(`/v1/leases/${leases[1]}`)).status, 200);
    assert.equal(await answer(waiting[0]), "admit", "the next one has its tokens");
    const entries = await newly();
    assert.deepEqual(entries.map((entry) => entry.action), ["lease_revoked"]);
  });

  action("revoke many leases", async (t, go, confirmed) => {
    const { leases, half } = await crowd(t, 0);
    const page = await go("leases");
    for (const lease of leases) await page.locator(`input[data-select][value="${lease}"]`).check();
    const text = await confirmed(page, page.locator("#f-p-leases button"), "Revoke leases");
    assert.match(text, new RegExp(grouped(2 * half)));
    for (const lease of leases) assert.equal((await house.gate.get(`/v1/leases/${lease}`)).status, 410);
    assert.equal((await newly()).length, 2);
  });

  action("close a session", async (t, go, confirmed) => {
    const { held, waiting } = await crowd(t, 1);
    const page = await go(`session?id=of-${held[0]}`);
    const link = page.locator('#p-facts a[href*="do=close"]');
    const text = await confirmed(page, link, "Close session");
    assert.match(text, /1 lease with/);
    const { closes } = (await house.gate.get(`/v1/sessions/of-${held[0]}`)).json;
    assert.deepEqual(closes.map((close) => [close.state, close.mode]), [["joining", "join"]]);
    assert.deepEqual((await newly()).map((entry) => entry.action), ["session_closed"]);
    assert.equal(await answer(waiting[0]), "wait");
  });

  action("close many sessions", async (t, go, confirmed) => {
    const { held } = await crowd(t, 0);
    const sessions = held.map((ticket) => `of-${ticket}`);
    const page = await go(`sessions?q=of-${held[0].split("-")[0]}`);
    for (const session of sessions) await page.locator(`input[data-select][value="${session}"]`).check();
    await confirmed(page, page.locator("#f-sessions button"), "Close sessions");
    for (const session of sessions) assert.equal((await house.gate.get(`/v1/sessions/${session}`)).json.closes.length, 1);
    assert.equal((await newly()).length, 2);
  });

  action("retry one close", async (t, go, confirmed) => {
    const [close] = await house.failedCloses([fresh("gone")]);
    const page = await go("closes");
    await confirmed(page, page.locator(`#p-closes tr[data-id="${close}"] a[data-key=r]`), "Retry close");
    await until("the delivery", async () => {
      const got = (await house.gate.get(`/v1/closes/${close}`)).json;
      return got.state === "done" && !got.failed;
    });
    assert.deepEqual((await newly()).map((entry) => entry.action), ["close_retried"]);
  });

  action("retry many closes, and all that failed", async (t, go, confirmed) => {
    const closes = await house.failedCloses([fresh("gone"), fresh("gone"), fresh("gone"), fresh("gone")]);
    const page = await go("closes");
    const mended = (some) =>
      until("the delivery", async () => {
        const got = await Promise.all(some.map((close) => house.gate.get(`/v1/closes/${close}`)));
        return got.every(({ json }) => json.state === "done" && !json.failed);
      });
    for (const close of closes.slice(0, 2)) await page.locator(`input[data-select][value="${close}"]`).check();
    await confirmed(page, page.locator("#p-closes footer button", { hasText: "Retry selected" }), "Retry closes");
    await mended(closes.slice(0, 2));
    assert.equal((await house.gate.get(`/v1/closes/${closes[3]}`)).json.failed, true);
    await confirmed(page, page.locator("#p-closes footer a", { hasText: "Retry all" }), "Retry closes");
    await mended(closes);
    assert.equal((await newly()).length, 4);
  });
}

test("a confirmation that is left changes nothing, and the focus is back where it was", async (t) => {
  const { waiting } = await crowd(t, 2);
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  const link = page.locator(`a[aria-label="Cancel ticket ${waiting[0]}"]`);
  for (const leave of [() => page.keyboard.press("Escape"), () => page.locator("#dialog [data-close]").click()]) {
    await link.focus();
    await page.keyboard.press("Enter");
    await page.locator("#dialog[open] button[type=submit]").waitFor();
    await leave();
    await page.locator("#dialog").waitFor({ state: "hidden" });
    assert.ok(await link.evaluate((element) => element === document.activeElement));
  }
  assert.equal((await house.gate.get(`/v1/tickets/${waiting[0]}`)).json.action, "wait");
  assert.deepEqual(await newly(), []);
});

test("an act that went with the connection says that its outcome is not known", async (t) => {
  const { waiting } = await crowd(t, 1);
  const { page } = await visit(t, browser, `${house.gate.url}/queue`);
  await page.locator(`a[aria-label="Cancel ticket ${waiting[0]}"]`).click();
  await page.locator("#dialog[open] button[type=submit]").waitFor();
  await page.route("**/act", (route) => route.abort());
  await page.locator("#dialog button[type=submit]").click();
  await page.locator("#dialog h2", { hasText: "No connection" }).waitFor();
  assert.equal((await house.gate.get(`/v1/tickets/${waiting[0]}`)).json.action, "wait");
});

test("another site cannot press a button", async (t) => {
  const { waiting } = await crowd(t, 1);
  const form = new URLSearchParams({ do: "cancel", ticket: waiting[0] });
  for (const headers of [{ origin: "http://attacker.example" }, { origin: "null" }, { "sec-fetch-site": "cross-site" }]) {
    const answer = await fetch(`${house.gate.url}/act`, { method: "POST", body: form, headers, redirect: "manual" });
    // `fetch` of Node sets no Sec-Fetch-Site of its own that the test does not give.
    assert.equal(answer.status, 403, JSON.stringify(headers));
  }
  assert.equal((await house.gate.get(`/v1/tickets/${waiting[0]}`)).json.action, "wait");
});
