// The page's state, and how keys, filters and views change it. Everything shown is made from the state by `render`.

const record = JSON.parse(document.getElementById("record").textContent);
for (const kind of record.kinds) KINDS[kind.key] = kind;
const TABS = [["changes", "Changes"], ["graph", "Graph"], ["left", "Left alone"], ["memory", "Memory"], ["symbols", "Symbols"], ["figures", "Figures"]];
const main = document.getElementById("main"), search = document.getElementById("search");
const state = {graph: null, step: 0, tab: "changes", kinds: new Set(Object.keys(KINDS)), module: "", query: "", changedOnly: false, selected: null, filters: false};
let table = null, detail = null, rows = [];

const graph = () => record.graphs[state.graph];
const step = () => graph().steps[state.step];

function rowsOf(current, only) {
  // Rows {before, after, kind, details} side by side, in the order of "before"; what was added stands after what precedes it.
  const result = [], info = new Map();
  const at = (side, row) => `${side}${row}`;
  for (const one of only ? only.changes : []) {
    const key = one.before !== null ? at("b", one.before) : at("a", one.after);
    if (!info.has(key)) info.set(key, []);
    info.get(key).push(one);
  }
  const make = (before, after) => {
    const changes = info.get(before !== null ? at("b", before) : at("a", after)) || [];
    return {before, after, changes, kind: changes.length ? changes[0].kind : ""};
  };
  const old = current.stages[only ? only.before : 0].nodes;
  if (!only) return old.map((_, row) => make(row, row));
  const pair = new Map(only.pairs), back = new Map(only.pairs.map(([b, a]) => [a, b]));
  const added = new Map();  // a row of "after" to the added rows that follow it; -1 for those at the top
  let previous = -1;
  current.stages[only.after].nodes.forEach((_, row) => {
    if (back.has(row)) previous = row;
    else { if (!added.has(previous)) added.set(previous, []); added.get(previous).push(row); }
  });
  const append = (after) => (added.get(after) || []).forEach((row) => result.push(make(null, row)));
  append(-1);
  old.forEach((_, row) => {
    const after = pair.has(row) ? pair.get(row) : null;
    result.push(make(row, after));
    if (after !== null) append(after);
  });
  return result;
}

const cache = new Map();
function allRows() {
  const key = `${state.graph} ${state.step}`;
  if (!cache.has(key)) cache.set(key, rowsOf(graph(), step()));
  return cache.get(key);
}

function nodeOf(row, side) {
  const current = graph(), only = step(), index = row[side];
  if (index === null || index === undefined) return null;
  return current.stages[only ? only[side] : 0].nodes[index];
}

