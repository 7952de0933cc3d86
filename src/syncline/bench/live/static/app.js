// Polls the server while the page is visible, and shows the result.

import { AXES, drawCurves, drawHeat, drawSpeed, lineStyles, onThemeChange } from "./plots.js";
import { Table, groups } from "./table.js";
import { count, duration, roughly, value } from "./phrases.js";

const POLL_MS = 1500; // while the run is active
const FINISHED_POLL_MS = 10000; // a finished run may be resumed
const RETRY_MS = 4000; // while the server does not answer
const ANSWER_TIMEOUT_MS = 15000;
const KINDS = { compute: "compute", exposed: "exposed", codec: "codec", data: "data", seconds: "whole step" };
const SPEEDS = { exposed: ".0%", bytes: ".3~s", samples: ".3~s", loss: ".3~g" };

const INVALID_TOKEN = "The token of this page is no longer valid: open the address that syncline watch printed last.";
const NO_ANSWER = "The server does not answer; the page shows the last data. Start it again: syncline watch";
const NO_RANKS_YET = "No data of single ranks yet: it is logged about once per second.";
const NO_RANKS = "The run ended before data of its ranks was logged, about once per second.";

const at = (id) => document.getElementById(id);
const view = { axis: "elapsed", kind: "compute", group: null, chosen: null, followed: true };
const curves = new Map();
let state = null;
let shown = "";
let detail = null;
let timer = 0;
let asking = false;
let again = false; // the user changed the selection while a request was pending

const table = new Table(at("table"), (run) => choose(run.id));

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_TIMEOUT_MS), cache: "no-store" });
  if (answer.status === 403) throw new Error(INVALID_TOKEN);
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

async function poll() {
  clearTimeout(timer);
  again = asking;
  if (asking || document.hidden) return;
  setAsking(true);
  let wait = POLL_MS;
  try {
    state = await ask("state.json");
    await askForRuns();
    setText(at("gone"), "");
    if (state.reading) wait = 100;
    else if (state.status === "finished") wait = FINISHED_POLL_MS;
  } catch (error) {
    const lost = error instanceof TypeError || error.name === "TimeoutError";
    setText(at("gone"), lost ? NO_ANSWER : error.message);
    setStatus("gone");
    shown = "";
    wait = RETRY_MS;
  } finally {
    setAsking(false);
  }
  if (!document.hidden) timer = setTimeout(poll, again ? 0 : wait);
}

function setAsking(now) {
  asking = now;
  document.body.dataset.asking = now ? "yes" : "no";
}

async function askForRuns() {
  follow();
  const stale = visible().filter((run) => run.id != null && curves.get(run.id)?.version !== run.version);
  if (stale.length) {
    const found = await ask(`curves.json?runs=${stale.map((run) => run.id).join(",")}`);
    for (const [id, curve] of Object.entries(found.runs)) curves.set(Number(id), curve);
  }
  const run = chosenRun();
  if (run && (detail?.id !== run.id || detail.version !== run.version || detail.heat.kind !== view.kind)) {
    detail = await ask(`run.json?id=${run.id}&kind=${view.kind}`);
  }
  show();
}

// Until the user selects a run, the page shows the current one, or the last one.
function follow() {
  const known = state.runs.filter((run) => run.id != null);
  if (!known.some((run) => run.id === view.chosen)) view.followed = true;
  if (!view.followed) return;
  const latest = (runs) => runs.reduce((best, run) => (best && best.id > run.id ? best : run), null);
  const running = known.filter((run) => run.status === "running");
  view.chosen = latest(running.length ? running : visible().filter((run) => run.id != null))?.id ?? null;
}

const chosenRun = () => state.runs.find((run) => run.id != null && run.id === view.chosen);
const currentGroup = () => {
  const found = groups(state);
  return found.has(view.group) ? view.group : [...found.keys()][0];
};
const visible = () => groups(state).get(currentGroup()) ?? [];

function choose(id) {
  view.chosen = id;
  view.followed = false;
  change();
}

// A change of the user is shown at once with the known data, and then requested.
function change() {
  if (state) show();
  poll();
}

function show() {
  const drawn = visible().map((run) => curves.get(run.id)?.version);
  const now = JSON.stringify([state, view, drawn, detail?.version, detail?.id, detail?.heat.kind]);
  if (now === shown) return;
  shown = now;
  showHeader();
  const runs = visible();
  const styles = lineStyles([...new Set(state.runs.map((run) => run.entry))].sort(byPlan));
  showTable(runs, styles);
  const some = runs.some((run) => curves.get(run.id)?.metric.length);
  at("curves").hidden = !some;
  at("no-curves").hidden = some;
  setText(at("curves-title"), `Validation ${state.metric}`);
  const strong = state.kind === "race" ? view.chosen : null;
  if (some) drawCurves(at("curves"), runs, curves, view.axis, state, styles, strong);
  showDetail();
}

const byPlan = (a, b) => (state.entries ?? []).indexOf(a) - (state.entries ?? []).indexOf(b);

const share = (part) => `${(100 * part).toFixed(1)} %`;

const people = (workers) => `${workers} worker${workers === 1 ? "" : "s"}`;

