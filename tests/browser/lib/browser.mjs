// A real Chromium, which tells of whatever a page should not do.
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { chromium } from "playwright-core";

const AXE = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

export const DESKTOP = { viewport: { width: 1440, height: 900 } };
export const PHONE = { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true };

/** Every page that stands in the navigation, and its name there. */
export const PAGES = [
  ["", "Overview"],
  ["queue", "Queue"],
  ["leases", "Leases"],
  ["engines", "Engines"],
  ["sessions", "Sessions"],
  ["decisions", "Decisions"],
  ["steps", "Reports"],
  ["settings", "Settings"],
];

export async function launch() {
  return chromium.launch({
    executablePath: process.env.KVGATE_CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-dev-shm-usage"],
  });
}

/**
 * A page, and the list of its faults: errors, words on the console (a refused script or style among
 * them), requests to any other origin, and answers of 500 and above.
 */
export async function open(browser, url, options = {}) {
  const context = await browser.newContext({ ...DESKTOP, ...options });
  const page = await context.newPage();
  const faults = watch(page, new URL(url).origin);
  await page.goto(url);
  return { context, page, faults };
}

export function watch(page, origin) {
  const faults = [];
  page.on("pageerror", (error) => faults.push(`error: ${error.message}`));
  page.on("console", (message) => {
    const text = message.text();
    // What the network refuses while the service is away is no fault of the page; advice is none either.
    if (message.type() !== "debug" && !/Failed to load resource/.test(text)) faults.push(`console: ${text}`);
  });
  page.on("request", (request) => {
    const url = new URL(request.url());
    if (url.origin !== origin && url.protocol !== "data:") faults.push(`foreign: ${request.url()}`);
  });
  page.on("response", (answer) => {
    if (answer.status() >= 500) faults.push(`${answer.status()}: ${answer.url()}`);
  });
  return faults;
}

/** How every page is looked at. */
export const LOOKS = {
  light: { ...DESKTOP, colorScheme: "light" },
  dark: { ...DESKTOP, colorScheme: "dark" },
  phone: { ...PHONE, colorScheme: "light" },
};

/** A page that lives until its test ends, and whose faults fail it. */
export async function visit(t, browser, url, options = {}) {
  const { context, page, faults } = await open(browser, url, options);
  t.after(() => context.close());
  return { context, page, faults };
}

/** Follows a link that leads to another document. */
export async function follow(page, link) {
  await Promise.all([page.waitForEvent("load"), link.click()]);
}

/** What axe-core finds, a line each. */
export async function axe(page) {
  // The page's policy refuses a script tag; the debugger may run one all the same.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() =>
    globalThis.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] }),
  );
  return violations.flatMap((rule) => rule.nodes.map((node) => `${rule.id}: ${node.target.join(" ")}: ${node.failureSummary}`));
}
