// How fast a run is, and what its drafts were worth.

import { Graph } from "./graph.js";

export class Numbers {
  constructor(element) {
    this.element = element;
    this.started = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.tokens = 0;
    this.early = 0;
    this.speculation = null;
    this.cached = 0;
    this.graph = new Graph();
    element.replaceChildren();
  }

  /** Enters tokens that have just come, and the counts of speculation up to them. */
  add(count, speculation) {
    if (!count) return;
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.early = count;
    }
    this.tokens += count;
    if (!speculation) return;
    this.speculation = speculation;
    this.graph.add(this.lastAt - this.started, speculation);
  }

  finish(usage) {
    if (!usage) return;
    this.speculation = usage.speculation;
    this.cached = usage.prompt_tokens_details.cached_tokens;
  }

  /** Tokens per second after the first ones came; null while that says nothing. */
  get pace() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const count = this.tokens - this.early;
    return count > 0 && seconds > 0 ? count / seconds : null;
  }

  /** Drafts that the model has checked. */
  get verified() {
    return this.speculation?.verified ?? 0;
  }

  draw() {
    if (this.firstAt === null) return;
    const { rounds = 0, accepted = 0, accepted_length = 0 } = this.speculation ?? {};
    const first = Math.round(this.firstAt - this.started);
    const cached = this.cached ? `, ${this.cached} prompt tokens cached` : "";
    const items = [
      ["tok/s", this.pace === null ? "–" : this.pace.toFixed(this.pace < 10 ? 1 : 0), "Tokens per second, from the first token on"],
      ["accepted length", rounds ? accepted_length.toFixed(2) : "–", "Tokens per round, the target's own included"],
      this.verified
        ? ["drafts accepted", `${accepted} of ${this.verified}`, "Of the drafts that were verified"]
        : ["drafts", "no", "None were verified"],
      ["tokens", `${this.tokens}`, `In ${rounds} rounds`],
      ["first token", `${first} ms`, `After the request${cached}`],
    ];
    const graph = this.graph.draw();
    this.element.replaceChildren(
      ...items.map(([name, value, about]) => {
        const item = document.createElement("span");
        const number = document.createElement("b");
        item.title = about;
        number.textContent = value;
        item.append(number, ` ${name}`);
        return item;
      }),
      ...(graph ? [graph] : []),
    );
  }
}
