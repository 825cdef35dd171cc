// One prompt, run without and with speculation: are the texts the same, and how fast was each?

import { hideProblem, showProblem } from "./problems.js";
import { run } from "./run.js";
import { askForKey, requestFields, systemMessages } from "./settings.js";

const $ = (id) => document.getElementById(id);
const LARGEST_SEED = 2 ** 31;
// Two runs of the same work differ by this much even on a quiet machine.
const NOISE = 0.05;

export class Compare {
  constructor() {
    this.running = null;
    $("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    $("compare-stop").addEventListener("click", () => this.stop());
  }

  stop() {
    this.running?.abort();
    return this.running !== null;
  }

  async start() {
    const content = $("compare-prompt").value;
    const fields = requestFields();
    if (this.running || !content.trim() || !fields) return;
    // Both need the same one.
    fields.seed ??= Math.floor(Math.random() * LARGEST_SEED);
    const drafted = { ...fields.speculation };
    if (drafted.method === "off") drafted.method = "auto";
    const request = { ...fields, messages: [...systemMessages(), { role: "user", content }] };
    const together = $("compare-order").value === "together";
    hideProblem();
    $("verdict").hidden = true;
    $("drafted-title").textContent = `Speculation: ${drafted.method}`;
    $("compare-note").textContent = note(fields, drafted, together);
    this._busy(new AbortController());
    for (const side of ["plain", "drafted"]) {
      for (const part of ["text", "numbers"]) $(`${side}-${part}`).replaceChildren();
    }
    try {
      const plain = this._side("plain", { ...request, speculation: { method: "off" } });
      if (!together) await plain;
      const other = this._side("drafted", { ...request, speculation: drafted });
      judge(...(await Promise.all([plain, other])));
    } catch (error) {
      this.running.abort(); // the other one, if it still runs
      if (error.status === 401) askForKey(true);
      showProblem(error, () => this.start());
    } finally {
      this._busy(null);
    }
  }

  _side(side, request) {
    const { signal } = this.running;
    return run(request, {
      textElement: $(`${side}-text`),
      numbersElement: $(`${side}-numbers`),
      signal,
    });
  }

  _busy(controller) {
    const focused = document.activeElement;
    this.running = controller;
    $("compare-run").hidden = controller !== null;
    $("compare-stop").hidden = controller === null;
    if (focused === $("compare-run")) $("compare-stop").focus();
    if (focused === $("compare-stop")) $("compare-run").focus();
  }
}

/** Says whether the texts are the same, and marks where they are not. */
function judge(plain, drafted) {
  const [left, right] = [plain, drafted].map((side) => side.text.tokens.map((token) => token.id));
  const stopped = plain.stopped || drafted.stopped;
  const shared = Math.min(left.length, right.length);
  if (stopped && !shared) return say("stopped", "Stopped before both had begun: nothing to compare.");
  let at = left.findIndex((id, index) => index < shared && id !== right[index]);
  if (at < 0 && !stopped && left.length !== right.length) at = shared;
  const sameText = plain.text.written === drafted.text.written;
  if (at >= 0 || (!stopped && !sameText)) {
    if (at >= 0) for (const side of [plain, drafted]) side.text.markDifference(at);
    const where = at < 0 ? "The tokens are the same, but the texts differ" : `The texts differ from token ${at + 1} on`;
    return say(
      "different",
      `${where}. In float32 that must not happen; with fewer bits two tokens that are as good as ` +
        "tied may swap. The command “surefoot certify” tells which it was.",
    );
  }
  if (stopped) {
    return say("stopped", `Stopped. The first ${shared} tokens, which both have, are identical.`);
  }
  const [kind, words] = speeds(plain.numbers, drafted.numbers);
  say(kind, `Identical: the same ${shared} tokens. ${words}`);
}

/**
 * How the speeds compare: a kind of verdict, and words. One pair of runs has no spread of its own,
 * so a ratio near 1 counts as none.
 */
export function speeds(plain, drafted) {
  const [slow, fast] = [plain.pace, drafted.pace];
  if (slow === null || fast === null) return ["same", "Too short to compare speeds."];
  const paces = `${slow.toFixed(0)} and ${fast.toFixed(0)} tok/s`;
  if (!drafted.verified) return ["same", `No drafts verified, so both did the same work (${paces}).`];
  const ratio = fast / slow;
  if (Math.abs(ratio - 1) <= NOISE) return ["same", `About the same speed (${paces}).`];
  const words = `With speculation ${ratio.toFixed(2)} times as fast in this one pair of runs (${paces}).`;
  return [ratio > 1 ? "faster" : "slower", words];
}

function say(kind, text) {
  const mark = { faster: "✓", same: "✓", slower: "✓", different: "✗", stopped: "■" }[kind];
  $("verdict").className = `verdict ${kind}`;
  $("verdict").textContent = `${mark} ${text}`;
  $("verdict").hidden = false;
}

function note(fields, drafted, together) {
  const drafts = drafted.max_draft_tokens === undefined ? "" : `, at most ${drafted.max_draft_tokens} drafts`;
  const order = together
    ? " Both share the engine, so each is slower than alone."
    : " Plain decoding runs first; the second run finds the prompt in the cache, so its first token comes sooner.";
  return `Seed ${fields.seed}, temperature ${fields.temperature ?? "default"}, top-p ${fields.top_p ?? "default"}${drafts}.${order}`;
}
