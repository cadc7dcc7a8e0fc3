// The page of a plan.
const SPLITS = { batch: "by samples", filter: "by filters (output channels)", channel: "by input channels", domain: "by domain (space, depth, sequence)", replicate: "in full on every rank" };
const KINDS = { F: ["forward", "compute"], B: ["backward", "layer_exchange"], receive: ["receive", "halo"], send: ["send", "halo"], reduce: ["gradient sums", "gradient_exchange"], tie: ["tied gradients", "gradient_exchange"] };

const spentText = (breakdown, step) => Object.entries(D.categories).filter(([t]) => breakdown[t] > 0).map(([t, w]) => `${w}: ${seconds(breakdown[t])} (${percent(breakdown[t] / step)})`).join("\n");
function spentBar(breakdown, step, longest) {
  const parts = Object.keys(D.categories).map((t) => node("span", { style: `width:${100 * breakdown[t] / step}%;background:var(--${t})` }));
  return node("div", { class: "bar", style: `width:${Math.min(100, 100 * step / longest)}%`, tip: spentText(breakdown, step) }, ...parts);
}

// --- plans ---
let chosen = 0;
function ranking() {
  const best = D.plans[0];
  document.title = `${D.model} on ${D.devices}: Fourfold`;
  $("title").textContent = `${D.model} on ${D.devices} ${D.devices === 1 ? "device" : "devices"}, batch ${D.batch}`;
  const data = D.plans.find((p) => p.name === "data");
  const gain = best && data && data !== best && best.feasible ? ` Data parallelism would take ${seconds(data.step)}${data.feasible ? `, ${digits(data.step / best.step)} times as long` : " and does not fit"}.` : "";
  const words = best && best.feasible ? `Best: ${best.name} on ${best.mesh}, ${seconds(best.step)} a step, ${digits(best.samples)} samples/s.${gain}` : `Nothing fits. ${D.nearest}`;
  $("summary").textContent = `${words} On ${D.where}; ${D.plans.length} plans shown, found in ${digits(D.searched, 2)} s.`;
  const head = ["plan", "mesh", "step", "samples/s", "time spent on", "peak memory"];
  $("plans").tHead.replaceChildren(node("tr", {}, ...head.map((h, k) => node("th", { scope: "col", class: k === 2 || k === 3 ? "n" : null }, h))));
  const longest = Math.max(...D.plans.map((p) => Math.min(p.interval[1], 3 * D.plans[0].interval[1])));
  const most = Math.max(...D.plans.map((p) => Math.max(p.peak, 0)));
  $("plans").tBodies[0].replaceChildren(...D.plans.map((p, k) => {
    const name = node("button", { type: "button", class: "name", "aria-pressed": String(k === chosen), onclick: () => select(k) }, p.name);
    const [low, high] = p.interval.map((x) => Math.min(100, 100 * x / longest));
    const between = node("div", { class: "between", style: `left:${low}%;width:${high - low}%` });
    const room = Math.max(p.capacity, most > p.capacity ? most : 0);
    const full = node("div", { class: `room${p.feasible ? "" : " full"}`, tip: `${bytes(p.peak)} of ${bytes(p.capacity)} on the device with the highest peak` }, node("span", { style: `width:${Math.max(1, 100 * p.peak / room)}%` }));
    return node("tr", { class: k === chosen ? "chosen" : null },
      node("td", {}, name), node("td", {}, p.mesh), node("td", { class: "n" }, seconds(p.step)), node("td", { class: "n" }, digits(p.samples)),
      node("td", {}, node("div", { class: "track" }, spentBar(p.breakdown, p.step, longest), between)),
      node("td", {}, full, node("span", { class: p.feasible ? "hint" : "hint over" }, p.feasible ? bytes(p.peak) : `${bytes(p.peak)}: does not fit`)));
  }));
  legend($("legend"), Object.entries(D.categories).map(([t, w]) => [`var(--${t})`, w]));
  const lines = [...D.notes, ...D.refused.map((r) => `${r.strategy}: ${r.reason}`)];
  $("refused").replaceChildren(...(lines.length ? [node("details", {}, node("summary", {}, `${D.refused.length} strategies are not possible; notes`), node("ul", {}, ...lines.map((l) => node("li", {}, l))))] : []));
}
function select(k) {
  chosen = k;
  ranking();
  plan(D.plans[k]);
  $("plans").querySelectorAll("button.name")[k].focus({ preventScroll: true });
}

