"use strict";
// Draws /status.json. Text only ever enters the page through textContent.

const SECONDS = 2;
const COLOURS = ["#0b6bcb", "#e0862b", "#2b9a66", "#8e4ec6", "#c2344b", "#6b7280"];
const at = (id) => document.getElementById(id);
let heardAt = null;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const has = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => (has(value) ? value.toFixed(digits) : "–");
const count = (value) => (has(value) ? Math.round(value).toLocaleString("en-US") : "–");

function short(value) {
  if (!has(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  }
  return String(Number(value.toPrecision(3)));
}

function bytes(value) {
  if (!has(value) || value <= 0) return "–";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return (value / 2 ** (10 * power)).toFixed(power > 2 ? 2 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}

function duration(seconds) {
  if (!has(seconds)) return "–";
  if (seconds < 90) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 90) return minutes + " min";
  return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

function tile(name, value, note) {
  const box = element("div");
  box.append(element("span", name, "muted"), element("b", value));
  if (note) box.append(element("span", note, "muted"));
  return box;
}

function row(cells) {
  const made = element("tr");
  for (const [text, className] of cells) made.append(element("td", text, className));
  return made;
}

function chart(svg, xs, ys, positions) {
  const width = svg.clientWidth || 360, height = svg.clientHeight || 150;
  const left = 46, right = 8, top = 8, bottom = 20;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const draw = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  const points = xs.map((x, i) => [x, ys[i], positions[i]]).filter(([x, y]) => has(x) && has(y));
  if (points.length < 2) {
    draw("text", { x: left, y: height / 2 }, "not enough points yet");
    return;
  }
  const values = points.map((p) => p[1]);
  let low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  low = low >= 0 && low - margin < 0 ? 0 : low - margin;
  high += margin;
  const ticks = roundTicks(low, high);
  const first = points[0][0], last = points[points.length - 1][0];
  const x = (value) => left + ((value - first) / (last - first || 1)) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  for (const value of ticks) {
    draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) });
    draw("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, short(value));
  }
  draw("text", { x: left, y: height - 5 }, duration(first));
  draw("text", { x: width - right, y: height - 5, "text-anchor": "end" }, duration(last));
  // After a restart the position goes back: a new line begins.
  const lines = [[]];
  points.forEach((p, i) => {
    if (i > 0 && p[2] < points[i - 1][2]) lines.push([]);
    lines[lines.length - 1].push(`${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`);
  });
  for (const line of lines) draw("polyline", { class: "curve", points: line.join(" ") });
  svg.setAttribute("aria-label", `from ${short(values[0])} to ${short(values[values.length - 1])}`);
}

// Multiples of 1, 2, 2.5 or 5 times a power of ten that lie between two numbers: two to six of them.
function roundTicks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5].find((factor) => factor * power >= rough) || 10);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

const words = (value) => value.replaceAll("_", " ");

