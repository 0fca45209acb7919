// Pictures of every screen, from the demo, in light, dark and phone width:
//   tests/browser/check.sh screenshots.mjs [FOLDER]
import { mkdir } from "node:fs/promises";
import path from "node:path";
import { LOOKS, PAGES, launch, open } from "./lib/browser.mjs";
import { Gate, until } from "./lib/gate.mjs";

const folder = path.resolve(process.argv[2] ?? path.join(import.meta.dirname, "../../target/screenshots"));

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
  // The youngest of a list, which is the likeliest to be there still.
  const youngest = async (list, field, query = "") => {
    const { items } = (await demo.get(`/v1/${list}?limit=1000${query}`)).json;
    return (list === "closes" ? items[0] : items.at(-1))?.[field];
  };
  const screens = PAGES.map(([at, name]) => [name.toLowerCase(), at]);
  screens.push(["closes", "closes"], ["search", "search?q=s-1"], ["fault", "queue?nothing=1"], ["confirm", "confirm?do=pause"]);
  const details = { ticket: ["queue", "ticket_id"], lease: ["leases", "lease_id"], session: ["sessions", "session_id", "&q=s-1"], close: ["closes", "close_id"] };
  for (const [name, list] of Object.entries(details)) {
    screens.push([name, async () => `${name}?id=${encodeURIComponent(await youngest(...list))}`]);
  }
  for (const [look, options] of Object.entries(LOOKS)) {
    const save = (page, name) => page.screenshot({ path: path.join(folder, `${name}-${look}.png`), fullPage: look !== "dark" });
    for (const [name, at] of screens) {
      const { context, page } = await open(browser, `${demo.url}/${typeof at === "string" ? at : await at()}`, options);
      await save(page, name);
      if (name === "queue") {
        // On a phone a row has no button of its own; what is chosen has one.
        await page.locator("[data-select]").first().check();
        await page.locator(".bulk button").first().click();
        await page.locator("#dialog[open] button[type=submit]").waitFor();
        await page.screenshot({ path: path.join(folder, `dialog-${look}.png`) });
        await page.keyboard.press("Escape");
        await page.keyboard.press("?");
        await page.locator("#help[open]").waitFor();
        await page.screenshot({ path: path.join(folder, `keys-${look}.png`) });
      }
      await context.close();
    }
  }
} finally {
  await browser.close();
  await demo.stop();
}
console.log(`${folder}`);