// --- one plan ---
function plan(p) {
  $("plan-head").textContent = `${p.name} on ${p.mesh}`;
  const facts = [p.options, `${seconds(p.interval[0])} to ${seconds(p.interval[1])} a step`, `${bytes(p.peak)} of ${bytes(p.capacity)}`, ...p.notes];
  $("plan-facts").textContent = facts.filter(Boolean).join("; ");
  layers(p);
  memory(p);
  view = [0, Math.max(p.step, ...p.timeline.events.map((e) => e[4]))];
  timeline(p);
  $("findings").replaceChildren(...(p.findings.length ? p.findings : ["no limit or bottleneck above its threshold"]).map((f) => node("li", {}, f)));
}

function splitColour(label) {
  if (!label) return "var(--none)";
  const kind = label.split(":")[0];
  return `var(--${kind in SPLITS ? kind : "none"})`;
}
function layers(p) {
  const wide = Math.max(7, Math.min(60, 960 / p.layers.length)), high = 20, axes = p.axes.length ? p.axes : [];
  const left = 70, width = left + wide * p.layers.length + 4, tall = 70;
  const top = axes.length * high, most = Math.max(...p.layers.map((l) => Math.max(l.compute, l.exchange)), 1e-12);
  const stages = new Set(p.layers.map((l) => l.stage)).size > 1;
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${top + tall + 26}`, style: `width:${width}px;max-width:none`, role: "img", "aria-label": "How every layer is split and what it costs" });
  axes.forEach((axis, a) => svg.append(node("svg:text", { x: 0, y: a * high + 14 }, axis)));
  svg.append(node("svg:text", { x: 0, y: top + 18 }, "compute"), node("svg:text", { x: 0, y: top + tall - 6 }, "exchange"));
  p.layers.forEach((l, k) => {
    const x = left + k * wide, words = [stages ? `stage ${l.stage}` : "", axes.map((axis, a) => `${axis}: ${l.split[a] || "whole"}`).join(", "), `computing ${seconds(l.compute)}`, l.exchange ? `exchanging ${seconds(l.exchange)}` : "", ...l.what].filter(Boolean).join("\n");
    const group = node("svg:g", { tip: `${l.name}\n${words}`, tabindex: 0, "aria-label": `${l.name}: ${words}` });
    axes.forEach((_, a) => group.append(node("svg:rect", { x, y: a * high, width: wide - 1, height: high - 2, style: `fill:${splitColour(l.split[a])}` })));
    const up = 32 * l.compute / most, down = 32 * l.exchange / most, middle = top + tall / 2;
    group.append(node("svg:rect", { x, y: top, width: wide - 1, height: tall, fill: "transparent" }));
    group.append(node("svg:rect", { x, y: middle - up, width: wide - 1, height: up, style: "fill:var(--compute)" }));
    group.append(node("svg:rect", { x, y: middle + 1, width: wide - 1, height: down, style: "fill:var(--layer_exchange)" }));
    if (k && p.layers[k - 1].stage !== l.stage) svg.append(node("svg:line", { x1: x - .5, x2: x - .5, y1: 0, y2: top + tall, style: "stroke:var(--ink);stroke-dasharray:3 2" }), node("svg:text", { x: x + 3, y: top + tall + 16 }, `stage ${l.stage}`));
    svg.append(group);
  });
  $("layers").replaceChildren(svg);
  $("layers-hint").textContent = `${p.layers.length} layers from left to right; above, how each is split over the axes of the mesh; below, seconds of a micro-batch's forward and backward on one rank, compute upwards, communication downwards.`;
  const used = [...new Set(p.layers.flatMap((l) => l.split).filter(Boolean).map((s) => s.split(":")[0]))];
  legend($("split-legend"), used.map((s) => [`var(--${s in SPLITS ? s : "none"})`, SPLITS[s] || s]));
}