function show(status) {
  const progress = status.progress || {}, checkpoint = status.checkpoint, facts = status.facts;
  document.title = `${status.name}: ${words(status.phase)}`;
  at("name").textContent = status.name;
  const failed = status.over && status.outcome.exit_code !== 0;
  const phase = at("phase");
  phase.textContent = status.over ? (failed ? `over: code ${status.outcome.exit_code}` : "done") : words(status.phase);
  phase.className = "badge " + (failed || status.phase === "aborting" ? "bad" : status.phase === "running" || status.over ? "good" : "warn");
  at("facts").textContent = [
    status.mode, `attempt ${status.attempt}`, status.num_restarts === 1 ? "1 restart" : `${status.num_restarts} restarts`,
    `for ${duration(status.elapsed_seconds)}`, facts.version ? `paddlewheel ${facts.version}` : "",
  ].filter(Boolean).join(" · ");

  at("outcome").hidden = !failed;
  at("cause").textContent = status.outcome.cause;
  at("detail").textContent = status.outcome.detail;

  const share = progress.total_rows ? Math.min(1, progress.rows / progress.total_rows) : 0;
  at("bar").style.width = (100 * share).toFixed(2) + "%";
  if (status.progress) {
    at("progress").textContent = `${count(progress.rows)} of ${count(progress.total_rows)} rows (${(100 * share).toFixed(1)} %), ` +
      (progress.day ? `day ${progress.day}, ` : "epoch ") + `${(progress.epoch ?? 0) + 1}` + (progress.epochs ? ` of ${progress.epochs}` : "") + `, step ${count(progress.step)}` +
      (status.over ? "" : `, ${duration(progress.seconds_left)} left`);
  }

  const there = status.members.filter((member) => !["lost", "absent"].includes(member.state)).length;
  const evaluation = (status.result && status.result.eval) || {};
  at("tiles").replaceChildren(
    tile("rows/s", short(progress.rows_per_second)),
    tile("loss", fixed(progress.loss, 4)),
    tile("AUC", fixed(progress.auc, 4), has(evaluation.auc) ? `evaluation ${evaluation.auc.toFixed(4)}` : "recent rows"),
    tile("roles", `${there}/${status.members.length}`, there < status.members.length ? "not all there" : "all there"),
    tile("checkpoint at step", checkpoint.step < 0 ? "none" : count(checkpoint.step),
      checkpoint.step < 0 ? "" : `${duration(checkpoint.age_seconds)} old`),
    tile("skipped steps", count(progress.bad_steps ?? 0), "loss not finite"),
  );

  const curves = status.curves;
  chart(at("chart-loss"), curves.seconds, curves.loss, curves.rows);
  chart(at("chart-auc"), curves.seconds, curves.auc, curves.rows);
  chart(at("chart-rate"), curves.seconds, curves.rows_per_second, curves.rows);

  at("members").replaceChildren(...status.members.map((member) => row([
    [`${member.role} ${member.rank}`],
    [member.state, ["lost", "absent"].includes(member.state) ? "bad" : ["ready", "running", "training"].includes(member.state) ? "good" : ""],
    [member.host ? `${member.host}:${member.port}` : "–", "muted"],
    [bytes(member.worker_memory_bytes) + (has(member.seconds_to_limit) ? `, full in ${duration(member.seconds_to_limit)}` : ""), "n"],
    [["lost", "absent"].includes(member.state) ? "–" : duration(member.heartbeat_age_seconds), "n"],
  ])));

  const phases = Object.entries(progress.phase_seconds || {}).filter(([, seconds]) => has(seconds));
  const whole = phases.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  at("phases").replaceChildren(...phases.map(([, seconds], i) => {
    const part = element("div");
    part.style.width = (100 * seconds) / whole + "%";
    part.style.background = COLOURS[i % COLOURS.length];
    return part;
  }));
  at("phases-legend").replaceChildren(...phases.map(([name, seconds], i) => {
    const item = element("span"), mark = element("i");
    mark.style.background = COLOURS[i % COLOURS.length];
    item.append(mark, `${name} ${((100 * seconds) / whole).toFixed(0)} %`);
    return item;
  }));

  const saved = (status.result && status.result.keys) || {};
  at("tables").replaceChildren(...Object.entries(facts.tables || {}).map(([name, table]) => {
    const now = (progress.tables || {})[name] || {}, servers = now.keys || [];
    const keys = servers.length ? servers.reduce((sum, each) => sum + each, 0) : null;
    return row([
      [name], [count(table.width), "n"], [(table.optimizer && table.optimizer.rule) || "–"],
      [count(saved[name] ?? keys), "n"], [keys === null ? "–" : bytes(now.bytes), "n"],
      [count(now.new), "n"], [count(now.evicted), "n"],
    ]);
  }));
  at("checkpoint").textContent = checkpoint.step < 0 ? "none committed yet" :
    `step ${count(checkpoint.step)}, ${duration(checkpoint.age_seconds)} ago, took ${duration(checkpoint.last_seconds)}; ` +
    `${checkpoint.num_committed} committed, ${checkpoint.num_failed} failed. ${checkpoint.path}`;

  at("entries").replaceChildren(...status.entries.slice().reverse().map((entry) => {
    const item = element("li", null, entry.level === "error" ? "bad" : entry.level === "warning" ? "warn" : "");
    item.append(element("time", new Date(1000 * entry.time_seconds).toISOString().slice(11, 19)), entry.text);
    return item;
  }));
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    heardAt = Date.now();
    document.body.classList.remove("stale");
    at("stale").hidden = true;
  } catch (error) {
    document.body.classList.add("stale");
    at("stale").hidden = false;
    at("stale").textContent = heardAt === null ? "the coordinator does not answer" :
      `the coordinator has not answered for ${duration((Date.now() - heardAt) / 1000)} (it ends with its job)`;
  }
  setTimeout(refresh, 1000 * SECONDS);
}

refresh();
