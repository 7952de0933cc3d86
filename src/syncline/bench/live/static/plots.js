// All plots. Plotly.react updates a plot in place; the zoom stays until the axis changes.

import { duration } from "./phrases.js";

const LIGHT = {
  ink: "#1a2027", grid: "#e3e7ec", soft: "#5b6672",
  lines: ["#0b62a4", "#c2410c", "#17703f", "#7a3fa0", "#a8861a", "#b0285f", "#0f7f86", "#5b6672"],
  heat: [[0, "#eef2f6"], [0.35, "#f7c98b"], [0.7, "#df6b34"], [1, "#8e1414"]],
};
const DARK = {
  ink: "#e7ebf0", grid: "#2b343e", soft: "#9daab7",
  lines: ["#6cb6f5", "#f79a5b", "#62cf94", "#c79bf0", "#e5c95c", "#f58fb8", "#5fd0d6", "#b5c0cb"],
  heat: [[0, "#20272f"], [0.35, "#6b3d1c"], [0.7, "#dd7a2f"], [1, "#ffe6b8"]],
};
const DASHES = ["solid", "dash", "dot"];
const SETTINGS = { displayModeBar: false, responsive: true };

export const AXES = { elapsed: "time", epochs: "epochs", bytes: "bytes" };
const UNITS = { elapsed: "s", epochs: "epochs", bytes: "B" };
const AXIS_TITLES = { elapsed: "seconds since the start", epochs: "epochs", bytes: "bytes handed over by rank 0" };

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 640px)");
const theme = () => (dark.matches ? DARK : LIGHT);

export function onThemeChange(act) {
  dark.addEventListener("change", act);
  narrow.addEventListener("change", act);
}

// A colour for each entry, with another dash when the colours repeat.
export function lineStyles(entries) {
  const { lines } = theme();
  const style = (index) => ({ color: lines[index % lines.length], dash: DASHES[Math.floor(index / lines.length) % 3] });
  return new Map(entries.map((entry, index) => [entry, style(index)]));
}

function axis(title, more = {}) {
  const { ink, grid, soft } = theme();
  return {
    title: { text: title, font: { color: soft, size: 12 }, standoff: 8 },
    color: ink, gridcolor: grid, zeroline: false, automargin: true, tickfont: { size: 11 },
    ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)", ...more,
  };
}

function layout(height, revision, more) {
  return {
    height, uirevision: revision, showlegend: false,
    margin: { l: 48, r: 14, t: 10, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: theme().ink, family: "system-ui, sans-serif" },
    hovermode: "closest", dragmode: narrow.matches ? false : "zoom",
    hoverlabel: { font: { family: "system-ui, sans-serif" } },
    ...more,
  };
}

const si = { tickformat: "~s" };

export function drawCurves(element, runs, curves, along, state, styles, chosen) {
  const traces = [];
  for (const run of runs) {
    const curve = curves.get(run.id);
    if (!curve || !curve.metric.length) continue;
    const style = styles.get(run.entry);
    const strong = run.id === chosen;
    traces.push({
      type: "scatter", mode: curve.metric.length > 60 ? "lines" : "lines+markers",
      x: curve[along], y: curve.metric,
      line: { color: style.color, dash: style.dash, width: strong ? 3 : 1.6 },
      marker: { color: style.color, size: strong ? 6 : 4 }, opacity: strong || chosen == null ? 1 : 0.75,
      name: run.seed == null ? run.entry : `${run.entry}, seed ${run.seed}`,
      hovertemplate: `%{y:.4g}<br>%{x:.4~s} ${UNITS[along]}<extra>%{fullData.name}</extra>`,
    });
  }
  const values = traces.flatMap((trace) => trace.y).filter((y) => y != null);
  const positive = values.length > 0 && values.every((y) => y > 0);
  const log = !state.higher && positive && Math.max(...values) > 100 * Math.min(...values);
  const target = state.target;
  const soft = theme().soft;
  const shapes = target == null ? [] : [{
    type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: soft, dash: "dash", width: 1.2 },
  }];
  const notes = target == null ? [] : [{
    xref: "paper", x: 0, xanchor: "left", y: log ? Math.log10(target) : target, yanchor: "bottom", showarrow: false,
    text: `target ${target}`, font: { color: soft, size: 11 },
  }];
  const x = axis(AXIS_TITLES[along], { rangemode: "tozero", ...(along === "bytes" ? si : {}) });
  const y = axis(`validation ${state.metric}`, log ? { type: "log" } : {});
  const more = { xaxis: x, yaxis: y, shapes, annotations: notes };
  // An empty trace includes the line of the target in the range of the axis.
  const unseen = { mode: "markers", marker: { opacity: 0 }, hoverinfo: "skip" };
  if (target != null) traces.push({ type: "scatter", x: [0], y: [target], ...unseen });
  Plotly.react(element, traces, layout(narrow.matches ? 300 : 380, along, more), SETTINGS);
}

const rankName = (row, heat) => {
  const first = row * heat.together;
  const last = Math.min(heat.ranks, first + heat.together) - 1;
  return first === last ? String(first) : `${first}–${last}`;
};

// Equal ranks are pale: the colour shows differences, not absolute values.
function hottest(rows) {
  const all = rows.flat().filter((seconds) => seconds != null).sort((a, b) => a - b);
  return Math.max(1e-9, all.at(-1) ?? 0, 2.5 * (all[all.length >> 1] ?? 0));
}

export function drawHeat(element, heat, words) {
  const names = heat.rows.map((_, row) => rankName(row, heat));
  const text = heat.rows.map((row) => row.map((seconds) => duration(seconds)));
  const trace = {
    type: "heatmap", x: heat.edges, y: heat.rows.map((_, row) => row), z: heat.rows, text,
    zauto: false, zmin: 0, zmax: hottest(heat.rows),
    colorscale: theme().heat, hovertemplate: "rank %{y}<br>up to step %{x}<br>%{text} a step<extra></extra>",
    colorbar: {
      title: { text: narrow.matches ? "" : `${words}, s`, side: "right", font: { size: 11 } },
      thickness: 10, outlinewidth: 0, tickfont: { size: 10 }, tickformat: "~s",
    },
  };
  const height = Math.max(150, Math.min(460, 26 * heat.rows.length + 70));
  const every = Math.ceil(names.length / 16);
  const ticks = names.map((_, row) => row).filter((row) => row % every === 0);
  const more = {
    xaxis: axis("steps", { showgrid: false, ...si }),
    yaxis: axis("rank", {
      showgrid: false, autorange: "reversed", tickvals: ticks, ticktext: ticks.map((row) => names[row]),
    }),
  };
  Plotly.react(element, [trace], layout(height, `${heat.kind} ${heat.ranks}`, more), SETTINGS);
}

export function drawSpeed(element, speeds, column, format, revision) {
  const trace = {
    type: "scatter", mode: speeds.step.length > 60 ? "lines" : "lines+markers", x: speeds.step, y: speeds[column],
    line: { color: theme().lines[0], width: 1.6 }, marker: { size: 4 },
    customdata: speeds.elapsed.map((seconds) => duration(seconds)),
    hovertemplate: `%{y:${format}}<br>step %{x}, after %{customdata}<extra></extra>`,
  };
  const y = axis("", { tickformat: format, rangemode: "tozero" });
  const more = { xaxis: axis("steps", { ...si, rangemode: "tozero" }), yaxis: y };
  Plotly.react(element, [trace], layout(190, revision, more), SETTINGS);
}
