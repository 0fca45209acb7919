// Names that callers choose are text on every page, whatever they look like (U02).
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { launch, visit } from "./lib/browser.mjs";
import { House, until } from "./lib/gate.mjs";

const IDS = [
  "<img src=x onerror=alert(1)>",
  '"><script>alert(1)</script>',
  "' onmouseover='alert(1)",
  "</script><script>alert(1)</script>",
  "{{7*7}}",
  "javascript:alert(1)",
  "<!--",
  "&lt;b&gt;",
  "../../act?do=pause&x=%2e%2e#y",
  "a\u202eb c\u00a0d",
  "日本語 🦀",
];
/** No id at all, since a line break in a name ends in logs and lists. */
const REFUSED = ["a\nb\rc", "data: x\n\nevent: y"];

let browser;
let house;
const leases = new Map();
const closes = new Map();

before(async () => {
  browser = await launch();
  house = await House.start();
  const { gate } = house;
  const { budget } = await gate.state();
  const part = Math.floor(budget.ceiling / (IDS.length + 1));
  const held = await house.acquire(IDS.map((id) => [`held ${id}`, id, part, { client: id, request_id: id }]));
  for (const [number, { status, body }] of held.entries()) {
    assert.equal(status, 200, JSON.stringify(body));
    leases.set(IDS[number], body.lease_id);
  }
  const waiting = await house.acquire(IDS.map((id) => [id, id, part * 2, { client: id }]));
  for (const { status, body } of waiting) assert.equal(status, 202, JSON.stringify(body));
  house.engines[0].refuses = true;
  for (const id of IDS) {
    const { status, json } = await gate.post(`/v1/sessions/${encodeURIComponent(`gone ${id}`)}/close`);
    assert.equal(status, 202);
    closes.set(id, json.close_id);
    await gate.post("/v1/steps", { run: id, step: 1 });
  }
  await gate.call("DELETE", `/v1/tickets/${encodeURIComponent(`never ${IDS[0]}`)}`);
  await until("closes that failed", async () => (await gate.get("/v1/closes?failed=true")).json.total === IDS.length);
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

test("U02: a name with a line break is refused", async () => {
  for (const id of REFUSED) {
    const answer = await house.gate.post("/v1/leases", { ticket_id: id, session_id: "s", reservation_tokens: 1, wait_s: 0 });
    assert.deepEqual([answer.status, answer.json.code], [400, "invalid_id"]);
  }
});

/** Nothing was made of a name, and the name stands there as it is. */
async function isText(page, at, id, asked) {
  const found = await page.evaluate(() => ({
    strange: [...document.querySelectorAll("img, iframe, object, embed, base, [onerror], [onmouseover], a[href^='javascript:' i]")].map((element) => element.outerHTML),
    scripts: [...document.scripts].filter((script) => !/static\/[a-z]+\.js/.test(script.src)).length,
    text: document.body.textContent,
    shows: [...document.querySelectorAll("input, [title], [aria-label]")].map((element) => `${element.value ?? ""}\n${element.title}\n${element.getAttribute("aria-label")}`).join("\n"),
    whole: document.querySelector("#p-node, .sheet") !== null,
  }));
  assert.deepEqual(found.strange, [], at);
  assert.equal(found.scripts, 0, at);
  assert.ok(found.whole, `${at} is whole`);
  if (asked) assert.ok(`${found.text}\n${found.shows}`.includes(id), `${at} shows ${JSON.stringify(id)}`);
}

test("U02: markup in names is text on every page, in the dialog, and after updates", async (t) => {
  const { page, faults } = await visit(t, browser, house.gate.url);
  page.on("dialog", (dialog) => {
    faults.push(`a dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  const all = { "": false, queue: true, leases: true, sessions: true, closes: true, decisions: true, steps: true, settings: false, engines: false };
  for (const [at, asked] of Object.entries(all)) {
    await page.goto(`${house.gate.url}/${at}`);
    for (const id of IDS) await isText(page, at, id, asked);
  }
  for (const id of IDS) {
    const name = encodeURIComponent(id);
    const places = [
      `ticket?id=${name}`,
      `ticket?id=${encodeURIComponent(`held ${id}`)}`,
      `lease?id=${leases.get(id)}`,
      `session?id=${name}`,
      `close?id=${closes.get(id)}`,
      `search?q=${name}`,
      `queue?q=${name}`,
      `leases?client=${name}`,
      `sessions?q=${name}`,
      `decisions?q=${name}`,
      `steps?run=${name}`,
      `confirm?do=cancel&ticket=${name}`,
      `confirm?do=close&session=${name}&session=other`,
    ];
    for (const at of places) {
      const answer = await page.goto(`${house.gate.url}/${at}`);
      assert.ok(answer.status() < 300, `${at}: ${answer.status()}`);
      await isText(page, at, id, true);
    }
  }

  // A link of a row leads to the very thing that it names.
  await page.goto(`${house.gate.url}/queue`);
  for (const id of IDS) {
    const row = page.locator("#p-waiters tbody tr").nth(IDS.indexOf(id));
    const href = await row.locator("a").first().evaluate((link) => link.href);
    assert.equal(new URL(href).searchParams.get("id"), id);
    assert.equal(new URL(href).pathname, "/ticket");
  }

  // Through the morph, and through the dialog.
  const before = await page.locator("#p-node").innerText();
  await house.gate.call("DELETE", `/v1/tickets/${encodeURIComponent(IDS[4])}`);
  await until("an update", async () => (await page.locator("#p-node").innerText()) !== before);
  await page.locator("#p-waiters tbody tr").first().locator("a[data-dialog]").click();
  await page.locator("#dialog button[type=submit]").waitFor();
  await isText(page, "the dialog", IDS[0], true);
  await page.locator("#dialog button[type=submit]").click();
  await page.locator("#p-told p").waitFor();
  assert.equal((await house.gate.get(`/v1/tickets/${encodeURIComponent(IDS[0])}`)).json.action, "cancelled");
  await isText(page, "queue", IDS[1], true);
  assert.deepEqual(faults, []);
});
