// Every page, in light, dark and on a phone: nothing that a screen reader or a keyboard would miss, no
// word on the console, nothing from elsewhere; complete without script, and below a path prefix.
import assert from "node:assert/strict";
import http from "node:http";
import { once } from "node:events";
import { after, before, test } from "node:test";
import { DESKTOP, PAGES, PHONE, axe, launch, open } from "./lib/browser.mjs";
import { Gate, until } from "./lib/gate.mjs";

let browser;
let demo;

before(async () => {
  browser = await launch();
  demo = await Gate.start(["demo", "--speed", "4"]);
  await until("waiters, leases and closes", async () => {
    const state = await demo.state();
    return state.queue.waiting > 12 && state.leases.count > 12;
  });
});

after(async () => {
  await browser?.close();
  await demo?.stop();
});

const LOOKS = { light: { ...DESKTOP, colorScheme: "light" }, dark: { ...DESKTOP, colorScheme: "dark" }, phone: { ...PHONE, colorScheme: "light" } };

for (const [look, options] of Object.entries(LOOKS)) {
  for (const [path, name] of PAGES) {
    test(`${name} in ${look} is without findings`, async () => {
      const { context, page, faults } = await open(browser, `${demo.url}/${path}`, options);
      assert.equal(await page.locator("h1").count(), 1);
      assert.deepEqual(await axe(page), []);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(wide <= 0, `the page is ${wide} px wider than the window`);
      assert.deepEqual(faults, []);
      await context.close();
    });
  }
}

test("each page is complete without script", async () => {
  for (const [path, name] of PAGES) {
    const { context, page, faults } = await open(browser, `${demo.url}/${path}`, { javaScriptEnabled: false });
    assert.match(await page.title(), new RegExp(name));
    assert.ok((await page.locator("main").innerText()).length > 40, name);
    assert.equal(await page.locator("noscript meta[http-equiv=refresh]").count(), 1);
    for (const [, other] of PAGES) assert.equal(await page.locator("nav a", { hasText: other }).count(), 1);
    assert.deepEqual(faults, []);
    await context.close();
  }
});

/** A proxy that serves the gate below a path, as a head node's web server does. */
async function below(prefix, target) {
  const server = http.createServer((request, answer) => {
    if (!request.url.startsWith(prefix)) {
      answer.writeHead(404).end();
      return;
    }
    const onward = new URL(request.url.slice(prefix.length - 1), target);
    const asked = http.request(onward, { method: request.method, headers: request.headers }, (got) => {
      answer.writeHead(got.statusCode, got.headers);
      got.pipe(answer);
    });
    asked.on("error", () => answer.writeHead(503).end());
    request.pipe(asked);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return server;
}

test("pages work below a path prefix", async () => {
  const server = await below("/tools/kvgate/", demo.url);
  const base = `http://127.0.0.1:${server.address().port}/tools/kvgate/`;
  const { context, page, faults } = await open(browser, base);
  const missing = [];
  page.on("response", (got) => got.status() === 404 && missing.push(got.url()));
  for (const [path, name] of PAGES) {
    await page.locator("nav a", { hasText: name }).click();
    await page.waitForURL(`${base}${path}`);
    await until(`an update of ${name}`, () => page.evaluate(() => performance.getEntriesByType("resource").some((entry) => entry.initiatorType === "fetch")));
  }
  assert.deepEqual(missing, []);
  assert.deepEqual(faults, []);
  await context.close();
  server.closeAllConnections();
  server.close();
});

test("no header or page lets anything in from elsewhere", async () => {
  for (const [path] of PAGES) {
    const answer = await demo.get(`/${path}`);
    const policy = answer.headers.get("content-security-policy");
    assert.match(policy, /default-src 'none'/);
    assert.doesNotMatch(policy, /unsafe/);
    assert.doesNotMatch(answer.text, /\sstyle=|<style|\son\w+=|javascript:/i);
    assert.doesNotMatch(answer.text, /<script(?![^>]*\ssrc=")/);
    assert.doesNotMatch(answer.text, /(?:href|src|action)="\/(?!\/)/, "links are relative");
  }
});