function memory(p) {
  const names = [...new Set(p.memory.flatMap((m) => Object.keys(m.parts)))];
  const most = Math.max(p.capacity, ...p.memory.map((m) => m.bytes));
  const scale = most > 6 * Math.max(...p.memory.map((m) => m.bytes)) ? 1.4 * Math.max(...p.memory.map((m) => m.bytes)) : most;
  const rows = p.memory.slice(0, 16).map((m) => {
    const parts = names.map((n, k) => node("span", { style: `width:${100 * (m.parts[n] || 0) / scale}%;background:var(--c${k % 10})` }));
    const text = [`peak at ${m.when}`, ...Object.entries(m.parts).map(([n, b]) => `${n}: ${bytes(b)}`)].join("\n");
    const limit = p.capacity <= scale ? [node("div", { class: "limit", style: `left:calc(${100 * p.capacity / scale}% - 2px)` })] : [];
    return node("div", { class: "row" }, node("span", {}, `rank${/[-,]/.test(m.ranks) ? "s" : ""} ${m.ranks}`), node("div", { class: "room", tip: text, tabindex: 0, "aria-label": text }, ...parts, ...limit), node("span", { class: m.bytes > p.capacity ? "over" : "hint" }, `${bytes(m.bytes)} of ${bytes(p.capacity)}`));
  });
  $("memory").replaceChildren(...rows, ...(p.memory.length > 16 ? [node("p", { class: "hint" }, `and ${p.memory.length - 16} kinds of ranks more`)] : []));
  legend($("memory-legend"), names.map((n, k) => [`var(--c${k % 10})`, n]));
}

