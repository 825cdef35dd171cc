// A text made of tokens: who proposed each, and the details shown for one of them.

import { classOf, TARGET } from "./proposers.js";

const tokenOf = new WeakMap();

/** Text that grows token by token inside an element. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.tokens = [];
    // All that the model wrote, thoughts and calls with what frames them. Offsets count code
    // points, JavaScript's strings UTF-16 units.
    this.characters = [];
    this.pieces = [];
    // What of it is the answer, what was thought before, and the calls.
    this.content = "";
    this.thought = "";
    this.calls = [];
    this._shown = 0;
    this._judged = 0;
    element.replaceChildren();
    element.onkeydown = walk;
  }

  get written() {
    return this.characters.join("");
  }

  /** Takes a choice of a chunk; returns how many tokens it brought. */
  add(choice) {
    this.content += choice.delta.content ?? "";
    this.thought += choice.delta.reasoning_content ?? "";
    for (const call of choice.delta.tool_calls ?? []) this._enterCall(call);
    const about = choice.surefoot;
    if (!about) return 0;
    for (const [text, name] of about.pieces) {
      this.pieces.push([text, name]);
      this.characters.push(...text);
    }
    about.proposed_by.forEach((name, index) => {
      const scores = choice.logprobs?.content?.[index];
      this.tokens.push({
        index: this.tokens.length,
        id: choice.token_ids?.[index],
        proposer: name ?? TARGET,
        position: about.draft_positions[index],
        offset: about.text_offset[index],
        logprob: scores?.logprob,
        top: scores?.top_logprobs ?? [],
        span: null,
      });
    });
    return about.proposed_by.length;
  }

  /** Calls come whole, or their arguments piece by piece. */
  _enterCall({ index, function: { name = "", arguments: text = "" } }) {
    const call = (this.calls[index] ??= { name: "", arguments: "" });
    call.name += name;
    call.arguments += text;
  }

  /** Where the thoughts end, in code points. */
  get _thoughtEnd() {
    const at = this.thought ? this.written.indexOf(this.thought) : -1;
    return at < 0 ? 0 : [...this.written.slice(0, at + this.thought.length)].length;
  }

  _text(token) {
    const end = this.tokens[token.index + 1]?.offset ?? this.characters.length;
    return this.characters.slice(token.offset, end).join("");
  }

  /** Brings the element up to date. */
  draw() {
    const fragment = document.createDocumentFragment();
    // The last token drawn may have got its text only now.
    for (let index = Math.max(0, this._shown - 1); index < this.tokens.length; index++) {
      const token = this.tokens[index];
      const text = this._text(token);
      if (token.span) token.span.textContent = text;
      else if (text) fragment.append(this._span(token, text));
    }
    this._shown = this.tokens.length;
    this.element.append(fragment);
    const thoughts = this._thoughtEnd;
    for (; this.tokens[this._judged]?.offset < thoughts; this._judged++) {
      this.tokens[this._judged].span?.classList.add("thought");
    }
  }

  _span(token, text) {
    const span = document.createElement("span");
    span.className = `t ${classOf(token.proposer)}`;
    span.textContent = text;
    span.tabIndex = this.element.querySelector(".t") || token.index ? -1 : 0;
    token.span = span;
    tokenOf.set(span, { token, text: () => this._text(token) });
    return span;
  }

  /** Marks the token from which on this text is not the other one. */
  markDifference(index) {
    for (const token of this.tokens.slice(index)) {
      token.span?.classList.add(token.index === index ? "differs" : "after");
    }
    if (this.tokens[index]?.span) return;
    // The end of the text, or a piece of a character.
    const mark = document.createElement("span");
    mark.className = "t target differs";
    mark.textContent = index < this.tokens.length - 1 ? "here" : "ends here";
    const next = this.tokens.slice(index).find((token) => token.span);
    this.element.insertBefore(mark, next?.span ?? null);
  }
}

/** Shows a text that was kept: pieces of [text, proposer]. */
export function showPieces(element, pieces) {
  const spans = pieces.map(([text, name]) => {
    const span = document.createElement("span");
    span.className = `t ${classOf(name ?? TARGET)}`;
    span.textContent = text;
    return span;
  });
  element.replaceChildren(...spans);
}

/** Left, right, home and end move between tokens. */
function walk(event) {
  if (!event.target.classList.contains("t")) return;
  const all = [...event.currentTarget.querySelectorAll(".t")];
  const at = all.indexOf(event.target);
  const steps = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 };
  const next = all[steps[event.key]];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  if (value > 0 && value < 0.01) return "below 0.01 %";
  return `${value.toFixed(value > 99.9 || value < 1 ? 2 : 1)} %`;
};
const visible = (text) =>
  text === "" ? "(no text)" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");

function line(box, name, value) {
  const term = document.createElement("dt");
  const about = document.createElement("dd");
  term.textContent = name;
  about.textContent = value;
  box.append(term, about);
}

function describe({ token, text }) {
  const list = document.createElement("dl");
  const own = token.proposer === TARGET;
  line(list, "Token", visible(text()));
  line(list, "From", own ? "the target itself" : token.proposer);
  if (!own) line(list, "Draft", `no. ${token.position} of its round`);
  if (token.logprob !== undefined) {
    line(list, "Probability", percent(token.logprob));
    line(list, "Logprob", token.logprob.toFixed(3));
  }
  line(list, "Position", String(token.index + 1));
  if (token.id !== undefined) line(list, "Token id", String(token.id));
  const others = token.top.filter((other) => other.logprob !== token.logprob);
  if (others.length) {
    const shown = others.map((other) => `${visible(other.token)} ${percent(other.logprob)}`);
    line(list, token.top.length === others.length ? "Likelier" : "Others", shown.join("\n"));
  }
  return list;
}

/** Shows the details of tokens that are pointed at or focused. */
export function watchTokens(box) {
  const hide = () => {
    box.hidden = true;
    document.querySelector("[aria-describedby=details]")?.removeAttribute("aria-describedby");
  };
  const show = (event) => {
    const known = tokenOf.get(event.target);
    if (!known) return hide();
    hide();
    box.replaceChildren(describe(known));
    box.hidden = false;
    event.target.setAttribute("aria-describedby", "details");
    place(box, event.target);
  };
  for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, show);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

function place(box, span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const gap = 6;
  const left = Math.min(at.left, innerWidth - size.width - gap);
  const above = at.top - size.height - gap;
  const top = above >= gap ? above : Math.min(at.bottom + gap, innerHeight - size.height - gap);
  box.style.left = `${Math.max(gap, left)}px`;
  box.style.top = `${top}px`;
}
