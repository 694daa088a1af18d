// Pictures of rounds, as SVG.

import { el, svg } from "./dom.js";
import { figure, seconds } from "./format.js";

const GONE = new Set(["dropped", "refused", "withdrawn"]);
const KNOWN = new Set(["advertise", "share", "upload", "agree", "recover"]);
export const colour = (phase) => (KNOWN.has(phase) ? phase : "other");

function ticks(low, high, wanted) {
  const span = high - low || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at + 0);
  return found;
}

/** One row for the server and one per client: when each delivered in each phase. */
export function timeline(round, width, now) {
  const { phases, clients } = round;
  if (!phases.length) return el("p", { class: "empty" }, "Nothing to draw yet.");
  const start = phases[0].start;
  const end = Math.max(...phases.map((phase) => phase.end ?? now), start + 1e-3);
  const many = clients.length > 40;
  const height = many ? (clients.length > 150 ? 5 : 10) : 20;
  const left = 70;
  const top = 22;
  const rows = clients.length + 1;
  const bottom = top + 26 + clients.length * height;
  const x = (moment) => left + ((Math.min(Math.max(moment, start), end) - start) / (end - start)) * (width - left - 12);
  const bar = (phase, from, to, y, tall, pending = false) =>
    svg("rect", {
      x: x(from), y, width: Math.max(x(to) - x(from), 1.5), height: tall, rx: Math.min(3, tall / 2),
      class: `${colour(phase)}${pending ? " pending" : ""}`,
    });
  const drawn = [];
  for (const at of ticks(0, end - start, width < 500 ? 4 : 8)) {
    drawn.push(svg("line", { x1: x(start + at), x2: x(start + at), y1: top, y2: bottom, class: "rule" }));
    drawn.push(svg("text", { x: x(start + at), y: 12, "text-anchor": "middle" }, `${+at.toPrecision(6)} s`));
  }
  drawn.push(svg("text", { x: 0, y: top + 14, class: "strong" }, "server"));
  for (const phase of phases) drawn.push(bar(phase.name, phase.start, phase.end ?? now, top + 2, 16));
  clients.forEach((client, index) => {
    const y = top + 24 + index * height;
    const tall = Math.max(height - (many ? 2 : 8), 2);
    const gone = GONE.has(client.state);
    if (!many) drawn.push(svg("text", { x: 0, y: y + 11, class: gone ? "bad" : "" }, (client.name || `client ${client.id}`).slice(0, 10)));
    for (const phase of phases) {
      const delivered = client.steps[phase.name];
      const offset = y + (many ? 0 : 1);
      if (delivered !== undefined) drawn.push(bar(phase.name, phase.start, delivered, offset, tall));
      else if (client.left !== undefined && client.phase === phase.name) drawn.push(bar(phase.name, phase.start, client.left, offset, tall, true));
      else if (!gone && phase.end === null && phase.expected) drawn.push(bar(phase.name, phase.start, now, offset, tall, true));
    }
    if (gone && client.left !== undefined) {
      const at = x(client.left);
      const middle = y + (many ? tall / 2 : 7);
      const arm = many ? 2 : 4;
      drawn.push(svg("path", { d: `M${at - arm} ${middle - arm}L${at + arm} ${middle + arm}M${at - arm} ${middle + arm}L${at + arm} ${middle - arm}`, class: "mark" }));
      if (!many) {
        const flip = at > width - 190;
        drawn.push(svg("text", { x: at + (flip ? -9 : 9), y: y + 11, "text-anchor": flip ? "end" : "start", class: "bad" }, `${client.state} in ${client.phase}`));
      }
    }
  });
  const words = `Timeline of round ${round.round}: ` + phases.map((phase) => `${phase.name} ${seconds((phase.end ?? now) - phase.start)}`).join(", ");
  return svg("svg", { viewBox: `0 0 ${width} ${bottom + 4}`, width, height: bottom + 4, role: "img", "aria-label": `${words}; ${rows} rows` }, ...drawn);
}

const WIDTH = 340;
const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BASE = HEIGHT - 20;

function frame(label, low, high, rounds, format, drawn) {
  const y = (value) => BASE - ((value - low) / (high - low || 1)) * (BASE - TOP);
  const rules = ticks(low, high, 3).flatMap((at) => [
    svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at), class: "rule" }),
    svg("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, format(at)),
  ]);
  const step = Math.max(1, Math.ceil(rounds.length / 8));
  const names = rounds.map((round, index) =>
    index % step ? null : svg("text", { x: across(index, rounds.length), y: HEIGHT - 4, "text-anchor": "middle" }, String(round)));
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, ...rules, ...names, ...drawn(y));
}

