// What the server tells about itself: the model, its proposers, and how busy it is.

import { getJson, getText, hasKey } from "./api.js";
import { know } from "./proposers.js";
import { hideProblem, showProblem } from "./problems.js";
import { askForKey, offerMethods } from "./settings.js";

const POLL_MS = 3000;
const $ = (id) => document.getElementById(id);
let known = false;

/** Reads the model and its proposers. Where a key is missing, asks for it. */
export async function meetServer() {
  try {
    const [card] = (await getJson("v1/models")).data;
    const { methods } = card.speculation;
    $("model").textContent = card.id;
    $("model").title = `${card.id}, context of ${card.max_model_len} tokens`;
    know(methods.filter((name) => name !== "auto" && name !== "off"));
    offerMethods(card.speculation);
    if (hasKey()) askForKey(false);
    // A link cannot carry the key.
    $("docs").hidden = hasKey();
    hideProblem();
    known = true;
    await readLoad();
  } catch (error) {
    known = false;
    if (error.status === 401) askForKey(true);
    showProblem(error, error.status === 401 ? null : meetServer);
  }
}

/** Keeps the numbers at the top up to date while somebody looks. */
export function watchLoad() {
  setInterval(() => known && !document.hidden && readLoad(), POLL_MS);
}

async function readLoad() {
  try {
    const page = await getText("metrics");
    const value = (name) => Number(page.match(new RegExp(`^surefoot_${name}\\{[^}]*\\} (\\S+)$`, "m"))?.[1]);
    $("running").textContent = value("requests_running");
    $("waiting").textContent = value("requests_waiting");
    $("kv").textContent = `${Math.round(100 * value("kv_usage_ratio"))} %`;
    $("load").classList.remove("stale");
    $("load").hidden = false;
  } catch {
    // Old numbers stay, greyed: a request will tell what is wrong.
    $("load").classList.add("stale");
  }
}