// --- the timeline, with a view on a part of it ---
let view = [0, 1];
function timeline(p) {
  const place = $("timeline"), lanes = p.timeline.lanes.length, high = Math.max(14, Math.min(30, 300 / lanes)), left = 74;
  const width = Math.max(320, place.clientWidth - 2), body = lanes * high, [from, to] = view;
  const at = (t) => left + (width - left - 8) * (t - from) / (to - from);
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${body + 26}`, height: body + 26 });
  const clip = node("svg:clipPath", { id: "inside" }, node("svg:rect", { x: left, y: 0, width: width - left - 8, height: body }));
  svg.append(node("svg:defs", {}, clip));
  p.timeline.lanes.forEach((name, k) => svg.append(node("svg:text", { x: 4, y: k * high + high / 2 + 4 }, `rank ${name}`)));
  const inside = node("svg:g", { "clip-path": "url(#inside)" });
  for (const [lane, kind, action, start, end] of p.timeline.events) {
    if (end < from || start > to) continue;
    const [word, colour] = KINDS[kind] || [kind, "other"];
    const w = Math.max(.6, at(end) - at(start));
    inside.append(node("svg:rect", { x: at(start), y: lane * high + 1, width: w, height: high - 2, rx: 1, style: `fill:var(--${colour});stroke:var(--card);stroke-width:${w > 4 ? .6 : 0}`, tip: `${action}: ${word}\n${seconds(start)} to ${seconds(end)}, ${seconds(end - start)}` }));
    if (w > 26 && high > 15) inside.append(node("svg:text", { x: at(start) + 4, y: lane * high + high / 2 + 4, style: "fill:var(--card);pointer-events:none" }, action.length * 7 < w ? action : ""));
  }
  svg.append(inside);
  for (let k = 0; k <= 5; k++) {
    const t = from + (to - from) * k / 5;
    svg.append(node("svg:text", { x: at(t), y: body + 18, "text-anchor": k === 5 ? "end" : k ? "middle" : "start" }, seconds(t)));
  }
  place.replaceChildren(svg);
  place.setAttribute("aria-label", `Timeline of one step from ${seconds(from)} to ${seconds(to)}, ${lanes} lanes`);
  const kinds = [...new Set(p.timeline.events.map((e) => e[1]))].map((k) => KINDS[k] || [k, "other"]);
  legend($("timeline-legend"), [...new Map(kinds.map(([w, c]) => [c + w, [`var(--${c})`, w]])).values()]);
  if (p.timeline.cut) $("timeline-legend").append(node("li", {}, `the first ${p.timeline.events.length} events only`));
}
function zoom(factor, shift = 0, centre = .5) {
  const p = D.plans[chosen], whole = Math.max(p.step, ...p.timeline.events.map((e) => e[4]));
  const span = Math.min(whole, Math.max(whole / 2000, (view[1] - view[0]) * factor));
  const middle = view[0] + (view[1] - view[0]) * centre;
  const start = Math.max(0, Math.min(whole - span, middle - span * centre + shift * span));
  view = [start, start + span];
  timeline(p);
}
function timelineControls() {
  const keys = { "+": [.6], "=": [.6], "-": [1 / .6], ArrowLeft: [1, -.25], ArrowRight: [1, .25], Home: [1e9] };
  $("zoom-in").onclick = () => zoom(.6);
  $("zoom-out").onclick = () => zoom(1 / .6);
  $("zoom-left").onclick = () => zoom(1, -.25);
  $("zoom-right").onclick = () => zoom(1, .25);
  $("zoom-all").onclick = () => zoom(1e9);
  const place = $("timeline");
  place.addEventListener("keydown", (e) => { if (keys[e.key]) { e.preventDefault(); zoom(...keys[e.key]); } });
  place.addEventListener("wheel", (e) => { e.preventDefault(); const box = place.getBoundingClientRect(); zoom(e.deltaY > 0 ? 1.25 : .8, 0, (e.clientX - box.left) / box.width); }, { passive: false });
  let held = null;
  place.addEventListener("pointerdown", (e) => { held = e.clientX; });
  addEventListener("pointermove", (e) => { if (held !== null && Math.abs(e.clientX - held) > 3) { zoom(1, (held - e.clientX) / place.clientWidth); held = e.clientX; } });
  addEventListener("pointerup", () => { held = null; });
  addEventListener("resize", () => timeline(D.plans[chosen]));
}

// --- what if ---
function whatif() {
  if (!D.grid) { $("whatif").hidden = true; return; }
  const names = { batch: "batch", links: "links", devices: "devices" };
  const words = { batch: (v) => `${v}`, links: (v) => v === 1 ? "as they are" : v > 1 ? `${v} times as fast` : `${digits(1 / v)} times as slow`, devices: (v) => `${v}` };
  const now = { ...D.grid.asked };
  $("controls").replaceChildren(...Object.entries(names).map(([key, name]) => {
    const pick = node("select", { id: `if-${key}`, onchange: (e) => { now[key] = Number(e.target.value); answer(now); } }, ...D.grid[key].map((v) => node("option", { value: v, selected: v === now[key] }, words[key](v))));
    return node("label", {}, name, pick);
  }));
  answer(now);
}
function answer(now) {
  const cell = D.grid.cells[`${now.batch}|${now.links}|${now.devices}`], base = D.grid.cells[`${D.grid.asked.batch}|1|${D.grid.asked.devices}`];
  if (!cell || cell.reason) {
    $("answer").replaceChildren(node("p", { class: cell ? "over" : "hint" }, cell ? `Nothing fits: ${cell.reason}` : "Not searched: the time limit was reached first. Give --what-if more seconds, or run plan for it."));
    return;
  }
  const ratio = base && !base.reason ? cell.samples / base.samples : null;
  const fact = (value, words) => node("div", {}, node("b", {}, value), node("span", {}, words));
  $("answer").replaceChildren(
    node("div", { class: "facts" }, fact(cell.name, `on ${cell.mesh}`), fact(seconds(cell.step), "a step"), fact(digits(cell.samples), "samples/s"), ...(ratio ? [fact(`${digits(ratio)} x`, "as many samples/s as planned for")] : []), fact(bytes(cell.peak), `of ${bytes(cell.capacity)}`)),
    spentBar(cell.breakdown, cell.step, cell.step),
    ...(base && cell.measured < .9 * base.measured ? [node("p", { class: "hint" }, `${percent(cell.measured)} of its compute time comes from measured kernels (${percent(base.measured)} in the plan above); the rest is estimated, and mostly too low.`)] : []));
}

// --- scaling ---
const hidden = new Set();
function scaling() {
  const names = [...new Set(D.scaling.filter((r) => r.samples).map((r) => r.strategy))];
  if (!names.length || new Set(D.scaling.map((r) => r.devices)).size < 2) { $("scaling").hidden = true; return; }
  const colour = (name) => `var(--c${names.indexOf(name) % 10})`;
  $("curves").replaceChildren(...names.map((name) => node("button", { type: "button", "aria-pressed": String(!hidden.has(name)), onclick: () => { if (!hidden.delete(name)) hidden.add(name); scaling(); } }, node("i", { style: `display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:6px;background:${colour(name)}` }), name)));
  const xs = [...new Set(D.scaling.map((r) => r.devices))].sort((a, b) => a - b);
  const all = D.scaling.filter((r) => r.samples).map((r) => r.samples), low = Math.log2(Math.min(...all)), high = Math.log2(Math.max(...all) * 1.15);
  const ticks = [], step = high - low > 3 ? Math.ceil((high - low) / 6) : (high - low) / 4;
  for (let k = high - low > 3 ? Math.ceil(low) : low; k <= high; k += step) ticks.push(2 ** k);
  const words = (r) => `${r.strategy} on ${r.devices}\n${digits(r.samples)} samples/s, efficiency ${percent(r.efficiency)}${r.feasible ? "" : "\ndoes not fit"}`;
  const curves = names.filter((name) => !hidden.has(name)).map((name) => {
    const mine = D.scaling.filter((r) => r.samples && r.strategy === name).sort((a, b) => a.devices - b.devices);
    return { name, colour: colour(name), points: mine.map((r) => ({ x: r.devices, y: r.samples, tip: words(r), hollow: !r.feasible })) };
  });
  const svg = lineChart({ label: "Samples per second over devices, both on logarithmic axes", curves, xs, ticks, range: [2 ** low, 2 ** high], logarithmic: true, width: Math.max(320, $("chart").clientWidth || 900), tall: 320 });
  $("chart").replaceChildren(svg, node("p", { class: "hint" }, "Samples per second over devices, both logarithmic; hollow points do not fit the devices' memory."));
}

// --- runs ---
function runs() {
  if (!D.runs.length) { $("runs").hidden = true; return; }
  const most = Math.max(...D.runs.flatMap((r) => [r.predicted || 0, r.measured || 0]));
  const bar = (value, colour, words) => node("div", { class: "row" }, node("span", {}, words), node("div", { class: "room" }, node("span", { style: `width:${100 * (value || 0) / most}%;background:${colour}` })), node("span", {}, value ? seconds(value) : "not predicted"));
  $("measured").replaceChildren(...D.runs.flatMap((r) => {
    const off = r.predicted && r.measured ? `prediction is ${r.predicted < r.measured ? "-" : "+"}${percent(Math.abs(r.predicted - r.measured) / r.measured)} from the measurement` : "";
    const peak = r.predicted_peak && r.measured_peak ? `peak ${bytes(r.measured_peak)}, predicted ${bytes(r.predicted_peak)}` : "";
    const same = r.equal === true ? "equal to one device" : r.equal === false ? "NOT equal to one device" : "";
    const last = r.losses.length ? `loss ${digits(r.losses[0])} to ${digits(r.losses.at(-1))} in ${r.losses.length} steps` : "";
    return [node("h3", {}, r.strategy), node("p", { class: "hint" }, [off, peak, same, last].filter(Boolean).join("; ")), bar(r.predicted, "var(--c4)", "predicted"), bar(r.measured, "var(--c2)", "measured")];
  }));
}

ranking();
if (D.plans.length) plan(D.plans[0]); else $("plan").hidden = true;
timelineControls();
whatif();
scaling();
runs();
