// Pictures of the first batch: what its tokens are, and which tiles attention computes.

const TOKENS = [["labelled", "labelled: computed to the loss"], ["read", "read by others, as a prompt is: computed, but for what only its own result needs"], ["unread", "nothing reads it, as padding: not computed"]];
const WIDTH = 800;
const TILES = ["full", "intervals", "values", "causal"];

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function opening(record) {
  // What a page begins with: the verdict, and the pictures where there are any.
  const first = record.graphs.find((graph) => graph.step);
  const pictures = [textsPicture(record.sample), tilesPicture(record.sample), first ? stepMemory(first) : ""].filter(Boolean);
  return [record.said.map((text) => el("p", {class: "said"}, text)), pictures.length ? el("div", {class: "pictures"}, pictures) : ""];
}

function textsPicture(sample) {
  if (!sample.texts.length) return null;
  const bar = 10, gap = 2, texts = sample.texts, pairs = (text) => text.flatMap((n, i) => i % 2 ? [] : [[n, text[i + 1]]]);
  const length = Math.max(1, ...texts.map((text) => pairs(text).reduce((sum, [, tokens]) => sum + tokens, 0)));
  const total = [0, 0, 0], bars = [];
  texts.forEach((text, row) => {
    let at = 0;
    for (const [kind, tokens] of pairs(text)) {
      bars.push(svg("rect", {class: TOKENS[kind][0], x: at / length * WIDTH, y: row * (bar + gap), width: tokens / length * WIDTH, height: bar}));
      at += tokens;
      total[kind] += tokens;
    }
  });
  const all = total.reduce((a, b) => a + b, 0), share = (kind) => `${Math.round(100 * total[kind] / all)} %`;
  return el("figure", {id: "texts"}, el("figcaption", {}, "The first batch, a bar for each text", sample.texts_left_out ? `, without ${sample.texts_left_out} more` : ""),
    svg("svg", {class: "texts", role: "img", "aria-label": `${texts.length} texts: ${TOKENS.map(([name], kind) => `${share(kind)} ${name}`).join(", ")}`, viewBox: `0 0 ${WIDTH} ${texts.length * (bar + gap)}`, preserveAspectRatio: "none"}, ...bars),
    el("ul", {class: "legend"}, TOKENS.map(([name, text], kind) => el("li", {class: name}, `${share(kind)} ${text}`))));
}

function tilesPicture(sample) {
  if (!sample.tiles.length) return null;
  const shapes = sample.tiles.map(([start, stop, left, right, kind]) => TILES[kind] === "causal"
    ? svg("polygon", {class: "full", points: `${left},${start} ${left},${stop} ${right},${stop}`})
    : svg("rect", {class: TILES[kind], x: left, y: start, width: right - left, height: stop - start}));
  const area = sample.tiles.reduce((sum, [start, stop, left, right, kind]) => sum + (stop - start) * (TILES[kind] === "causal" ? stop - start + 1 : 2 * (right - left)) / 2, 0);
  const share = Math.round(100 * area / (sample.rows * sample.columns));
  return el("figure", {id: "tiles"}, el("figcaption", {}, `Attention, ${sample.rows} queries (down) × ${sample.columns} keys (across)`),
    svg("svg", {class: "tiles", role: "img", "aria-label": `${sample.tiles.length} tiles, ${share} % of the pairs`, viewBox: `0 0 ${sample.columns} ${sample.rows}`, preserveAspectRatio: "none"}, ...shapes),
    el("ul", {class: "legend"}, el("li", {class: "full"}, `${share} % of the pairs are computed, in ${sample.tiles.length} tiles`), el("li", {class: "intervals"}, "tiles that compute a part of their pairs for nothing"), el("li", {class: "unread"}, "the rest is not computed")));
}
