// Opens a report page in headless Chromium and prints what it found as JSON: node check_page.mjs ADDRESS WIDTH SCHEME
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [address, width, scheme] = process.argv.slice(2);
const axe = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: flags });
const page = await browser.newPage({ viewport: { width: Number(width), height: 900 }, colorScheme: scheme });
const found = { messages: [], requests: [], figures: {}, violations: [] };
page.on("console", (message) => found.messages.push(`${message.type()}: ${message.text()}`));
page.on("pageerror", (error) => found.messages.push(`error: ${error.message}`));
page.on("request", (request) => found.requests.push(request.url().slice(0, 200)));
await page.goto(address);
await page.waitForSelector("body[data-ready]");
found.theme = await page.evaluate(() => document.documentElement.dataset.theme);

// Every figure of every run: the marks that plotly has drawn, and their size on the screen.
const runs = await page.locator("#run-picker option").count();
for (let run = 0; run < Math.max(1, runs); run += 1) {
  if (runs) await page.selectOption("#run-picker", String(run));
  await page.waitForTimeout(300);
  Object.assign(found.figures, await page.evaluate(() => Object.fromEntries(
    [...document.querySelectorAll(".plot")].filter((place) => place.offsetParent).map((place) => {
      const marks = [...place.querySelectorAll(".js-line, .bars path, .points path, .hm image")];
      const visible = marks.filter((mark) => { const box = mark.getBoundingClientRect(); return box.width + box.height > 0; });
      return [place.id, visible.length];
    }))));
}
found.places = await page.evaluate(() => [...document.querySelectorAll(".plot")].map((place) => place.id));
await page.evaluate(() => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
found.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);

// axe is injected by the debugger, which the page's content policy does not concern.
await page.evaluate((await import("node:fs")).readFileSync(axe, "utf8"));
const audit = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
found.passes = audit.passes.map((rule) => rule.id);
found.violations = audit.violations.map((rule) => `${rule.id}: ${rule.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`);

// The keyboard alone: reach the theme toggle, a folded part and a sortable header, and use each.
await page.evaluate(() => { document.querySelectorAll("details").forEach((details) => { details.open = false; }); scrollTo(0, 0); });
const reach = async (selector) => {
  for (let presses = 0; presses < 120; presses += 1) {
    if (await page.evaluate((wanted) => document.activeElement?.matches(wanted), selector)) return true;
    await page.keyboard.press("Tab");
  }
  return false;
};
found.keyboard = { toggle: await reach("#theme-toggle") };
await page.keyboard.press("Enter");
found.keyboard.themeAfter = await page.evaluate(() => document.documentElement.dataset.theme);
found.keyboard.header = await reach("table.sortable thead button");
await page.keyboard.press("Enter");
found.keyboard.sorted = await page.evaluate(() => document.activeElement.closest("th").getAttribute("aria-sort"));
found.keyboard.summary = await reach("summary");
await page.keyboard.press("Enter");
found.keyboard.unfolded = await page.evaluate(() => document.activeElement.parentElement.open);
await page.waitForTimeout(300);
found.pages = (await page.pdf({ format: "A4" })).length;
await browser.close();
console.log(JSON.stringify(found));
