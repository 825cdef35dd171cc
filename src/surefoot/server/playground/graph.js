// How many drafts were accepted per round, over the time of an answer.

const WIDTH = 160;
const HEIGHT = 28;
// Rounds of which each point is the mean.
const WINDOW = 8;
const STEP_MS = 50;
const SVG = "http://www.w3.org/2000/svg";

/** A line that grows while an answer comes. */
export class Graph {
  constructor() {
    this.points = [{ at: 0, rounds: 0, accepted: 0 }];
  }

  /** Enters the counts of speculation up to a time in milliseconds. */
  add(at, { rounds, accepted }) {
    // Of several within a moment the last one counts.
    if (this.points.length > 1 && at - this.points.at(-2).at < STEP_MS) this.points.pop();
    this.points.push({ at, rounds, accepted });
  }

  /** Accepted drafts per round at each point: [milliseconds, mean of the rounds before it]. */
  get means() {
    const means = [];
    let from = 0;
    for (const { at, rounds, accepted } of this.points.slice(1)) {
      while (rounds - this.points[from + 1].rounds >= WINDOW) from += 1;
      const { rounds: before, accepted: then } = this.points[from];
      if (rounds > before) means.push([at, (accepted - then) / (rounds - before)]);
    }
    return means;
  }

  /** The line as an element; null while there is none. */
  draw() {
    const means = this.means;
    const most = Math.max(...means.map(([, mean]) => mean), 1);
    if (means.length < 2 || means.every(([, mean]) => mean === 0)) return null;
    const [first, last] = [means[0][0], means.at(-1)[0]];
    const place = ([at, mean]) => {
      const x = (WIDTH * (at - first)) / (last - first || 1);
      return `${x.toFixed(1)},${(HEIGHT - 1 - ((HEIGHT - 2) * mean) / most).toFixed(1)}`;
    };
    const [svg, line, title] = ["svg", "polyline", "title"].map((name) => document.createElementNS(SVG, name));
    svg.setAttribute("class", "graph");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("role", "img");
    title.textContent = `Accepted drafts per round over time; at most ${most.toFixed(1)}`;
    line.setAttribute("points", means.map(place).join(" "));
    svg.append(title, line);
    return svg;
  }
}