const across = (index, count) => LEFT + ((index + 0.5) / count) * (WIDTH - LEFT - RIGHT);

function captioned(title, note, picture) {
  return el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title), note), picture);
}

/** A figure of the model over the rounds: the server's, and the mean of what clients measured. */
export function lines(name, history) {
  const rounds = history.filter((each) => each.aborted === null);
  const of = { "": rounds.map((each) => each.figures[name]), clients: rounds.map((each) => each.metrics[name]?.mean) };
  const finite = [...of[""], ...of.clients].filter(Number.isFinite);
  if (!finite.length) return null;
  let [low, high] = [Math.min(...finite), Math.max(...finite)];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  [low, high] = [low - margin, high + margin];
  const last = finite.length ? [...of[""]].reverse().find(Number.isFinite) ?? [...of.clients].reverse().find(Number.isFinite) : null;
  const draw = (y) => Object.entries(of).flatMap(([who, values]) => {
    const points = values.map((value, index) => (Number.isFinite(value) ? [across(index, rounds.length), y(value)] : null));
    const path = points.map((point, index) => (point ? `${index && points[index - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}` : "")).join("");
    const dots = rounds.length > 60 ? [] : points.map((point, index) =>
      point && svg("circle", { cx: point[0], cy: point[1], r: 2.6, class: `dot ${who}` }, svg("title", {}, `round ${rounds[index].round}: ${figure(values[index])}`)));
    return path ? [svg("path", { d: path, class: `line ${who}` }), ...dots] : [];
  });
  const both = of[""].some(Number.isFinite) && of.clients.some(Number.isFinite);
  const note = el("span", { class: "muted" }, both ? `${figure(last)} · dashed: clients` : figure(last));
  return captioned(name, note, frame(`${name} over rounds, now ${figure(last)}`, low, high, rounds.map((each) => each.round), figure, draw));
}

/** Stacked bars, one per round; `kinds` are [class, name]. */
export function bars(title, history, kinds, value, format, note = "") {
  const shown = history.slice(-40);
  const totals = shown.map((each) => kinds.reduce((sum, [kind]) => sum + value(each, kind), 0));
  const high = Math.max(...totals, 0) || 1;
  const wide = Math.max(1.5, Math.min(26, ((WIDTH - LEFT - RIGHT) / shown.length) * 0.72));
  const draw = (y) => shown.flatMap((each, index) => {
    let base = 0;
    return kinds.flatMap(([kind, name]) => {
      const size = value(each, kind);
      if (!size) return [];
      const block = svg("rect", { x: across(index, shown.length) - wide / 2, width: wide, y: y(base + size), height: Math.max(y(base) - y(base + size), 0.5), class: kind },
        svg("title", {}, `round ${each.round}, ${name}: ${format(size)}`));
      base += size;
      return [block];
    });
  });
  const label = `${title}: ` + shown.slice(-8).map((each, index) => `round ${each.round} ${format(totals[totals.length - Math.min(8, shown.length) + index])}`).join(", ");
  return captioned(title, el("span", { class: "muted" }, note), frame(label, 0, high, shown.map((each) => each.round), format, draw));
}

/** How old updates were, in versions, and how many were that old. */
export function histogram(counts) {
  const ages = Object.keys(counts).map(Number).sort((a, b) => a - b);
  if (!ages.length) return null;
  const all = Array.from({ length: ages[ages.length - 1] + 1 }, (_, age) => age);
  const high = Math.max(...Object.values(counts));
  const wide = Math.min(30, ((WIDTH - LEFT - RIGHT) / all.length) * 0.72);
  const draw = (y) => all.map((age, index) => counts[age]
    ? svg("rect", { x: across(index, all.length) - wide / 2, width: wide, y: y(counts[age]), height: y(0) - y(counts[age]), class: "share" }, svg("title", {}, `${counts[age]} updates were ${age} versions behind`))
    : null);
  const total = Object.values(counts).reduce((sum, each) => sum + each, 0);
  const mean = ages.reduce((sum, age) => sum + age * counts[age], 0) / total;
  const label = "Staleness of updates: " + ages.map((age) => `${counts[age]} were ${age} versions behind`).join(", ");
  return captioned("Staleness of updates, in versions", el("span", { class: "muted" }, `mean ${figure(mean)}, largest ${ages[ages.length - 1]}`),
    frame(label, 0, high, all, (at) => (Number.isInteger(at) ? String(at) : ""), draw));
}
