// The page: what the server tells is kept in `known`, and drawn.

import { bars, colour, histogram, lines, timeline } from "./charts.js";
import { byId, el, mark, say } from "./dom.js";
import { bytes, capital, figure, moment, plural, seconds } from "./format.js";

const PHASES = ["advertise", "share", "upload", "agree", "recover"];
const STATES = {
  waiting: ["·", "waiting"], sharing: ["⇄", "sharing its mask"], training: ["…", "training"],
  uploaded: ["↑", "uploaded"], answered: ["✓", "has answered"], included: ["✓", "in the sum"],
  idle: ["·", "connected"], away: ["○", "away"],
  withdrawn: ["–", "sits it out"], dropped: ["✕", "dropped"], refused: ["⊘", "refused"],
};
const LEGEND = ["away", "idle", "waiting", "sharing", "training", "uploaded", "included", "withdrawn", "dropped", "refused"];
const GONE = new Set(["dropped", "refused", "withdrawn"]);

const nothing = (boot) => ({ boot, federation: {}, members: [], live: null, history: new Map(), details: new Map() });
let known = nothing("");
let skew = 0;
let lost = false;
let selected = null;
let focused = null;
let drawnHistory = "";
const now = () => Date.now() / 1000 + skew;

// -- what the server tells -----------------------------------------------------------------------

function take(message) {
  if (message.boot !== known.boot) known = nothing(message.boot);
  skew = message.now - Date.now() / 1000;
  Object.assign(known.federation, message.federation ?? {});
  known.members = message.members ?? known.members;
  if (message.live) {
    known.live = message.live;
    if (message.live.ended) known.details.set(message.live.round, { ...message.live.ended, clients: message.live.clients });
  }
  for (const round of message.history ?? []) known.history.set(round.round, round);
  draw();
}

function listen() {
  const source = new EventSource("events");
  source.onopen = () => { lost = false; draw(); };
  source.onmessage = (event) => {
    take(JSON.parse(event.data));
    if (known.federation.state === "ended") source.close();
  };
  source.onerror = () => {
    lost = known.federation.state !== "ended";
    draw();
    if (source.readyState === EventSource.CLOSED && lost) setTimeout(listen, 5000);
  };
}

async function select(round) {
  selected = round;
  draw();
  if (round !== null && !known.details.has(round)) {
    const answer = await fetch(`rounds/${round}`);
    if (answer.ok) known.details.set(round, await answer.json());
    draw();
  }
}

/** The round that is looked at, in one form, whether it runs or is over. */
function view() {
  const live = known.live;
  if (selected === null && live) return { ...live, summary: live.ended };
  const rounds = sorted();
  const number = selected ?? rounds[rounds.length - 1]?.round;
  const summary = known.history.get(number);
  if (!summary) return null;
  const detail = known.details.get(number);
  if (!detail && selected === null) fetchDetail(number);
  const phases = Object.entries(summary.phases).map(([name, each]) => ({ name, ...each, expected: 0, awaited: 0 }));
  return { round: number, start: summary.start, phases, clients: detail?.clients ?? [], staleness: summary.staleness, summary };
}

const asked = new Set();
function fetchDetail(number) {
  if (asked.has(number)) return;
  asked.add(number);
  fetch(`rounds/${number}`).then(async (answer) => {
    if (answer.ok) known.details.set(number, await answer.json());
    draw();
  });
}

/** Names of phases, each once, those that are known in the order in which they follow each other. */
const inOrder = (names) => [...new Set(names)].sort((a, b) => PHASES.indexOf(a) - PHASES.indexOf(b));
const sorted = () => [...known.history.values()].sort((a, b) => a.round - b.round);

// -- drawing ---------------------------------------------------------------------------------------

let due = false;
function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const round = view();
    const rounds = sorted();
    drawHeader();
    drawNow(round, rounds);
    drawClients(round);
    drawTimeline(round, rounds);
    drawPast(rounds);
  });
}

