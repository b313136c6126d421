// Opens a board in headless Chromium, and says on standard output when its page has changed: node watch_board.mjs ADDRESS
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: flags });
const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
const messages = [];
page.on("console", (message) => messages.push(`${message.type()}: ${message.text()}`));
page.on("pageerror", (error) => messages.push(`error: ${error.message}`));
await page.goto(process.argv[2]);
await page.waitForSelector("body[data-ready]");
await page.evaluate(() => { window.openedOnce = true; document.querySelector("#settings summary").click(); });
const look = () => page.evaluate(() => ({
  points: document.querySelectorAll("#learning-0-learning-rounds .points path").length,
  waiting: document.querySelector(".ticking")?.textContent,
  waitingIsOver: document.querySelector(".ticking")?.textContent.includes("has finished waiting"),
  rounds: document.querySelector("#answer").textContent.match(/After ([\d,]+) rounds/)?.[1],
  sameDocument: window.openedOnce === true,
  unfolded: document.querySelector("#settings details").open,
  hasRoc: document.getElementById("ranking-0-roc") !== null,
  state: document.getElementById("live-state").textContent,
}));
console.log(JSON.stringify(await look()));
for await (const line of createInterface({ input: process.stdin })) {
  // The line names what to wait for, such as {"rounds": "6"}; the page may be loading just now, which is tried again.
  const wanted = Object.entries(JSON.parse(line));
  let seen = {};
  for (let tries = 0; tries < 150 && !wanted.every(([key, value]) => seen[key] === value); tries += 1) {
    await page.waitForTimeout(200);
    seen = await look().catch(() => ({}));
  }
  console.log(JSON.stringify({ ...seen, messages }));
}
await browser.close();
