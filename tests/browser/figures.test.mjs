// Every figure on every page is that of the API at the same turn, and adds up with its neighbours.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { PAGES, launch, open } from "./lib/browser.mjs";
import { House, until } from "./lib/gate.mjs";

let browser;
let house;

/** How the page writes what the API tells. Ages and durations go on between two looks, so they are left out. */
const grouped = (count) => String(count).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
const forms = (value) => {
  if (value === null) return ["–"];
  if (typeof value !== "number") return [String(value)];
  const percent = (value * 100).toFixed(1);
  return [...(Number.isInteger(value) ? [grouped(value)] : []), `${percent} %`, percent, value.toFixed(2), `× ${value.toFixed(2)}`];
};
const at = (value, path) => path.split(".").reduce((inner, name) => inner?.[name], value);

/** What the page shows: the marked figures, and the rows of its lists with their marked cells. */
async function shown(page) {
  return page.evaluate(() => {
    const text = (element) => element.textContent.trim();
    const figures = [...document.querySelectorAll("[data-fig]")].map((element) => [element.dataset.fig, text(element)]);
    const lists = [...document.querySelectorAll("[data-list]")].map((list) => ({
      name: list.dataset.list,
      total: list.dataset.total,
      rows: [...list.querySelectorAll("[data-id]")].map((row) => ({
        id: row.dataset.id,
        cells: [...row.querySelectorAll("[data-col]")].map((cell) => [cell.dataset.col, text(cell)]),
      })),
    }));
    // A step report has a column for each key that is shown.
    const keys = [...document.querySelectorAll(".tst th[title]")].map((head) => head.title);
    const steps = [...document.querySelectorAll(".tst tbody tr")].map((row) => {
      const [run, step, , , ...values] = [...row.children].map(text);
      return { run, step, values: keys.map((key, place) => [key, values[place]]) };
    });
    return { figures, lists, steps };
  });
}

let details;

before(async () => {
  browser = await launch();
  house = await House.start();
  const { gate } = house;
  const { leases } = await house.fill({ leases: 38, waiters: 70 });
  const [close] = await house.failedCloses(["line-3"]);
  await gate.post("/v1/sessions/session-0/close", { mode: "join" });
  await gate.post("/v1/sessions/never-seen/close");
  await until("a close that is done", async () => (await gate.get("/v1/closes?state=done")).json.total > 1);
  await gate.post("/v1/steps", { run: "exp-7", step: 12 });
  await gate.call("DELETE", "/v1/tickets/held-37");
  await gate.post("/v1/steps", { run: "exp-7", step: 13 });
  details = [
    ["closes", "Closes"],
    ["ticket?id=waits-5", "a ticket that waits"],
    ["ticket?id=held-1", "a ticket that holds a lease"],
    [`lease?id=${leases[2]}`, "a lease"],
    ["session?id=session-2", "a session"],
    [`close?id=${close}`, "a close"],
    ["queue?client=rollout-9", "a filtered queue"],
    ["leases?session_id=session-1", "filtered leases"],
    ["decisions?action=wait", "filtered decisions"],
  ];
});

after(async () => {
  await browser?.close();
  await house?.stop();
});

/** Compares all marked figures of a page with the API, and counts them. */
async function compare(page) {
  const { gate } = house;
  const { figures, lists, steps } = await shown(page);
  const state = await gate.state();
  let compared = 0;
  for (const [figure, text] of figures) {
    const value = at(state, figure);
    assert.notEqual(value, undefined, `${figure} is no figure of /v1/state`);
    assert.ok(forms(value).includes(text), `${figure}: the page says ${text}, the API ${value}`);
    compared += 1;
  }
  for (const list of lists) {
    const asked = (await gate.get(`/v1/${list.name}${list.name === "engines" ? "" : "?limit=1000"}`)).json;
    if (list.total !== undefined) {
      assert.equal(Number(list.total), asked.total ?? asked.items.length, `the total of ${list.name}`);
      compared += 1;
    }
    for (const row of list.rows) {
      const ids = (item) => [item.ticket_id, item.lease_id, item.close_id, item.session_id, item.url, item.number, item.epoch].map(String);
      const item = asked.items.find((item) => ids(item).includes(row.id));
      assert.ok(item, `${list.name}: the API does not know ${row.id}`);
      for (const [column, text] of row.cells) {
        assert.notEqual(item[column], undefined, `${list.name}: ${column} is no field`);
        if (/_s$|_at$/.test(column)) continue;
        assert.ok(forms(item[column]).includes(text), `${row.id} ${column}: the page says ${text}, the API ${item[column]}`);
        compared += 1;
      }
    }
  }
  const reports = steps.length ? (await gate.get("/v1/steps?limit=1000")).json.items : [];
  for (const { run, step, values } of steps.filter((row) => row.step !== "open")) {
    const report = reports.find((report) => report.run === run && String(report.step) === step);
    assert.ok(report, `the API does not know step ${step} of ${run}`);
    for (const [key, text] of values) {
      const value = report.metrics[key];
      const rounded = (text) => value.toFixed(/\.(\d+)$/.exec(text)?.[1].length ?? 0);
      assert.equal(text.replaceAll(",", ""), value === undefined ? "–" : rounded(text), `${key} of step ${step}: the API says ${value}`);
      compared += 1;
    }
  }
  return compared;
}

async function check(at, name) {
  const { context, page } = await open(browser, `${house.gate.url}/${at}`);
  // A reading may come between the page and the API: then both are asked again.
  const compared = await until(`a moment at which ${name} and the API agree`, async () => {
    await page.reload();
    return compare(page);
  });
  assert.ok(compared > 3, `only ${compared} figures are marked on ${name}`);
  await context.close();
}

for (const [path, name] of PAGES) {
  test(`the figures of ${name} are those of the API`, () => check(path, name));
}

test("the figures of details and of filtered lists are those of the API", async () => {
  for (const [path, name] of details) await check(path, name);
});

test("the budget adds up, with an overdraft too", async () => {
  const { gate } = house;
  const number = async (page, figure) => Number((await page.locator(`#p-budget [data-fig="${figure}"]`).first().innerText()).replaceAll(",", ""));
  for (const headroom of [0.9, 0.2]) {
    const patched = await gate.call("PATCH", "/v1/settings", { headroom });
    assert.equal(patched.status, 200, patched.text);
    const { context, page } = await open(browser, gate.url);
    const [available, reserved, ceiling] = await Promise.all(["budget.available", "budget.reserved", "budget.ceiling"].map((figure) => number(page, figure)));
    if (reserved <= ceiling) {
      assert.equal(available + reserved, ceiling);
    } else {
      assert.equal(available, 0);
      const over = Number((await page.locator("#p-budget [data-overdraft]").innerText()).replaceAll(",", ""));
      assert.equal(reserved - over, ceiling);
    }
    await context.close();
  }
  await gate.call("PATCH", "/v1/settings", { headroom: null });
});
