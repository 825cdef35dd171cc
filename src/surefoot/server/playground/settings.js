// The settings beside the conversation, and the panel that they become on a narrow window.

import { setKey } from "./api.js";

const STORE = "surefoot.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const $ = (id) => document.getElementById(id);
const form = $("settings-form");
const narrow = matchMedia("(max-width: 56rem)");

/** Fields of a request. Null when one is no valid number, which the page then shows. */
export function requestFields() {
  if (!form.checkValidity()) {
    openPanel();
    form.reportValidity();
    return null;
  }
  const fields = {};
  for (const name of NUMBERS) {
    const value = form.elements[name].value;
    if (value !== "") fields[name] = Number(value);
  }
  fields.speculation = { method: form.elements.method.value };
  const drafts = form.elements.max_draft_tokens.value;
  if (drafts !== "") fields.speculation.max_draft_tokens = Number(drafts);
  return fields;
}

export const systemMessages = () => {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }] : [];
};

/** What to ask for to be told probabilities. */
export const scoreFields = () =>
  $("probabilities").checked ? { logprobs: true, top_logprobs: 4 } : {};

/** Offers the server's methods and its limit. */
export function offerMethods({ methods, max_draft_tokens: limit }) {
  const field = $("method");
  const chosen = field.value;
  field.replaceChildren(...methods.map((name) => new Option(name, name)));
  const wanted = field.dataset.wanted ?? chosen;
  field.value = methods.includes(wanted) ? wanted : "auto";
  $("max_draft_tokens").max = limit;
  $("max_draft_tokens").placeholder = `up to ${limit}`;
}

export function askForKey(focus) {
  $("key-field").hidden = false;
  if (!focus) return;
  openPanel();
  $("api-key").focus();
}

function openPanel() {
  if (!narrow.matches) return;
  document.body.classList.add("settings-open");
  $("open-settings").setAttribute("aria-expanded", "true");
  $("main").inert = true;
  $("close-settings").focus();
}

/** Returns whether there was a panel to close. */
export function closePanel() {
  if (!document.body.classList.contains("settings-open")) return false;
  document.body.classList.remove("settings-open");
  $("open-settings").setAttribute("aria-expanded", "false");
  $("main").inert = false;
  $("open-settings").focus();
  return true;
}

const inputs = () => [...form.querySelectorAll("input, textarea, select")].filter((i) => i.id !== "api-key");

function store() {
  const values = inputs().map((item) => [item.id, item.type === "checkbox" ? item.checked : item.value]);
  try {
    localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(values)));
  } catch {
    // They hold until the page is left.
  }
}

function restore() {
  let values = {};
  try {
    values = JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    // Nothing stored, or storage is blocked.
  }
  for (const item of inputs()) {
    const value = values[item.id];
    if (value === undefined) continue;
    if (item.type === "checkbox") item.checked = value;
    else item.value = value;
    // Its methods are not known yet.
    if (item.id === "method") item.dataset.wanted = value;
  }
}

/** Wires the settings up; `keyChanged` is called when there is another API key. */
export function startSettings(keyChanged) {
  const colours = () => document.body.classList.toggle("plain", !$("colours").checked);
  restore();
  colours();
  form.addEventListener("input", (event) => {
    event.target.removeAttribute("aria-invalid");
    delete $("method").dataset.wanted;
    colours();
    if (event.target.id !== "api-key") store();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  const useKey = () => {
    setKey($("api-key").value.trim());
    closePanel();
    keyChanged();
  };
  $("use-key").addEventListener("click", useKey);
  $("api-key").addEventListener("keydown", (event) => event.key === "Enter" && useKey());
  $("defaults").addEventListener("click", () => {
    const key = $("api-key").value;
    form.reset();
    $("api-key").value = key;
    colours();
    store();
  });
  $("open-settings").addEventListener("click", () => closePanel() || openPanel());
  $("close-settings").addEventListener("click", closePanel);
  narrow.addEventListener("change", closePanel);
}
