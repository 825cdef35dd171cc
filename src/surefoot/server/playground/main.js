// Puts the page together.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { meetServer, watchLoad } from "./server.js";
import { closePanel, startSettings } from "./settings.js";
import { watchTokens } from "./text.js";

const $ = (id) => document.getElementById(id);
const chat = new Chat();
const compare = new Compare();
const tabs = [$("tab-chat"), $("tab-compare")];

function select(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = tabs[1 - tabs.indexOf(tab)];
    select(other);
    other.focus();
  });
}

for (const field of [$("prompt"), $("compare-prompt")]) {
  field.addEventListener("keydown", (event) => {
    // While an input method composes, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    field.form.requestSubmit();
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !closePanel()) {
    chat.stop();
    compare.stop();
  }
});

startSettings(meetServer);
chat.restore();
watchTokens($("details"));
meetServer();
watchLoad();
if (matchMedia("(hover: hover)").matches) $("prompt").focus();
