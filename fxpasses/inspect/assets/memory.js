// Charts: live memory in forward, what is kept for backward, and transfers against compute.

const HEIGHT = 200;

function chart(id, label, height, ...children) {
  return svg("svg", {id, class: "chart", role: "img", "aria-label": label, viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none"}, ...children);
}

function curve(name, values, top) {
  // Of many points the highest in each column, so that a peak is never lost.
  const highest = new Map();
  values.forEach((value, i) => {
    const x = Math.floor(i / values.length * WIDTH);
    if (!highest.has(x) || highest.get(x) < value) highest.set(x, value);
  });
  return svg("path", {class: name, d: [...highest].map(([x, value], i) => {
    const y = (HEIGHT - 1 - value / top * (HEIGHT - 11)).toFixed(1);
    return i ? `H${x}V${y}` : `M${x} ${y}`;
  }).join("") + `H${WIDTH}`});
}

function memory(graph, step, open) {
  const stages = step ? [[step.before, "before"], [step.after, "after"]] : [[0, "before"]];
  const points = stages.map(([index, name]) => [index, name, graph.stages[index].nodes.map((n, row) => [row, n.live]).filter((p) => p[1] !== undefined)]);
  const top = Math.max(1, ...points.map(([, , list]) => list.reduce((most, p) => Math.max(most, p[1]), 0)));
  const notes = points.filter(([, , list]) => list.length).map(([index, name, list]) => {
    const peak = list.reduce((most, p) => p[1] > most[1] ? p : most);
    return el("li", {}, `${graph.stages[index].name}: peak ${bytes(peak[1])} at `,
      el("button", {onclick: () => open(name === "before" ? {before: peak[0]} : {after: peak[0]})}, graph.stages[index].nodes[peak[0]].name));
  });
  const curves = points.filter(([, , list]) => list.length).map(([, name, list]) => curve(name, list.map((p) => p[1]), top));
  return el("div", {class: "scroll"}, plannedMemory(graph), stepMemory(graph), el("h2", {}, "Live memory in forward"),
    el("p", {class: "faint"}, `In the order of the nodes${step ? " (grey: before, blue: after)" : ""}; the top is ${bytes(top)}. An eager run of the traced sizes, without what autograd keeps.`),
    chart("live", "Live memory in forward", HEIGHT, ...curves), axis("first node", "last node"), el("ul", {}, notes), kept(graph), transfers(graph));
}

function stepMemory(graph) {
  // Live memory over forward and backward, before and after all passes: the width of each curve is its own step.
  if (!graph.step) return "";
  const {before, after} = graph.step, same = JSON.stringify(before) === JSON.stringify(after);
  const top = Math.max(1, before.peak_bytes, after.peak_bytes), x = (one) => one.turn / one.live.length * WIDTH;
  const line = (name, one) => one.turn < one.live.length ? svg("line", {class: `turn ${name}`, x1: x(one), x2: x(one), y1: 0, y2: HEIGHT}) : "";
  return el("figure", {id: "step"}, el("figcaption", {}, same ? `Live memory of a step: peak ${bytes(before.peak_bytes)}` : `Live memory of a step: peak ${bytes(before.peak_bytes)} (grey) → ${bytes(after.peak_bytes)} (blue)`),
    svg("svg", {class: "chart step", role: "img", "aria-label": `peak ${bytes(before.peak_bytes)} before, ${bytes(after.peak_bytes)} after`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none"},
      line("before", before), line("after", after), curve("before", before.live, top), ...(same ? [] : [curve("after", after.live, top)])),
    axis("forward", "backward"), el("p", {class: "faint"}, "Operator by operator, for the first batch's sizes, besides parameters and the batch; a vertical line is where backward begins."));
}

function plannedMemory(graph) {
  // A step that has to fit: the process's memory call by call, if all is saved, and as it is planned.
  if (!graph.plan) return "";
  const {budget, saving_all, planned} = graph.plan, most = (list) => list.reduce((a, b) => Math.max(a, b), 0);
  const top = Math.max(1, budget, most(saving_all), most(planned)), y = HEIGHT - 1 - budget / top * (HEIGHT - 11);
  const line = (name, x1, y1, x2, y2) => svg("line", {class: name, x1, x2, y1, y2});
  return el("figure", {id: "plan"}, el("figcaption", {}, `Memory of a step in ${bytes(budget)}: ${bytes(most(saving_all))} if all is saved (grey), ${bytes(most(planned))} as planned (blue)`),
    svg("svg", {class: "chart step", role: "img", "aria-label": `budget ${bytes(budget)}, planned ${bytes(most(planned))}`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none"},
      line("budget", 0, y, WIDTH, y), line("turn", WIDTH / 2, 0, WIDTH / 2, HEIGHT), curve("before", saving_all, top), curve("after", planned, top)),
    axis("forward", "backward"), el("p", {class: "faint"}, "Predicted, call by call of the graph's pieces, with all that the process held before; the line across is the budget."));
}

function axis(...labels) { return el("div", {class: "axis faint"}, labels.map((label) => el("span", {}, label))); }

function lengths(graph) {
  // How many nodes forward and backward have; where only transfers are known, as many as they speak of.
  if (graph.partition) return [graph.partition.forward.length, graph.partition.backward.length];
  const most = (field) => 1 + Math.max(0, ...graph.transfers.map((one) => one[field]));
  return [most("offloaded_at"), most("needed_at")];
}

function turn(graph, height) {
  // The line between forward and backward.
  const [forward, backward] = lengths(graph), x = forward / (forward + backward) * WIDTH;
  return svg("line", {class: "turn", x1: x, x2: x, y1: 0, y2: height});
}

function kept(graph) {
  if (!graph.partition) return [el("h2", {}, "Kept for backward"), el("p", {class: "faint"}, "Not known: the lowering was eager, the graph needs no gradient, or it came from a cache.")];
  const [forward, backward] = lengths(graph), saved = graph.partition.saved.filter((one) => !one.is_input);
  const course = (moves) => {
    const change = new Array(forward + backward + 1).fill(0);
    for (const one of saved) { change[one.made_at] += one.bytes || 0; change[forward + one.freed_at + 1] -= one.bytes || 0; }
    for (const one of moves) { change[one.offloaded_at + 1] -= one.bytes; change[forward + one.reloaded_at] += one.bytes; }
    let sum = 0;
    return change.map((one) => sum += one);
  };
  const on = course([]), off = course(graph.transfers), total = saved.reduce((sum, one) => sum + (one.bytes || 0), 0);
  const top = [...on, ...off].reduce((a, b) => Math.max(a, b), 1);
  const largest = [...saved].sort((a, b) => (b.bytes || 0) - (a.bytes || 0)).slice(0, 20);
  return [el("h2", {}, "Kept for backward"),
    el("p", {class: "faint"}, `${saved.length} tensors, ${bytes(total)}, besides parameters and inputs${graph.transfers.length ? " (grey: if all stayed on the device, blue: with transfers)" : ""}.`),
    chart("kept", "Bytes kept for backward", HEIGHT, turn(graph, HEIGHT),
      ...(graph.transfers.length ? [curve("before", on, top)] : []), curve("after", off, top)),
    axis("forward", "backward"),
    largest.length ? tableOf(["the largest", "bytes", "made at", "in"], largest.map((one) => [el("code", {}, one.name), one.bytes === null ? "unknown" : bytes(one.bytes), one.where || "", one.module || ""]), [1]) : ""];
}

function transfers(graph) {
  if (!graph.transfers.length) return "";
  const [forward, backward] = lengths(graph), x = (position) => position / (forward + backward) * WIDTH;
  const lane = Math.max(2, Math.min(14, 400 / graph.transfers.length)), strip = 60, height = strip + lane * graph.transfers.length;
  const work = graph.partition ? [...graph.partition.forward, ...graph.partition.backward] : [], most = work.reduce((a, b) => Math.max(a, b), 1);
  const made = new Map((graph.partition ? graph.partition.saved : []).map((one) => [one.name, one.where]));
  const bars = work.map((flops, i) => flops && svg("rect", {class: "work", x: x(i), y: strip - 6 - flops / most * (strip - 10), width: Math.max(1, WIDTH / work.length), height: flops / most * (strip - 10)})).filter(Boolean);
  const lanes = graph.transfers.flatMap((one, i) => {
    const y = strip + i * lane, part = (name, from, to) => svg("rect", {class: name, x: x(from), y: y + 1, width: Math.max(1.5, x(to) - x(from)), height: Math.max(1, lane - 2)});
    return [part("away", one.offloaded_at + 1, forward + one.reloaded_at), part("reload", forward + one.reloaded_at, forward + one.needed_at)];
  });
  const under = (one) => (graph.partition ? graph.partition.backward : []).slice(one.reloaded_at, one.needed_at).reduce((a, b) => a + b, 0);
  return [el("h2", {}, "Transfers against compute"),
    el("p", {class: "faint"}, "Grey bars: FLOPs of each node, forward and then backward. Below them a line for each tensor: away from the device (pale), then copied back while backward computes (strong). A copy with little compute above it makes backward wait."),
    chart("transfers", "Transfers against compute", height, turn(graph, height), ...bars, ...lanes), axis("forward", "backward"),
    tableOf(["tensor", "made at", "bytes", "to", "nodes of backward during the copy back", "their FLOPs"], graph.transfers.map((one) => [el("code", {}, one.name), made.get(one.name) || "", bytes(one.bytes), one.to || "host", one.needed_at - one.reloaded_at, under(one).toLocaleString("en")]), [2, 4, 5])];
}
