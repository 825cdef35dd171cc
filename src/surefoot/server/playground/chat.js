// The conversation.

import { hideProblem, showProblem } from "./problems.js";
import { keep, recall } from "./memory.js";
import { run } from "./run.js";
import { askForKey, requestFields, scoreFields, systemMessages } from "./settings.js";
import { showPieces } from "./text.js";

const $ = (id) => document.getElementById(id);
const ENDS = { length: "cut at max tokens", stop: "", abort: "ended by the server" };

export class Chat {
  constructor() {
    this.turns = recall();
    this.running = null;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send($("prompt").value);
    });
    $("prompt").addEventListener("input", fit);
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
  }

  /** Shows the conversation that was kept. */
  restore() {
    for (const { role, content, pieces, calls = [], end = "" } of this.turns) {
      const shown = message(role);
      if (pieces) showPieces(shown.text, pieces);
      else shown.text.textContent = content;
      showCalls(shown.calls, calls);
      shown.end.textContent = end;
      $("transcript").append(shown.item);
    }
    $("welcome").hidden = this.turns.length > 0;
    $("transcript").scrollTop = $("transcript").scrollHeight;
  }

  /** Returns whether there was something to stop. */
  stop() {
    this.running?.abort();
    return this.running !== null;
  }

  clear() {
    this.stop();
    this.turns = [];
    keep(this.turns);
    $("transcript").replaceChildren($("welcome"));
    $("welcome").hidden = false;
    hideProblem();
    $("prompt").focus();
  }

  async send(content) {
    if (this.running || !content.trim()) return;
    const fields = requestFields();
    if (!fields) return;
    hideProblem();
    $("welcome").hidden = true;
    const question = message("user");
    question.text.textContent = content;
    const answer = message("assistant");
    $("transcript").append(question.item, answer.item);
    $("prompt").value = "";
    fit();
    this._busy(new AbortController());
    const turns = this.turns;
    const messages = [...systemMessages(), ...turns.map(asMessage), { role: "user", content }];
    try {
      const stick = follow();
      const result = await run(
        { messages, ...fields, ...scoreFields() },
        { textElement: answer.text, numbersElement: answer.numbers, signal: this.running.signal, drawn: stick },
      );
      this._keep(turns, content, result, answer);
    } catch (error) {
      this._failed(error, turns, content, question, answer);
    } finally {
      this._busy(null);
    }
  }

  _keep(turns, content, result, answer, end = result.stopped ? "stopped" : ENDS[result.finish]) {
    const { content: text, pieces, calls } = result.text;
    answer.end.textContent = end;
    showCalls(answer.calls, calls);
    // A question without an answer would stand beside the next question; and this conversation
    // may have been cleared.
    if (pieces.length && turns === this.turns) {
      turns.push({ role: "user", content }, { role: "assistant", content: text, pieces, calls, end });
      keep(turns);
    }
    $("announcer").textContent = text ? `Answer: ${text} ${end}` : "There was no text.";
  }

  _failed(error, turns, content, question, answer) {
    if (error.status === 401) askForKey(true);
    if (error.partial?.text.pieces.length) {
      this._keep(turns, content, error.partial, answer, "broken off");
      showProblem(error);
      return;
    }
    question.end.textContent = "not answered";
    answer.item.remove();
    showProblem(error, () => {
      question.item.remove();
      this.send(content);
    });
  }

  _busy(controller) {
    const focused = document.activeElement;
    this.running = controller;
    $("send").hidden = controller !== null;
    $("stop").hidden = controller === null;
    $("announcer").textContent = controller ? "Answering." : $("announcer").textContent;
    if (focused === $("send")) $("stop").focus();
    if (focused === $("stop")) $("prompt").focus();
  }
}

/** As the API takes it. */
function asMessage({ role, content }) {
  return { role, content };
}

/** What the model called, in a line each. */
function showCalls(element, calls) {
  element.textContent = calls.map(({ name, arguments: given }) => `${name}(${given})`).join("\n");
}

function message(role) {
  const item = document.createElement("article");
  item.className = `message ${role}`;
  item.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const parts = { item };
  for (const part of ["text", "calls", "numbers", "end"]) {
    parts[part] = document.createElement("div");
    parts[part].className = part;
    item.append(parts[part]);
  }
  return parts;
}

/** Scrolls along with a growing answer, unless the reader has scrolled away. */
function follow() {
  const box = $("transcript");
  const down = () => (box.scrollTop = box.scrollHeight);
  let stuck = true;
  box.onscroll = () => (stuck = box.scrollHeight - box.scrollTop - box.clientHeight < 48);
  down();
  return () => stuck && down();
}

/** As high as its text, within limits that the style sets. */
function fit() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
