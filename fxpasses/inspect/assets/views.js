// What the page shows of a graph besides its nodes: overview, changes, what was left alone, memory, symbols, figures.

const KINDS = {};

function bytes(n) {
  for (const [unit, power] of [["GiB", 30], ["MiB", 20], ["KiB", 10]]) if (n >= 2 ** power) return `${(n / 2 ** power).toFixed(1)} ${unit}`;
  return `${n} B`;
}

function seconds(s) { return s >= 1 ? `${s.toFixed(1)} s` : `${Math.round(1000 * s)} ms`; }

function kindLabel(kind) { return el("span", {class: `kind ${kind}`}, `${KINDS[kind].mark} ${KINDS[kind].name}`); }

const OUTCOMES = {rewritten: "rewritten", captured: "compiled as captured", uncompiled: "not compiled", retraced: "given up, and traced again"};

function tableOf(headers, rows, numbers = [], kind = null) {
  const number = (i) => ({class: numbers.includes(i) ? "number" : null});
  return el("table", {class: kind},
    el("thead", {}, el("tr", {}, headers.map((h, i) => el("th", number(i), h)))),
    el("tbody", {}, rows.map((row) => el("tr", row.attributes || {}, (row.cells || row).map((c, i) => el("td", number(i), c))))));
}

function change(before, after) {
  return [`${before} → `, el("span", {class: after < before ? "good" : after > before ? "bad" : ""}, String(after))];
}

function overview(record, open) {
  const rows = record.graphs.map((graph, index) => {
    const {before, after} = graph.figures;
    return {
      attributes: {class: "link", tabindex: "0", onclick: () => open(index), onkeydown: (e) => { if (e.key === "Enter") open(index); }},
      cells: [graph.compile_id || String(index), graph.function, graph.passes.map((p) => el("div", {}, p.failure ? el("span", {class: "bad"}, `${p.name} failed: ${p.failure}`) : p.summary || `${p.name}: nothing to do`)),
        change(before.host_reads, after.host_reads), after.prologue_reads || "", change(before.operators, after.operators),
        graph.left_alone.reduce((sum, miss) => sum + miss.count, 0) || ""],
    };
  });
  const versions = Object.entries(record.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  return el("div", {class: "scroll"},
    el("h1", {}, `${record.graphs.length} compiled graph${record.graphs.length === 1 ? "" : "s"}`),
    opening(record),
    el("p", {class: "faint"}, [record.program, versions, record.started, record.rank === null || record.rank === undefined ? "" : `rank ${record.rank}`].filter(Boolean).join(" · ")),
    rows.length ? tableOf(["graph", "from", "what the passes did", "host reads a step", "once a batch", "operators", "left alone"], rows, [3, 4, 5, 6], "wide")
      : el("p", {}, "Nothing was compiled with the backend fastpack."));
}

function headline(graph) {
  // What a person wants to know first: what each pass says it did, and the figures that changed.
  const rows = graph.rows.filter((row) => row[1] !== row[2] || row[3]);
  return el("div", {class: "headline"},
    graph.passes.map((pass) => el("p", {}, el("strong", {}, `${pass.name}: `), pass.failure ? el("span", {class: "bad"}, `failed and was left out: ${pass.failure}`)
      : el("span", {class: pass.summary ? "good" : ""}, pass.summary || "nothing to do"),
      pass.taken.length ? el("details", {class: "taken"}, el("summary", {}, `what it took (${pass.taken.length})`), el("ul", {}, pass.taken.map((one) => el("li", {}, one)))) : "")),
    graph.left_alone_line ? el("p", {}, el("strong", {}, "left alone: "), el("span", {class: "kind rewired"}, graph.left_alone_line), el("span", {class: "faint"}, " (3 shows them)")) : "",
    tableOf(["each step", "before", "after", "once a batch"], rows, [1, 2, 3]));
}

function changesView(graph, step, kinds, matches, open) {
  const first = record.graphs.length === 1 ? opening(record) : "";
  if (!step) return el("div", {class: "scroll", id: "changes"}, first, headline(graph), el("p", {}, graph.transfers.length ? "No pass changed the captured graph. What was put into forward and backward, which were made of it: Memory (4)." : "No pass changed this graph."));
  let shown = 0;
  const sections = step.sections.map((section) => {
    const lines = section.lines.filter((line) => kinds.has(line.kind) && matches(`${line.what} ${line.source} ${line.module} ${line.code}`));
    shown += lines.length;
    if (!lines.length) return null;
    const modules = lines.some((line) => line.module);
    const rows = lines.map((line) => {
      const go = () => open(step.changes[line.changes[0]]);
      return {
        attributes: {class: "link", tabindex: "0", onclick: go, onkeydown: (e) => { if (e.key === "Enter") go(); }},
        cells: [kindLabel(line.kind), line.source, [el("code", {}, line.code)], el("code", {class: "faint"}, line.what), ...(modules ? [line.module] : [])],
      };
    });
    return el("details", {open: true}, el("summary", {}, section.title), tableOf(["kind", "line", "code", "operators", ...(modules ? ["module"] : [])], rows, [], "stacks"));
  });
  return el("div", {class: "scroll", id: "changes"}, first, headline(graph), shown ? sections : el("p", {}, "No change matches the filters."));
}

function leftAlone(graph) {
  const rows = graph.left_alone.map((miss) => [
    el("code", {}, miss.count > 1 ? `${miss.target} ×${miss.count}` : miss.target), miss.text ? `${miss.reason}: ${miss.text}` : miss.reason,
    [miss.where, miss.module ? el("div", {class: "faint"}, `in ${miss.module}`) : ""], el("code", {}, miss.code), [miss.host_reads ? `${miss.host_reads} host reads a step` : "", miss.bytes ? bytes(miss.bytes) : ""].filter(Boolean).join(", "), miss.pass_name]);
  return el("div", {class: "scroll"}, rows.length ? tableOf(["what", "why it was left alone", "line", "code", "costs", "pass"], rows, [], "stacks")
    : el("p", {}, "Nothing that a pass looked for was left alone."));
}

function symbols(graph) {
  const few = (names) => names.slice(0, 6).join(", ") + (names.length > 6 ? ` and ${names.length - 6} more` : "");
  const rows = graph.symbols.map((s) => [el("code", {}, s.symbol), few(s.binders), few(s.users), few(s.assertions), s.tensors || "", el("span", {class: "bad"}, s.problem)]);
  return el("div", {class: "scroll"}, el("p", {class: "faint"}, "Numbers that only the running program knows, after the passes."),
    rows.length ? tableOf(["symbol", "bound by", "used by", "asserted by", "in sizes of", "problem"], rows, [4]) : el("p", {}, "None is left: every number that depends on the batch comes from the prologue, or there was none."),
    graph.checks.length ? [el("h2", {}, "Checked once a batch, with the prologue"), el("ul", {}, graph.checks.map((c) => el("li", {}, el("code", {}, c))))] : null);
}

function figuresView(graph) {
  return el("div", {class: "scroll"}, tableOf(["each step", "before", "after", "once a batch"], graph.rows, [1, 2, 3]),
    el("h2", {}, "Time"), tableOf(["", ""], [...graph.passes.map((p) => [p.name, seconds(p.seconds)]), ["compile", seconds(graph.compile_seconds)]], [1]));
}
