// Entries × seeds. Cells are updated in place, so that a poll neither flickers nor loses the focus.

import { cell } from "./phrases.js";

const column = (run) => (run.kind === "tuning" ? `rate × ${run.factor}` : `seed ${run.seed}`);

// The tables: runs of the race, of each other number of workers, and of the tuning.
export function groups(state) {
  const found = new Map();
  for (const run of state.runs) {
    const name = run.kind === "scaling" ? `${run.workers} worker${run.workers === 1 ? "" : "s"}` : run.kind;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(run);
  }
  const rank = (name) => (name === "race" ? 0 : name === "tuning" ? 2 : 1);
  const first = ([a, runs], [b, others]) => rank(a) - rank(b) || runs[0].workers - others[0].workers;
  return new Map([...found].sort(first));
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A spec may wrap only after a bracket, bar or comma.
function breakable(text) {
  const parts = text.split(/(?<=[(|,])/);
  return parts.flatMap((part, index) => (index ? [element("wbr"), part] : [part]));
}

export class Table {
  constructor(table, choose) {
    this.table = table;
    this.choose = choose;
    this.shape = "";
    this.cells = new Map();
  }

  show(runs, styles, target, chosen) {
    const unique = (values) => [...new Set(values)];
    const entries = [...styles.keys()].filter((entry) => runs.some((run) => run.entry === entry));
    const sorted = [...runs].sort((a, b) => (a.factor ?? 0) - (b.factor ?? 0) || a.seed - b.seed);
    const columns = unique(sorted.map(column));
    const shape = JSON.stringify([entries, columns, [...styles.values()]]);
    if (shape !== this.shape) this.build(entries, columns, styles);
    this.shape = shape;
    for (const run of runs) this.fill(this.cells.get(`${run.entry}\n${column(run)}`), run, target, chosen);
  }

  build(entries, columns, styles) {
    this.cells.clear();
    const head = element("tr");
    head.append(...["", ...columns].map((text) => element("th", text)));
    const rows = entries.map((entry) => {
      const row = element("tr");
      const name = element("th");
      name.append(...breakable(entry));
      name.scope = "row";
      const swatch = element("span", null, "swatch");
      swatch.style.borderTopColor = styles.get(entry).color;
      swatch.style.borderTopStyle = { dash: "dashed", dot: "dotted" }[styles.get(entry).dash] ?? "solid";
      name.prepend(swatch);
      row.append(name, ...columns.map((text) => this.button(entry, text)));
      return row;
    });
    const top = element("thead");
    top.append(head);
    const body = element("tbody");
    body.append(...rows);
    this.table.replaceChildren(top, body);
  }

  button(entry, text) {
    const made = element("button", null, "cell");
    made.type = "button";
    made.append(element("b"), element("span"));
    made.addEventListener("click", () => this.choose(made.run));
    const around = element("td");
    around.append(made);
    this.cells.set(`${entry}\n${text}`, made);
    return around;
  }

  fill(button, run, target, chosen) {
    const [first, second, look] = cell(run, target);
    const [best, word] = button.children;
    if (best.textContent !== first) best.textContent = first;
    if (word.textContent !== second) word.textContent = second;
    word.className = look;
    button.run = run;
    button.disabled = run.id == null;
    button.title = run.reason ?? "";
    button.setAttribute("aria-pressed", String(run.id != null && run.id === chosen));
  }
}