function drawHeader() {
  const { protocol, threat_model, clients, privacy, dropouts, survivors, mode, state, message } = known.federation;
  const kind = mode === "async" ? "asynchronous" : "synchronous";
  say(byId("federation"), protocol ? `${protocol}, ${kind}, ${threat_model} · N ${clients}, T ${privacy}, D ${dropouts}, U ${survivors}` : "");
  const status = byId("status");
  mark(status, "data-state", lost ? "lost" : state ?? "connecting");
  say(status, lost ? "connection lost" : { waiting: `waiting ${message}`, recorded: "on record", ended: "finished" }[state] ?? state ?? "connecting");
  mark(status, "title", message || null);
  document.title = known.live && state === "running" ? `Round ${known.live.round} · LightSecAgg` : "LightSecAgg";
}

function drawNow(round, rounds) {
  const { federation } = known;
  const summary = round?.summary;
  const current = round && !summary ? round.phases[round.phases.length - 1] : null;
  const kind = federation.mode === "async" ? "Buffer" : "Round";
  const { connected = 0, needed = 0 } = federation;
  const short = federation.state === "waiting" && connected < needed ? `waiting for clients: ${connected} of ${needed} that are needed` : "";
  say(byId("now-title"), round ? `${kind} ${round.round}` : "No round yet");
  let words = capital(short || federation.message || "");
  const waits = federation.mode === "async" && federation.buffer ? ` for ${federation.buffer} updates, ${inBuffer(round)} are here` : null;
  if (current) words = waits && current.name === "upload" ? `Waiting${waits} · ${seconds(now() - round.start)}` : `${capital(current.name)}${current.expected ? `: ${delivered(round, current)} of ${current.expected} have delivered` : ""} · ${seconds(now() - round.start)}`;
  else if (summary && summary.aborted === null) words = `Done: ${summary.included} of ${summary.invited} in the sum, in ${seconds(summary.seconds)}`;
  else if (summary) words = `Aborted after ${seconds(summary.seconds)}`;
  const more = federation.state === "ended" ? federation.message : summary ? short : "";
  if (selected === null && more) words += ` · ${more}`;
  say(byId("now-words"), words);
  byId("aborted").hidden = !summary?.aborted;
  say(byId("aborted"), summary?.aborted ?? "");
  drawPhases(round, current);
  const last = [...rounds].reverse().find((each) => each.aborted === null);
  const gone = round ? round.clients.filter((client) => GONE.has(client.state)).length : 0;
  const wanted = federation.rounds ? ` of ${federation.rounds}` : "";
  const tiles = [
    [`${kind}s done`, String(federation.done ?? 0), wanted],
    ["Aborted", String(federation.aborted ?? 0), ""],
    ["Connected", federation.state === "recorded" ? "–" : String(connected), known.members.length ? ` of ${known.members.length}, ${needed} needed` : ""],
    [federation.mode === "async" ? "Left" : "Left this round", String(gone), round?.clients.length ? ` of ${round.clients.length}` : ""],
    ...Object.entries(last?.figures ?? {}).slice(0, 2).map(([name, value]) => [capital(name), figure(value), ""]),
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, more)))));
}

const delivered = (round, phase) => round.clients.filter((client) => client.steps[phase.name] !== undefined).length;
const inBuffer = (round) => round?.buffered ?? 0;

function drawPhases(round, current) {
  const passed = new Map((round?.phases ?? []).map((phase) => [phase.name, phase]));
  const names = inOrder([...(known.federation.mode === "async" ? [] : PHASES), ...passed.keys()])
    .filter((name) => passed.has(name) || !round?.summary);
  byId("phases").replaceChildren(...names.map((name) => {
    const phase = passed.get(name);
    const running = current !== null && current?.name === name;
    const buffer = known.federation.mode === "async" && name === "upload" ? known.federation.buffer : 0;
    const done = buffer ? inBuffer(round) / buffer : phase ? delivered(round, phase) / (phase.expected || 1) : 0;
    const share = running ? Math.min(done, 1) : phase ? 1 : 0;
    const filled = el("i", { class: colour(name) });
    filled.style.width = `${Math.round(100 * share)}%`;
    const took = !phase ? "" : seconds((phase.end ?? now()) - phase.start);
    return el("li", { "aria-current": running ? "step" : null }, el("div", { class: "bar" }, filled), el("span", {}, capital(name)), el("small", {}, took));
  }));
}

