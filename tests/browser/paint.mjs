// How soon a page is painted, with 10,000 waiters and 5,000 leases: the time from the request to the first
// paint with contents, of a browser that knows nothing of the page and of one that has its files.
//   tests/browser/check.sh paint.mjs
import { loadavg } from "node:os";
import { PAGES, launch } from "./lib/browser.mjs";
import { longQueue } from "./lib/queue.mjs";

const LOADS = 9;

const browser = await launch();
const house = await longQueue();

async function painted(page, url) {
  await page.goto(url);
  return page.evaluate(
    () =>
      new Promise((resolve) => {
        new PerformanceObserver((list) => {
          const entry = list.getEntriesByName("first-contentful-paint")[0];
          if (entry) resolve(entry.startTime);
        }).observe({ type: "paint", buffered: true });
      }),
  );
}

const middle = (times) => times.sort((one, other) => one - other)[Math.floor(times.length / 2)];

try {
  console.log(`load ${loadavg()[0].toFixed(1)}; medians of ${LOADS} loads in ms, and the longest`);
  console.log("| page | first visit | later visit |\n|---|---|---|");
  for (const [at, name] of PAGES) {
    const first = [];
    const later = [];
    for (let load = 0; load < LOADS; load += 1) {
      const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
      const page = await context.newPage();
      first.push(await painted(page, `${house.gate.url}/${at}`));
      later.push(await painted(page, `${house.gate.url}/${at}`));
      await context.close();
    }
    const shown = (times) => `${middle(times).toFixed(0)} (${Math.max(...times).toFixed(0)})`;
    console.log(`| ${name} | ${shown(first)} | ${shown(later)} |`);
  }
} finally {
  await browser.close();
  await house.stop();
}