function matches(text) {
  return state.query.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

function visible(row) {
  const node = nodeOf(row, "before") || nodeOf(row, "after");
  if (state.changedOnly && !row.changes.length) return false;
  if (row.changes.length && !row.changes.some((one) => state.kinds.has(one.kind))) return false;
  if (state.module && node.module !== state.module && !(node.module || "").startsWith(`${state.module}.`)) return false;
  if (!state.query) return true;
  const other = nodeOf(row, "after") || node;
  return matches([node.name, other.name, node.call, other.call, node.type, node.module, node.source, node.code, node.region].join(" "));
}

function cellText(node) {
  if (!node) return "";
  const depth = "  ".repeat(node.region.split("/").length - 1);
  // Dynamo's name of an input is its whole path once more; the call says it as the program does.
  const assigned = node.call.startsWith("return") || node.call.startsWith("input ") ? node.call : `${node.name} = ${node.call}`;
  return `${depth}${node.region.startsWith("prologue") ? "↑ " : ""}${assigned}${node.type ? `   # ${node.type}` : ""}`;
}

function draw(row) {
  const cells = ["before", "after"].map((side) => {
    const text = cellText(nodeOf(row, side));
    return el("div", {class: "cell", title: text.trim()}, text);
  });
  if (row.kind) cells[row.before === null ? 1 : 0].prepend(el("span", {class: `kind ${row.kind}`}, `${KINDS[row.kind].mark} `));
  return cells;
}

function showList() {
  rows = allRows().filter(visible);
  table.show(rows, state.selected ? rows.indexOf(state.selected) : -1);
  document.getElementById("count").textContent = `${rows.length} of ${allRows().length} rows`;
}

function goTo(place) {
  // place: {before: row} or {after: row} of the current step, or a change, which has both.
  const has = (value) => value !== null && value !== undefined;
  const found = allRows().find((row) => has(place.before) ? row.before === place.before : row.after === place.after);
  if (!found) return;
  state.selected = found;
  if (!visible(found)) { state.changedOnly = false; state.module = ""; state.query = search.value = ""; state.kinds = new Set(Object.keys(KINDS)); }
  if (state.tab !== "graph") { state.tab = "graph"; render(); } else { renderSide(); showList(); showDetail(); }
  table.element.focus();
}

function nextChange(direction) {
  if (state.tab !== "graph") return;
  for (let index = table.selected + direction; index >= 0 && index < rows.length; index += direction) {
    if (rows[index].changes.length) return table.select(index, true);
  }
}

function facts(node, side) {
  if (!node) return el("div", {class: "faint"}, side === "before" ? "not there before" : "not there after");
  const stage = graph().stages[step() ? step()[side] : 0].nodes;
  const links = (list) => (list || []).slice(0, 40).map((row) => el("button", {class: "mono", onclick: () => goTo({[side]: row})}, stage[row].name));
  const entries = [["call", el("code", {}, node.call)], ["type", node.type], ["module", node.module && `${node.module}${node.class ? ` (${node.class})` : ""}`],
    ["line", node.source && el("span", {title: node.file}, node.source)], ["code", node.code && el("code", {}, node.code)], ["in", node.region],
    ["layer", node.layer === undefined ? "" : String(node.layer)], ["binds", node.binds], ["host read", node.read ? "yes: the host waits here" : ""],
    ["FLOPs", node.flops ? node.flops.toLocaleString("en") : ""], ["live memory", node.live ? bytes(node.live) : ""], ["takes", links(node.inputs)], ["used by", links(node.users)]];
  return el("div", {}, el("strong", {class: "mono"}, node.name), el("dl", {}, entries.filter(([, value]) => value && value.length !== 0).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

function showDetail() {
  const row = state.selected;
  if (!row) return detail.replaceChildren(el("div", {class: "wide faint"}, "Select a node: arrow keys, or n for the next change."));
  const went = step() && row.before !== null ? step().prologue.find(([b]) => b === row.before) : null;
  const told = row.changes.map((one) => el("div", {}, kindLabel(one.kind), one.detail ? `: ${one.detail}` : "",
    one.kind === "prologue" && went ? [" as ", el("button", {class: "mono", onclick: () => goTo({after: went[1]})}, graph().stages[step().after].nodes[went[1]].name)] : ""));
  detail.replaceChildren(...(told.length ? [el("div", {class: "wide"}, told)] : []), facts(nodeOf(row, "before"), "before"), facts(nodeOf(row, "after"), "after"));
}

function moduleTree() {
  // Modules with the number of changed rows below each.
  const root = {children: new Map(), count: 0, path: ""};
  for (const row of allRows()) {
    const module = (nodeOf(row, "before") || nodeOf(row, "after")).module;
    if (!module) continue;
    let at = root;
    for (const part of module.split(".")) {
      if (!at.children.has(part)) at.children.set(part, {children: new Map(), count: 0, path: at.path ? `${at.path}.${part}` : part});
      at = at.children.get(part);
      if (row.changes.length) at.count++;
    }
  }
  const list = (at) => el("ul", {class: at === root ? "tree" : ""}, [...at.children].map(([part, child]) => el("li", {},
    el("button", {"aria-pressed": String(state.module === child.path), title: child.path, onclick: () => { state.module = state.module === child.path ? "" : child.path; renderSide(); refresh(); }},
      part, child.count ? el("span", {class: "faint"}, `  ${child.count}`) : ""),
    child.children.size && (state.module === child.path || state.module.startsWith(`${child.path}.`) || !/^\d+$/.test(part)) ? list(child) : "")));
  return list(root);
}

function renderSide() {
  const side = document.getElementById("side");
  if (!side) return;
  const counts = {};
  for (const section of step() ? step().sections : []) {
    for (const line of section.lines) counts[line.kind] = (counts[line.kind] || 0) + line.changes.length;
  }
  side.replaceChildren(
    el("h2", {}, "Kinds of change"),
    ...record.kinds.map((kind) => el("label", {}, el("input", {type: "checkbox", checked: state.kinds.has(kind.key), "data-kind": kind.key,
      onchange: (event) => { event.target.checked ? state.kinds.add(kind.key) : state.kinds.delete(kind.key); refresh(); }}), " ", kindLabel(kind.key), el("span", {class: "faint"}, `  ${counts[kind.key] || 0}`))),
    el("label", {}, el("input", {type: "checkbox", id: "changed-only", checked: state.changedOnly, onchange: (event) => { state.changedOnly = event.target.checked; refresh(); }}), " changed nodes alone"),
    el("h2", {}, "Modules"), moduleTree());
}

function refresh() {
  if (state.graph === null) return;
  if (state.tab === "graph") showList();
  else if (state.tab === "changes") document.getElementById("body").replaceChildren(changesView(graph(), step(), state.kinds, matches, goTo));
}

function graphView() {
  table = new Table(draw, (row) => row.kind, (index) => { state.selected = rows[index]; showDetail(); });
  detail = el("div", {class: "detail", id: "detail", "aria-live": "polite"});
  const names = step() ? [graph().stages[step().before].name, `after ${graph().stages[step().after].name}`] : ["captured", "no pass changed it"];
  return el("div", {class: "graph"}, el("div", {class: "columns"}, names.map((name, i) => el("div", {}, name, i ? el("span", {id: "count", style: "float: right"}) : ""))), table.element, detail);
}

function render() {
  const crumbs = document.getElementById("crumbs");
  if (state.graph === null) {
    crumbs.textContent = "";
    main.replaceChildren(overview(record, (index) => { Object.assign(state, {graph: index, step: 0, tab: "changes", selected: null, module: ""}); render(); main.focus(); }));
    return;
  }
  const current = graph();
  crumbs.textContent = `graph ${current.compile_id || state.graph} · ${current.function || ""} · ${OUTCOMES[current.outcome] || ""}`;
  crumbs.title = crumbs.textContent;
  const passes = el("select", {id: "pass", "aria-label": "Pass", onchange: (event) => { Object.assign(state, {step: Number(event.target.value), selected: null}); render(); }},
    current.steps.map((one, index) => el("option", {value: index, selected: index === state.step}, one.name)));
  const filters = el("button", {id: "filters", "aria-expanded": String(state.filters), onclick: () => { state.filters = !state.filters; render(); }}, "Filters");
  const tabs = el("div", {class: "tabs", role: "tablist"}, TABS.map(([key, name], index) => el("button", {role: "tab", id: `tab-${key}`, "aria-selected": String(state.tab === key), title: `${name} (${index + 1})`,
    onclick: () => { state.tab = key; render(); }}, name + (key === "left" && current.left_alone.length ? ` (${current.left_alone.length})` : ""))),
    el("span", {class: "gap"}), state.tab === "graph" || state.tab === "changes" ? filters : "", current.steps.length ? el("label", {}, "pass ", passes) : "");
  const view = {changes: () => changesView(current, step(), state.kinds, matches, goTo), graph: graphView, left: () => leftAlone(current),
    memory: () => memory(current, step(), goTo), symbols: () => symbols(current), figures: () => figuresView(current)}[state.tab]();
  const sided = state.tab === "graph" || state.tab === "changes";
  main.replaceChildren(tabs, el("div", {class: "split"}, sided ? el("aside", {class: `side ${state.filters ? "open" : ""}`, id: "side", "aria-label": "Filters"}) : "", el("div", {class: "graph", id: "body"}, view)));
  renderSide();
  if (state.tab === "graph") { showList(); showDetail(); }
}

function theme(dark) { document.documentElement.dataset.theme = dark ? "dark" : "light"; }
function toggleTheme() { theme(document.documentElement.dataset.theme !== "dark"); }
function home() { state.graph = null; render(); }

theme(matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("home").addEventListener("click", home);
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
let typing = 0;
search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { state.query = search.value.trim(); refresh(); }, 60); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.getElementById("keys").open) {
    search.value = state.query = "";
    Object.assign(state, {module: "", changedOnly: false, kinds: new Set(Object.keys(KINDS))});
    renderSide();
    refresh();
    if (document.activeElement === search) main.focus();
    return;
  }
  if (event.target.matches("input[type=search], select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const tab = TABS[Number(event.key) - 1];
  const actions = {"/": () => { event.preventDefault(); search.focus(); }, "?": () => document.getElementById("keys").showModal(), t: toggleTheme, o: home,
    n: () => nextChange(1), p: () => nextChange(-1), c: () => { state.changedOnly = !state.changedOnly; renderSide(); refresh(); }};
  if (actions[event.key]) actions[event.key]();
  else if (tab && state.graph !== null) { state.tab = tab[0]; render(); if (tab[0] === "graph") table.element.focus(); }
});
if (record.graphs.length === 1) state.graph = 0;
render();