// -- clients -----------------------------------------------------------------------------------------

const cells = new Map();

function drawClients(round) {
  const grid = byId("grid");
  const latest = selected === null;
  const members = new Map(known.members.map((member) => [member.id, member]));
  const inRound = new Set((round?.clients ?? []).map((client) => client.id));
  const others = latest ? known.members.filter((member) => !inRound.has(member.id)) : [];
  const clients = [...(round?.clients ?? []).map((client) => ({ ...client })), ...others.map((member) => ({ id: member.id, state: member.here ? "idle" : "away", why: "", steps: {}, out: true }))].sort((a, b) => a.id - b.id);
  for (const client of clients) Object.assign(client, { name: members.get(client.id)?.name ?? "", away: members.get(client.id)?.away });
  const here = !latest ? null : members.size ? new Set(known.members.filter((member) => member.here).map((member) => member.id)) : known.live?.here ? new Set(known.live.here) : null;
  const ids = new Set(clients.map((client) => client.id));
  grid.classList.toggle("dense", clients.length > 150);
  grid.classList.toggle("named", clients.length <= 150 && clients.some((client) => client.name));
  for (const [id, item] of cells) if (!ids.has(id)) { item.remove(); cells.delete(id); }
  clients.forEach((client, index) => {
    let item = cells.get(client.id);
    if (!item) {
      const button = el("button", { type: "button", class: "cell", tabindex: "-1", "data-client": client.id }, el("b", {}), el("span", { "aria-hidden": "true" }));
      item = el("li", {}, button);
      cells.set(client.id, item);
    }
    if (grid.children[index] !== item) grid.insertBefore(item, grid.children[index] ?? null);
    const button = item.firstChild;
    const [glyph] = STATES[client.state];
    mark(button, "data-state", client.state);
    mark(button, "data-here", here ? String(here.has(client.id)) : null);
    mark(button, "aria-label", describe(client, here));
    mark(button, "title", describe(client, here));
    say(button.firstChild, client.name || String(client.id));
    say(button.lastChild, glyph);
  });
  if (!ids.has(focused)) focused = clients[0]?.id ?? null;
  for (const [id, item] of cells) mark(item.firstChild, "tabindex", id === focused ? "0" : "-1");
  if (!clients.length) say(byId("client-words"), "No client is known yet.");
  else {
    const shown = clients.find((client) => String(client.id) === byId("client-words").dataset.client);
    say(byId("client-words"), shown ? capital(describe(shown, here)) : summaryOf(clients));
  }
  const away = here ? clients.filter((client) => !client.out && !here.has(client.id)).length : 0;
  const dashed = away ? [el("li", {}, el("i", { class: "away" }), el("b", {}, String(away)), "not connected")] : [];
  byId("legend").replaceChildren(...dashed, ...LEGEND.filter((state) => clients.some((client) => normal(client.state) === state))
    .map((state) => el("li", {}, el("span", {}, STATES[state][0]), el("b", {}, String(clients.filter((client) => normal(client.state) === state).length)), STATES[state][1])));
}

const normal = (state) => (state === "answered" ? "included" : state);

function summaryOf(clients) {
  const alike = new Map();
  for (const client of clients.filter((each) => GONE.has(each.state) || each.state === "away")) {
    const why = fate(client);
    alike.set(why, [...(alike.get(why) ?? []), client.name || client.id]);
  }
  const groups = [...alike].map(([why, ids]) => `${ids.slice(0, 12).join(", ")}${ids.length > 12 ? ", …" : ""}: ${why}`);
  return groups.length ? groups.slice(0, 6).join("; ") + (groups.length > 6 ? "; …" : "") : plural(clients.length, "client");
}

