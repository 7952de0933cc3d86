// Numbers as text. Independent of the page.

export function duration(seconds) {
  if (seconds == null) return "";
  if (seconds < 1) return `${(1000 * seconds).toPrecision(3)} ms`;
  if (seconds < 60) return `${seconds.toPrecision(3)} s`;
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  const said = parts.slice(first, first + 2).filter(([number]) => number > 0);
  return said.map(([number, unit]) => `${number} ${unit}`).join(" ");
}

// An estimate, rounded to its accuracy.
export function roughly(seconds) {
  if (seconds < 90) return duration(Math.max(5, 5 * Math.round(seconds / 5)));
  return duration(60 * Math.round(seconds / 60));
}

export function value(number) {
  return number == null ? "–" : String(Number(number.toPrecision(4)));
}

export function count(number) {
  return number == null ? "?" : number.toLocaleString("en");
}

const STATUS_TEXTS = { interrupted: "stopped" };

// A cell of the table: the best value, the status or the time to the target, and the CSS class.
export function cell(run, target) {
  if (run.unread) return [value(run.best), "reading", "waiting"];
  if (run.excluded) return [value(run.best), "excluded", "excluded"];
  if (run.hit != null && ["finished", "running"].includes(run.status)) {
    return [value(run.best), `✓ ${duration(run.hit)}`, "finished"];
  }
  if (run.status === "finished") {
    return target == null ? [value(run.best), "finished", "finished"] : [value(run.best), "missed", "missed"];
  }
  if (run.status === "running" && run.steps) {
    const share = Math.min(99, Math.floor((100 * run.step) / run.steps));
    return [value(run.best), `running, ${share} %`, "running"];
  }
  return [value(run.best), STATUS_TEXTS[run.status] ?? run.status, run.status];
}