function showHeader() {
  const { workload, metric, target, workers, place, folder } = state;
  setText(at("title"), `${state.kind === "race" ? "Race" : "Training"}: ${workload ?? "not started"}`);
  document.title = `${state.status} · ${workload ?? ""} · syncline watch`;
  const goal = target == null ? null : `target: validation ${metric} ${state.higher ? "≥" : "≤"} ${value(target)}`;
  setText(at("about"), [workers && people(workers), place, goal].filter(Boolean).join(" · "));
  setText(at("folder"), folder);
  setStatus(state.status);
  const part = state.total ? Math.min(1, state.done / state.total) : 0;
  const bar = at("bar");
  bar.setAttribute("aria-valuemax", String(state.total ?? 1));
  bar.setAttribute("aria-valuenow", String(state.done));
  bar.firstElementChild.style.width = `${100 * (state.status === "finished" ? 1 : part)}%`;
  const most = state.unit === "steps" ? "at most " : "";
  setText(at("progress"), `${count(state.done)} of ${most}${count(state.total)} ${state.unit}`);
  const left = state.left == null ? "" : `${most}about ${roughly(state.left)} left`;
  setText(at("left"), state.reading ? "still reading the logs" : left);
  const silence = `Nothing was written for ${duration(state.quiet)}: a long computation, a hang, or a killed run.`;
  fillList(at("notes"), [state.quiet == null ? "" : silence, state.reason, ...state.problems].filter(Boolean));
}

function showTable(runs, styles) {
  at("entries").hidden = state.kind !== "race";
  if (state.kind !== "race") return;
  const names = [...groups(state).keys()];
  const named = Object.fromEntries(names.map((name) => [name, name]));
  buttons(at("groups"), named, currentGroup(), (name) => (view.group = name));
  at("groups").hidden = names.length < 2;
  table.show(runs, styles, state.target, view.chosen);
  const said = `Best validation ${state.metric} of each run, and ✓ how long it took to the target.`;
  setText(at("key"), `${said} Choose a run to see its ranks below.`);
  fillList(at("skipped"), Object.entries(state.skipped).map(([name, why]) => `${name} was skipped: ${why}`));
}

function showDetail() {
  const run = chosenRun();
  at("detail").hidden = !run || !detail || detail.id !== run.id;
  if (at("detail").hidden) return;
  const which = run.factor == null ? `seed ${run.seed}` : `rate × ${run.factor}`;
  setText(at("detail-title"), state.kind === "race" ? `${run.entry}, ${which}` : run.entry || "Run");
  const facts = [
    run.workers && people(run.workers),
    `step ${count(run.step)}${run.steps ? ` of at most ${count(run.steps)}` : ""}`,
    run.hit != null && `target reached in ${duration(run.hit)}`,
    run.test != null && `test ${state.metric} ${value(run.test)}`,
  ];
  setText(at("detail-about"), facts.filter(Boolean).join(" · "));
  setText(at("reason"), state.kind === "race" && run.reason ? `${run.status}: ${run.reason}` : "");
  fillList(at("limits"), detail.limits);
  const some = detail.heat.rows.length > 0 && detail.heat.edges.length > 1;
  at("heat").hidden = !some;
  at("no-heat").hidden = some;
  setText(at("no-heat"), ["running", "waiting"].includes(run.status) || run.unread ? NO_RANKS_YET : NO_RANKS);
  const slow = detail.straggler;
  setText(at("straggler"), slow ? `Rank ${slow.rank} computes ${slow.times} × as long as the median rank.` : "");
  if (some) drawHeat(at("heat"), detail.heat, KINDS[detail.heat.kind]);
  fillList(at("experts"), detail.experts.map((one) => {
    const busiest = `expert ${one.busiest} of ${one.experts} is chosen for ${share(one.share)} of the tokens`;
    return `${one.layer || "experts"}: ${busiest}, ${share(one.dropped)} are dropped`;
  }));
  const told = detail.speeds.step.length > 0;
  at("speeds").hidden = !told;
  at("no-speeds").hidden = told;
  if (!told) return;
  for (const [column, format] of Object.entries(SPEEDS)) drawSpeed(at(column), detail.speeds, column, format, run.id);
}

function buttons(place, names, pressed, act) {
  const wanted = Object.keys(names).join("\n");
  if (place.dataset.names !== wanted) {
    place.dataset.names = wanted;
    place.replaceChildren(...Object.entries(names).map(([key, name]) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = name;
      made.dataset.key = key;
      made.addEventListener("click", () => {
        act(key);
        press(place, key);
        change();
      });
      return made;
    }));
  }
  press(place, pressed);
}

function press(place, key) {
  for (const button of place.children) button.setAttribute("aria-pressed", String(button.dataset.key === key));
}

function setStatus(status) {
  const pill = at("status");
  setText(pill, status === "gone" ? "no answer" : status);
  pill.className = `pill ${status === "gone" ? "failed" : status}`;
}

// An empty element is hidden.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  if (element.id === "gone" || element.id === "reason") element.hidden = !text;
}

function fillList(list, texts) {
  list.hidden = texts.length === 0;
  if (list.dataset.texts === JSON.stringify(texts)) return;
  list.dataset.texts = JSON.stringify(texts);
  list.replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

function begin() {
  // The token is in a cookie now, and is removed from the address bar and the history.
  history.replaceState(null, "", location.pathname);
  buttons(at("axis"), AXES, view.axis, (key) => (view.axis = key));
  buttons(at("kind"), KINDS, view.kind, (key) => (view.kind = key));
  document.addEventListener("visibilitychange", poll);
  onThemeChange(() => {
    shown = "";
    if (state) show();
  });
  poll();
}

begin();