const since = (client) => (client.away ? ` since ${moment(client.away)}` : "");
const nameOf = (id) => known.members.find((member) => member.id === id)?.name ?? "";

function fate(client) {
  if (client.state === "away") return client.away ? `away${since(client)}` : "not seen since the server started";
  const phase = GONE.has(client.state) && client.phase ? ` in ${client.phase}` : "";
  return [`${STATES[client.state][1]}${phase}`, client.why].filter(Boolean).join(", ");
}

function describe(client, here) {
  const more = [client.staleness !== undefined ? `${plural(client.staleness, "version")} behind` : "", client.included && GONE.has(client.state) ? "its upload is in the sum" : "", here && !client.out && !here.has(client.id) ? `not connected${since(client)}` : ""];
  return [`client ${client.id}${client.name ? ` (${client.name})` : ""} ${fate(client)}`, ...more.filter(Boolean)].join(", ");
}

function moveInGrid(event) {
  const button = event.target.closest("button");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const row = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!button || !(step || row || event.key === "Home" || event.key === "End")) return;
  const items = [...byId("grid").children];
  const columns = getComputedStyle(byId("grid")).gridTemplateColumns.split(" ").length;
  const at = items.indexOf(button.parentNode);
  const target = event.key === "Home" ? 0 : event.key === "End" ? items.length - 1 : at + (step ?? row * columns);
  event.preventDefault();
  items[target]?.firstChild.focus();
}

function point(event) {
  const button = event.target.closest("button");
  if (!button) return;
  focused = Number(button.dataset.client);
  byId("client-words").dataset.client = focused;
  draw();
}

// -- one round and all rounds ----------------------------------------------------------------------

function drawTimeline(round, rounds) {
  const box = byId("timeline");
  const shown = (client) => known.federation.mode !== "async" || Object.keys(client.steps).length || client.left !== undefined;
  const drawn = round && { ...round, clients: round.clients.filter(shown).map((client) => ({ ...client, name: nameOf(client.id) })) };
  box.replaceChildren(drawn ? timeline(drawn, Math.max(box.clientWidth, 300), now()) : el("p", { class: "empty" }, "A timeline is drawn as soon as a round begins."));
  byId("timeline-legend").replaceChildren(...(round?.phases ?? []).map((phase) => el("li", {}, el("i", { class: colour(phase.name) }), phase.name)));
  const soFar = (round?.phases ?? []).map((phase) => [phase.name, { seconds: (phase.end ?? now()) - phase.start }]);
  const of = round?.summary?.phases ?? Object.fromEntries(soFar);
  const done = rounds.filter((each) => each.aborted === null);
  const names = inOrder([...Object.keys(of), ...done.flatMap((each) => Object.keys(each.phases))]);
  byId("costs").tBodies[0].replaceChildren(...names.map((name) => {
    const entry = of[name];
    const all = done.map((each) => each.phases[name]?.seconds).filter((each) => each !== undefined);
    const mean = all.length ? seconds(all.reduce((sum, each) => sum + each, 0) / all.length) : "–";
    return el("tr", {}, el("td", {}, el("i", { class: colour(name) }), capital(name)), el("td", {}, entry ? seconds(entry.seconds) : "–"),
      el("td", {}, entry?.bytes_in !== undefined ? bytes(entry.bytes_in) : "–"), el("td", {}, entry?.bytes_out !== undefined ? bytes(entry.bytes_out) : "–"), el("td", {}, mean));
  }));
  byId("costs").hidden = !names.length;
}

function drawPast(rounds) {
  const signature = JSON.stringify([rounds.map((each) => [each.round, each.aborted]), selected, known.boot, known.live?.staleness]);
  if (signature === drawnHistory) return;
  drawnHistory = signature;
  drawCharts(rounds);
  const focus = document.activeElement?.dataset?.round;
  byId("history").tBodies[0].replaceChildren(...[...rounds].reverse().map(historyRow));
  if (focus) byId("history").querySelector(`button[data-round="${Number(focus)}"]`)?.focus();
  byId("back").hidden = selected === null;
}

