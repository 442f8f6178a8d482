// Elements made safely, and a list that holds only the rows that are seen: 20,000 nodes scroll like 20.

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat(9)) {
    if (child !== null && child !== undefined && child !== "") node.append(child);  // a string becomes text, not markup
  }
  return node;
}

const ROW_HEIGHT = 22;  // as in page.css

class Table {
  // draw(row) gives the children of a row's element, kindOf(row) its class; select(index) is told of a selection.
  constructor(draw, kindOf, select) {
    this.draw = draw;
    this.kindOf = kindOf;
    this.onselect = select;
    this.rows = [];
    this.selected = -1;
    this.space = el("div", {style: "position: relative"});
    this.element = el("div", {class: "list", role: "listbox", tabindex: "0", "aria-label": "Nodes, before and after"}, this.space);
    this.element.addEventListener("scroll", () => this.paint());
    this.element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.paint()).observe(this.element);
  }

  show(rows, selected) {
    this.rows = rows;
    this.selected = selected;
    this.space.style.height = `${rows.length * ROW_HEIGHT}px`;
    if (selected >= 0) this.reveal(selected, true);
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(this.rows.length, first + Math.ceil(this.element.clientHeight / ROW_HEIGHT) + 16);
    const drawn = [];
    for (let index = first; index < last; index++) {
      drawn.push(el("div", {
        class: `row mono ${this.kindOf(this.rows[index])}`, role: "option", id: `row-${index}`,
        style: `top: ${index * ROW_HEIGHT}px`, "aria-selected": String(index === this.selected),
        "aria-posinset": index + 1, "aria-setsize": this.rows.length, onclick: () => this.select(index),
      }, this.draw(this.rows[index])));
    }
    this.space.replaceChildren(...drawn);
    if (this.selected >= 0) this.element.setAttribute("aria-activedescendant", `row-${this.selected}`);
  }

  select(index, centre = false) {
    if (!this.rows.length) return;
    this.selected = Math.max(0, Math.min(this.rows.length - 1, index));
    this.reveal(this.selected, centre);
    this.paint();
    this.onselect(this.selected);
  }

  reveal(index, centre) {
    const top = index * ROW_HEIGHT, height = this.element.clientHeight || 400;
    const seen = top >= this.element.scrollTop && top + ROW_HEIGHT <= this.element.scrollTop + height;
    if (seen) return;
    if (centre) this.element.scrollTop = top - height / 2;
    else if (top < this.element.scrollTop) this.element.scrollTop = top;
    else this.element.scrollTop = top + ROW_HEIGHT - height;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW_HEIGHT) - 1);
    const step = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity}[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(step === Infinity ? this.rows.length - 1 : step === -Infinity ? 0 : this.selected + step);
  }
}
