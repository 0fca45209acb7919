// Pictures of every screen, from the demo, in light, dark and phone width:
//   tests/browser/check.sh screenshots.mjs [FOLDER]
import { mkdir } from "node:fs/promises";
import path from "node:path";
import { DESKTOP, PAGES, PHONE, launch, open } from "./lib/browser.mjs";
import { Gate, until } from "./lib/gate.mjs";

const folder = path.resolve(process.argv[2] ?? path.join(import.meta.dirname, "../../target/screenshots"));
const LOOKS = { light: { ...DESKTOP, colorScheme: "light" }, dark: { ...DESKTOP, colorScheme: "dark" }, phone: { ...PHONE, colorScheme: "light" } };

await mkdir(folder, { recursive: true });
const browser = await launch();
const demo = await Gate.start(["demo", "--speed", "4"]);
try {
  // A few minutes of a run, so that plots and lists have something to show; 20 model seconds each.
  const seconds = Number(process.env.KVGATE_SCREENSHOT_SECONDS ?? "90");
  const begun = performance.now();
  let step = 0;
  await until("a history", async () => {
    if (performance.now() - begun > step * 8_000) await demo.post("/v1/steps", { run: "exp-7", step: (step += 1) });
    return performance.now() - begun > seconds * 1_000;
  }, seconds + 60);
  const first = async (list, field) => (await demo.get(`/v1/${list}?limit=1`)).json.items[0]?.[field];
  const details = [
    ["ticket", "id", "queue", "ticket_id"],
    ["lease", "id", "leases", "lease_id"],
    ["session", "id", "sessions", "session_id"],
    ["close", "id", "closes", "close_id"],
  ];
  const screens = PAGES.map(([at, name]) => [name.toLowerCase(), at === "" ? "?range=15m" : at]);
  for (const [look, options] of Object.entries(LOOKS)) {
    const found = [];
    for (const [page, parameter, list, field] of details) {
      const id = await first(list, field);
      if (id) found.push([page, `${page}?${parameter}=${encodeURIComponent(id)}`]);
    }
    for (const [name, at] of [...screens, ...found]) {
      const { context, page } = await open(browser, `${demo.url}/${at}`, options);
      await page.screenshot({ path: path.join(folder, `${name}-${look}.png`), fullPage: look !== "dark" });
      await context.close();
    }
  }
} finally {
  await browser.close();
  await demo.stop();
}
console.log(`${folder}`);