function historyRow(round) {
  const left = Object.values(round.dropped).reduce((sum, each) => sum + each, 0);
  const figures = Object.entries(round.figures).slice(0, 2).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const notes = [round.resumed && "resumed after a crash", round.recalled && "known from the journal alone", round.suspects.length && `suspects: ${round.suspects.join(", ")}`, round.stopped];
  const outcome = [round.aborted ?? "done", ...notes.filter(Boolean)].join(" · ");
  const open = el("button", { type: "button", "data-round": round.round, "aria-label": `Show round ${round.round}`, onclick: () => select(selected === round.round ? null : round.round) }, String(round.round));
  return el("tr", { "data-outcome": round.aborted === null ? "done" : "aborted", "aria-selected": String(selected === round.round) },
    el("td", {}, open), el("td", {}, moment(round.start)), el("td", {}, seconds(round.seconds)),
    el("td", {}, `${round.included} of ${round.invited}`), el("td", {}, String(left)), el("td", {}, figures || "–"), el("td", {}, outcome));
}

function drawCharts(rounds) {
  const names = [...new Set(rounds.flatMap((each) => [...Object.keys(each.figures), ...Object.keys(each.metrics)]))];
  const phases = inOrder(rounds.flatMap((each) => Object.keys(each.phases))).map((name) => [colour(name), name]);
  const givenUp = (round) => Object.values(round.dropped).reduce((sum, each) => sum + each, 0);
  const missing = (round) => (known.federation.mode === "async" ? givenUp(round) : round.invited - round.included);
  const left = (round) => Math.max(missing(round) - round.withdrawn, 0);
  const part = { included: (round) => round.included, dropped: left, withdrawn: (round) => round.withdrawn };
  const ages = {};
  for (const each of [...rounds, known.live && !known.live.ended ? known.live : {}]) {
    for (const [age, count] of Object.entries(each.staleness ?? {})) ages[age] = (ages[age] ?? 0) + count;
  }
  const pictures = rounds.length ? [
    ...names.slice(0, 4).map((name) => lines(name, rounds)),
    bars("Clients", rounds, [["included", "in the sum"], ["dropped", "dropped"], ["withdrawn", "sat it out"]], (round, kind) => part[kind](round), (count) => (Number.isInteger(count) ? String(count) : ""), "red: dropped"),
    bars("Seconds by phase", rounds, phases, (round, kind) => round.phases[kind]?.seconds ?? 0, (value) => `${+value.toPrecision(3)} s`),
    bars("Bytes by phase", rounds, phases, (round, kind) => (round.phases[kind]?.bytes_in ?? 0) + (round.phases[kind]?.bytes_out ?? 0), bytes, "both directions"),
  ] : [];
  if (known.federation.mode === "async" || Object.keys(ages).length) pictures.push(histogram(ages));
  const drawn = pictures.filter(Boolean);
  byId("charts").replaceChildren(...(drawn.length ? drawn : [el("p", { class: "empty" }, "Curves begin with the first round that ends.")]));
}

// -- light and dark ----------------------------------------------------------------------------------

const THEMES = ["auto", "dark", "light"];

function paint(theme) {
  mark(document.documentElement, "data-theme", theme === "auto" ? null : theme);
  say(byId("theme"), `Theme: ${theme}`);
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  paint(theme);
}

paint(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
byId("theme").addEventListener("click", nextTheme);
byId("back").addEventListener("click", () => select(null));
byId("grid").addEventListener("keydown", moveInGrid);
byId("grid").addEventListener("focusin", point);
byId("grid").addEventListener("click", point);
addEventListener("resize", draw);
setInterval(() => { if (known.federation.state === "running" && !known.live?.ended) draw(); }, 500);
listen();
