// The conversation.

import { hideProblem, showProblem } from "./problems.js";
import { run } from "./run.js";
import { askForKey, requestFields, scoreFields, systemMessages } from "./settings.js";

const $ = (id) => document.getElementById(id);
const ENDS = { length: "cut at max tokens", stop: "", abort: "ended by the server" };

export class Chat {
  constructor() {
    this.history = [];
    this.running = null;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send($("prompt").value);
    });
    $("prompt").addEventListener("input", fit);
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
  }

  /** Returns whether there was something to stop. */
  stop() {
    this.running?.abort();
    return this.running !== null;
  }

  clear() {
    this.stop();
    this.history = [];
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
    const question = message("user", "You");
    question.text.textContent = content;
    const answer = message("assistant", "Model");
    $("transcript").append(question.item, answer.item);
    $("prompt").value = "";
    fit();
    this._busy(new AbortController());
    const history = this.history;
    const messages = [...systemMessages(), ...history, { role: "user", content }];
    try {
      const stick = follow();
      const result = await run(
        { messages, ...fields, ...scoreFields() },
        { textElement: answer.text, numbersElement: answer.numbers, signal: this.running.signal, drawn: stick },
      );
      this._keep(history, content, result, answer);
    } catch (error) {
      this._failed(error, history, content, question, answer);
    } finally {
      this._busy(null);
    }
  }

  _keep(history, content, result, answer) {
    const text = result.text.content;
    const end = result.stopped ? "stopped" : ENDS[result.finish];
    answer.end.textContent = end;
    // A question without an answer would stand beside the next question.
    if (text && history === this.history) {
      history.push({ role: "user", content }, { role: "assistant", content: text });
    }
    $("announcer").textContent = text ? `Answer: ${text} ${end}` : "There was no text.";
  }

  _failed(error, history, content, question, answer) {
    if (error.status === 401) askForKey(true);
    if (error.partial?.text.content) {
      this._keep(history, content, error.partial, answer);
      answer.end.textContent = "broken off";
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

function message(role, name) {
  const item = document.createElement("article");
  item.className = `message ${role}`;
  item.setAttribute("aria-label", name);
  const parts = { item };
  for (const part of ["text", "numbers", "end"]) {
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
