/* The interface of a live derivation: every equation with its numbers, computed again whenever a number changes.

   An element of class `live` holds the data of both levels of a derivation (a script of type application/json) and each
   equation's typeset form (an element with data-typeset). Everything else is made here, for one level at a time: the
   page begins with the plain derivation, and a switch adds the rest. See evaluate.js for the computation. */
"use strict";

(function () {
  const { indicesAt } = Live;
  const GREEK = {
    alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", eps: "ε", zeta: "ζ", eta: "η", theta: "θ", kappa: "κ",
    lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", phi: "φ", chi: "χ", psi: "ψ",
    omega: "ω", Phi: "Φ", Delta: "Δ", Sigma: "Σ", Lambda: "Λ", ell: "ℓ",
  };
  const EXACT = 1e-9; // two numbers are the same if they differ by less, relative to the largest of their array
  const NUMERICAL = 1e-5; // the same for a gradient and its central difference
  const LIMIT = 1e6; // of what may be typed
  const MANY = 60; // terms that are listed at most
  const WHOLE = ["over", "partial", "bracket", "delta", "cases", "mod", "floor"]; // shown as one number among numbers

  const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const minus = (text) => text.replaceAll("-", "−");

  /** A number in five characters; what rounding leaves of 0 is 0. */
  function short(x) {
    const a = Math.abs(x);
    if (Number.isNaN(x)) return "NaN";
    if (a === Infinity) return x > 0 ? "∞" : "−∞";
    if (a < 1e-12) return "0";
    if (Number.isInteger(x) && a < 10000) return minus(String(x));
    if (a < 0.005 || a >= 10000) return power(x, 0);
    return minus(x.toFixed(a >= 1000 ? 0 : a >= 100 ? 1 : 2));
  }

  /** A number as a power of 10. */
  const power = (x, digits) => minus(x.toExponential(digits)).replace("e+", "e");

  /** A number as the reader would type it. */
  const typed = (x) => (x !== 0 && Math.abs(x) < 1e-3 ? power(x, 0) : minus(String(Number(x.toFixed(4)))));

  /** A number among the terms, with three digits or decimals. */
  function long(x) {
    const a = Math.abs(x);
    if (Number.isInteger(x) && a < 1e5) return minus(String(x));
    if (!Number.isFinite(x) || a < 1e-12) return short(x);
    if (a < 1e-4 || a >= 1e5) return power(x, 2);
    return minus(String(Number(a < 1 ? x.toPrecision(3) : x.toFixed(3))));
  }

  /** Two numbers that differ, each with as many digits as show that: "0.0149" and "0.0151", not "0.01" twice. */
  function apart(x, y, write) {
    const texts = [write(x), write(y)];
    for (let digits = 2; texts[0] === texts[1] && digits < 18; digits++) {
      [x, y].forEach((z, i) => { texts[i] = Math.abs(z) < 1e-3 && z !== 0 ? power(z, digits - 1) : minus(String(Number(z.toPrecision(digits)))); });
    }
    return texts;
  }

  /** Indices one after another, with commas only if one of them is longer than a letter or a digit. */
  const joined = (indices) => indices.join(indices.some((index) => !/^(\d|[a-z]'*)$/.test(index)) ? "," : "");

  function letterOf(name) {
    const match = /^(d?)(.*?)(hat|bar|tilde)?(\d*)$/.exec(name);
    const [, d, base, accent, digits] = match;
    if (name in GREEK) return GREEK[name];
    if (!base) return name;
    return d + (GREEK[base] || base) + ({ hat: "\u0302", bar: "\u0304", tilde: "\u0303" }[accent] || "") + digits;
  }

  function make(tag, attributes = {}, ...content) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== false && value !== null) element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...content);
    return element;
  }

  /** Writes nodes as HTML: with the letters, with the indices as numbers, or with every name replaced by its number. */
  class Writer {
    constructor(line, e, numbers) {
      Object.assign(this, { line, e, numbers });
    }

    index(node) {
      if (node[0] === "idx") {
        const k = this.line.withs.has(node[1]) && this.e ? this.line.closure(node)(this.e) : this.e && this.e[node[1]];
        return k === undefined || k === null ? node[1] : String(k);
      }
      return this.known(node) ? String(this.line.closure(node)(this.e)) : this.write(node);
    }

    known(node) {
      return this.e && [...Live.free(node)].every((letter) => this.e[letter] !== undefined || this.line.withs.has(letter));
    }

    value(node) {
      return `<span class="live-number">${long(this.line.closure(node)(this.e))}</span>`;
    }

    write(node) {
      const [kind, a, b] = node;
      if (kind === "over" && a !== "softmax" && this.e && b.some((letter) => letter in this.e)) { // its letters are its own
        const rest = Object.fromEntries(Object.entries(this.e).filter(([letter]) => !b.includes(letter)));
        return new Writer(this.line, rest, this.numbers).write(node);
      }
      const numeric = this.numbers && this.known(node);
      if (kind === "num") return escape(a === null ? "∞" : node[2] || String(a));
      if (kind === "idx") return this.index(node);
      if (kind === "name") {
        if (numeric) return this.value(node);
        const indices = b.map((index) => this.index(index));
        const subscript = indices.length ? `<sub>${joined(indices)}</sub>` : "";
        return `<i>${escape(letterOf(a))}</i>${subscript}`;
      }
      if (numeric && WHOLE.includes(kind)) return this.value(node);
      if (kind === "neg") return `−${this.write(a)}`;
      if (kind === "group") return `(${this.write(a)})`;
      if (kind === "abs") return `|${this.write(a)}|`;
      if (kind === "floor") return `⌊${this.write(a)}⌋`;
      if (kind === "mod") return `${this.write(a)} mod ${this.write(b)}`;
      if (kind === "^") return `${this.wrap(a)}<sup>${this.write(b[0] === "group" ? b[1] : b)}</sup>`;
      if (kind === "*") return `${this.write(a)}${this.numbers ? " · " : " "}${this.wrap(b)}`;
      if (kind === "/") return `${this.write(a)} / ${this.wrap(b)}`;
      if (kind === "+" || kind === "-") return `${this.write(a)} ${kind === "+" ? "+" : "−"} ${this.wrap(b)}`;
      if (kind === "call") {
        if (a === "sqrt") return `√${["name", "num"].includes(b[0][0]) ? this.write(b[0]) : this.parenthesis(b[0])}`;
        return `${a}(${b.map((arg) => this.write(arg)).join(", ")})`;
      }
      if (kind === "over") {
        const sign = a === "sum" ? "Σ" : a === "prod" ? "Π" : a;
        const stands = (letter) => ([, x, y]) => [x, y].some((side) => side[0] === "idx" && side[1] === letter);
        const letters = b.filter((letter) => !node[4].some(stands(letter)));
        const bounds = [letters.join(""), this.conditions(node[4])].filter(Boolean).join(", ");
        return `${sign}<sub>${bounds}</sub> ${a === "sum" || a === "prod" ? this.write(node[3]) : this.parenthesis(node[3])}`;
      }
      if (kind === "bracket") return `[${this.conditions(a)}]`;
      if (kind === "delta") return `<i>δ</i><sub>${this.index(a)}${this.index(b)}</sub>`;
      if (kind === "partial") return `∂${this.write(a)}/∂${this.write(b)}`;
      const cases = a.map(([value, tests]) => `${this.write(value)} where ${this.conditions(tests)}`);
      return [...cases, `${this.write(b)} elsewhere`].join(", ");
    }

    parenthesis(node) {
      return node[0] === "group" ? this.write(node) : `(${this.write(node)})`;
    }

    conditions(conditions) {
      return conditions.map(([relation, x, y]) => `${this.write(x)} ${escape(relation)} ${this.write(y)}`).join(", ");
    }

    /** A negative number after a sign or a factor gets parentheses. */
    wrap(node) {
      const text = this.write(node);
      const bare = text.replace(/<[^>]*>/g, "");
      return this.numbers && bare.startsWith("−") ? `(${text})` : text;
    }
  }

  /** The terms of a number, and those of the sums inside their factors, such as the one below a softmax's fraction. */
  function listed({ line, terms }) {
    const found = new Map(); // what stands there -> the terms
    for (const { node, e } of terms.flatMap(({ factors }) => factors)) {
      const writer = new Writer(line, e, false);
      Live.walk(node, (sum) => {
        if (sum[0] !== "over" || !writer.known(sum)) return;
        const among = ["sum", "mean"].includes(sum[1]) ? "" : " among";
        found.set(`with ${writer.write(sum)} = ${long(line.closure(sum)({ ...e }))}${among}`, line.within(sum, { ...e }));
      });
    }
    const inner = [...found].map(([title, sum]) => `<div class="live-inner"><p>${title}</p>${list(line, sum)}</div>`);
    return list(line, terms) + inner.join("");
  }

  /** The terms, each with its factors; those that a bracket or δ makes 0 are counted, not listed. */
  function list(line, terms) {
    const isOff = ({ node, e }) => (node[0] === "bracket" || node[0] === "delta") && line.closure(node)(e) === 0;
    const off = ({ factors }) => factors.some(isOff);
    const live = terms.filter((term) => !off(term));
    const largest = live.reduce((m, { value }) => Math.max(m, Math.abs(value)), 1e-300);
    const items = live.slice(0, MANY).map((term) => {
      const width = Math.min(100, Math.round((100 * Math.abs(term.value)) / largest));
      return `<li data-value="${term.value}" data-entries="${term.entries.map((entry) => entry.join(" "))}">`
        + `<span class="live-factors">${product(line, term, false)}</span>`
        + `<span class="live-factors">${product(line, term, true)}</span>`
        + `<span class="live-result${term.value < 0 ? " negative" : ""}" style="--width: ${width}%">${long(term.value)}</span></li>`;
    });
    const rest = live.slice(MANY);
    if (rest.length) items.push(`<li data-value="${rest.reduce((s, { value }) => s + value, 0)}">and ${rest.length} more</li>`);
    if (live.length < terms.length) items.push(`<li class="live-zero">${live.length ? "and " : ""}${terms.length - live.length} terms that are 0</li>`);
    return `<ul class="live-list">${items.join("")}</ul>`;
  }

  function product(line, term, numbers) {
    let text = term.sign < 0 ? "−" : "";
    term.factors.forEach(({ node, e, inverse }, i) => {
      const writer = new Writer(line, e, numbers);
      if (i > 0 || inverse) text += inverse ? `${i ? "" : "1"} / ` : numbers ? " · " : " ";
      text += i > 0 || term.sign < 0 ? writer.wrap(node) : writer.write(node);
    });
    return text;
  }

  /** A normally distributed number, from two of `draw` between 0 and 1. */
  const normal = (draw) => Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());

  /** A number within a range, or else a normally distributed one with two decimals, but not 0, where a corner may be. */
  function drawn(range) {
    if (!range) return Math.round(100 * normal(Math.random)) / 100 || drawn(range);
    const { low, high, whole } = range;
    return whole ? low + Math.floor(Math.random() * (high - low + 1)) : Number((low + Math.random() * (high - low)).toPrecision(3));
  }

  /** What the browser keeps under a name, after it is given a value if there is one; null if its storage is turned off. */
  function kept(name, value) {
    try {
      if (value) localStorage.setItem(name, JSON.stringify(value));
      return JSON.parse(localStorage.getItem(name));
    } catch {
      return null;
    }
  }

  /** An array as heat maps, one for each position in the leading axes. */
  class Grid {
    constructor(array, { label, letters, name, line = null, editable = false, range = null, covers = () => true }) {
      Object.assign(this, { array, label, letters, name, line, editable, range, covers, cells: [] });
      const { shape } = array;
      const columns = shape.length ? shape[shape.length - 1] : 1;
      const rows = shape.length > 1 ? shape[shape.length - 2] : 1;
      const outer = shape.slice(0, -2);
      this.columns = columns;
      this.isSwitch = Boolean(range && range.whole && range.low === 0 && range.high === 1);
      this.element = make("div", { class: "live-panels" });
      for (let panel = 0, n = outer.reduce((a, b) => a * b, 1); panel < n; panel++) {
        this.element.append(this.panel(panel, outer, rows, columns));
      }
    }

    where(panel, outer) {
      const places = indicesAt(outer, panel).map((k, i) => `${this.letters[i] ? `${this.letters[i]} = ` : ""}${k}`);
      return places.filter((_, i) => outer[i] > 1).join(", ");
    }

    panel(panel, outer, rows, columns) {
      const [down, across] = [this.letters[outer.length] || "", this.letters[outer.length + 1] || ""];
      const { shape } = this.array;
      const place = this.where(panel, outer);
      const table = make("table", { "aria-label": `${this.label}${place ? `, ${place}` : ""}`, role: "grid" });
      if (place) table.append(make("caption", {}, place));
      if (shape.length) {
        const corner = rows > 1 ? `${down}${down && across ? "\\" : ""}${across}` : this.letters[shape.length - 1] || "";
        const head = make("tr", {}, make(corner ? "th" : "td", {}, corner));
        for (let j = 0; j < columns; j++) head.append(make("th", { scope: "col" }, String(j)));
        table.append(make("thead", {}, head));
      }
      const body = make("tbody");
      for (let i = 0; i < rows; i++) {
        const row = make("tr");
        if (shape.length) row.append(rows > 1 ? make("th", { scope: "row" }, String(i)) : make("td"));
        for (let j = 0; j < columns; j++) row.append(this.cell((panel * rows + i) * columns + j));
        body.append(row);
      }
      table.append(body);
      return make("div", { class: "live-panel" }, table);
    }

    cell(position) {
      const cell = make("td", { role: "gridcell" });
      if (!this.covers(position)) {
        this.cells.push(null);
        return cell;
      }
      const index = indicesAt(this.array.shape, position);
      const name = `${this.label}${index.length ? `[${index.join(", ")}]` : ""}`;
      let face;
      if (this.editable) {
        const title = this.isSwitch ? "click to change" : "drag sideways, or type";
        face = make("input", { type: "text", role: "spinbutton", autocomplete: "off", spellcheck: "false", "aria-label": name, title });
        face.classList.toggle("live-switch", this.isSwitch);
      } else {
        face = make("button", { type: "button" }, make("b"), make("small"));
      }
      face.tabIndex = this.cells.some(Boolean) ? -1 : 0;
      face.dataset.position = position;
      face.grid = this;
      cell.append(face);
      this.cells.push({ cell, face, name, value: null, heat: null, wrong: null });
      return cell;
    }

    /** Shows the numbers; those that differ from `right` are marked, with the right one. */
    update(right = null) {
      const { data } = this.array;
      const scale = Math.max(Live.largest(data), 1e-12);
      const allowed = right && EXACT * Math.max(Live.largest(right), 1e-3);
      let wrong = 0;
      this.cells.forEach((cell, i) => {
        if (!cell) return;
        const x = data[i];
        const differs = right !== null && !Object.is(x, right[i]) && !(Math.abs(x - right[i]) <= allowed);
        if (differs) wrong++;
        const heat = Number.isFinite(x) && data.length > 1 ? Math.round(((this.isSwitch ? 40 : 100) * x) / scale) : 0;
        if (heat !== cell.heat) {
          cell.heat = heat;
          cell.cell.style.setProperty("--heat", `${Math.abs(heat)}%`);
          cell.cell.classList.toggle("negative", heat < 0);
        }
        const shown = differs ? right[i] : null;
        if (Object.is(x, cell.value) && shown === cell.wrong) return;
        cell.value = x;
        const [text, other] = this.editable ? [typed(x)] : differs ? apart(x, right[i], short) : [short(x)];
        cell.face.dataset.value = String(x);
        if (this.editable) {
          cell.face.setAttribute("aria-valuenow", String(x));
          if (document.activeElement !== cell.face || cell.face.dataset.typing === undefined) cell.face.value = text;
        } else {
          cell.cell.classList.toggle("wrong", differs);
          cell.face.firstChild.textContent = differs ? `≠ ${text}` : text;
          cell.face.lastChild.textContent = differs ? `right: ${other}` : "";
          cell.face.setAttribute("aria-label", `${cell.name} = ${text}${differs ? `, right: ${other}` : ""}`);
        }
        cell.wrong = shown;
      });
      return wrong;
    }

    get firstFace() {
      return this.cells.find(Boolean).face;
    }

    mark(position, kind) {
      this.cells[position].cell.classList.add(kind);
      return this.cells[position].cell;
    }
  }

  class Page {
    constructor(root, level = 0) {
      Object.assign(this, { root, level });
      this.whole = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
      this.data = this.whole.levels[level];
      this.model = Live.model(this.data);
      this.right = null;
      this.first = new Map(this.data.inputs.map((name) => [name, this.model.array(name).data.slice()]));
      this.grids = [];
      this.marked = [];
      this.pinned = null;
      this.step = null;
      this.build();
      this.listen();
      this.refresh();
      this.check();
      this.show((this.cards.find((card) => this.isSum(card)) || this.cards.find((card) => card.grid)).grid.firstFace);
      root.classList.add("ready");
    }

    /** Begins with the first mistake. */
    begin() {
      this.choice.selectedIndex = 1;
      this.plant(0);
    }

    /** Shows another level in place of this one. */
    to(level) {
      clearTimeout(this.waiting);
      cancelAnimationFrame(this.scheduled);
      this.made.remove();
      this.root.classList.remove("planted", "pinned", "asked");
      this.root.page = new Page(this.root, level);
      showLevel(level);
    }

    // what is on the page

    build() {
      this.made = make("div");
      this.root.append(this.made);
      this.made.append(this.introduction(), this.inputCards(), this.toolbar());
      this.cards = [];
      this.lists = { forward: make("div", { class: "live-cards" }), backward: make("div", { class: "live-cards" }) };
      const backward = this.firstBackward();
      this.model.lines.forEach((line, i) => {
        const card = this.lineCard(line, this.data.items[i], i < backward ? "forward" : "backward");
        if (card) this.place(i, card.part).append(card.element);
      });
      for (const [part, list] of Object.entries(this.lists)) {
        if (list.childElementCount) this.made.append(make("h3", {}, part === "forward" ? "Forward" : "Backward"), list);
      }
      this.made.append(this.dock());
    }

    introduction() {
      const element = make("div", {}, make("p", { class: "live-intro" },
        make("b", {}, "Change an input"), ": drag it sideways, or type. ",
        make("b", {}, "Point at any number"), ": its terms appear below, and the numbers it came from light up. Click to keep it selected."));
      const { extension } = this.whole;
      if (!extension) return element;
      const change = () => {
        this.to(1 - this.level);
        this.root.querySelector(".live-extension input").focus();
      };
      const note = this.level ? "What is added or changed is marked." : "";
      element.append(make("div", { class: "live-extension" },
        make("label", {}, make("input", { type: "checkbox", checked: this.level === 1, onchange: change }), ` Add: ${extension}`),
        make("span", { class: "live-note", role: "status" }, note)));
      return element;
    }

    /** Whether the plain derivation has none like it. */
    isAdded(kind, one) {
      return !this.whole.levels[0][kind].some((plain) => (plain.html === undefined ? plain === one : plain.html === one.html));
    }

    toolbar() {
      this.choice = make("select", { "aria-label": "Plant a mistake", onchange: () => this.plant(this.choice.selectedIndex - 1) },
        make("option", {}, "none"), ...this.data.mistakes.map(({ title }) => make("option", {}, title)));
      this.effect = make("p", { class: "live-effect", role: "status" });
      const bar = make("div", { class: "live-bar" });
      if (this.data.mistakes.length) bar.append(make("label", { class: "live-mistake" }, "Plant a mistake: ", this.choice));
      const button = (text, act) => make("button", { type: "button", onclick: act }, text);
      const drawing = this.data.inputs.some((name) => this.model.array(name).shape.length) ? [button("New numbers", () => this.draw())] : [];
      bar.append(make("span", { class: "live-buttons" }, ...drawing, button("Reset", () => this.reset())));
      return make("div", {}, bar, ...(this.data.mistakes.length ? [this.effect] : []));
    }

    inputCards() {
      const [list, folded] = ["div", "div"].map((tag) => make(tag, { class: "live-cards live-inputs" }));
      const inFold = this.data.folded || [];
      for (const name of this.data.inputs) {
        const array = this.model.array(name);
        const range = this.data.ranges[name] || null;
        const grid = this.grid(array, { label: letterOf(name), letters: this.letters(name), name, editable: true, range });
        const title = make("span", { class: "live-equation" }, make("i", {}, letterOf(name)));
        const short = this.model.label(name);
        if (short !== name) title.append(" = ", make("i", {}, letterOf(short)));
        const of = this.data.outputs.find(([, dy]) => dy === name);
        if (of) title.append(` = ∂L/∂${letterOf(of[0])}, the upstream gradient: choose any`);
        const added = this.isAdded("inputs", name) ? " added" : "";
        const caption = make("figcaption", { class: of ? "live-upstream" : "" }, title);
        (inFold.includes(name) ? folded : list).append(make("figure", { class: `live-card${added}` }, caption, grid.element));
      }
      const fold = inFold.length ? [this.fold(`The weights${inFold.includes("m") ? ", and the mask m" : ""}`, folded)] : [];
      return make("div", {}, make("h3", {}, "Inputs"), list, ...fold);
    }

    /** The number of the first line of the backward: one with a gradient or a derivative. */
    firstBackward() {
      const given = this.data.outputs.map(([, dy]) => dy);
      const found = this.model.lines.findIndex((line) => line.mentions().some((name) => given.includes(name)) || line.parts.some(Live.hasPartial));
      return found < 0 ? this.model.lines.length : found;
    }

    /** Where the card of a line stands. In a layer that is made of others, the lines of one are folded under its call. */
    place(i, direction) {
      const list = this.lists[direction];
      const { call } = this.data.items[i];
      if (call === undefined) return list;
      if (this.call !== call) {
        this.call = call;
        const { result } = this.data.calls[call];
        const lines = this.data.items.flatMap((item, k) => (item.call === call ? [k] : []));
        const card = this.lineCard(this.model.lines[lines.find((k) => this.model.lines[k].name === result)], this.data.calls[call], direction);
        this.inside = make("div", { class: "live-cards" });
        card.element.append(this.fold(`${lines.length} equations`, this.inside));
        list.append(card.element);
      }
      return this.inside;
    }

    fold(title, ...content) {
      return make("details", { class: "live-fold", ontoggle: () => this.step !== null && this.go(null) }, make("summary", {}, title), ...content);
    }

    /** Whether a card, in a layer that is made of others, adds up the gradients of two ways. */
    isSum({ i, part, grid }) {
      return this.data.calls && part === "backward" && grid && this.data.items[i].call === undefined;
    }

    /** The cards that are not folded. */
    get steps() {
      return this.cards.filter(({ element }) => !element.parentElement.closest(".live-fold:not([open])"));
    }

    /** The card of a line, or of a call whose result the line gives. */
    lineCard(line, item, part) {
      if (line.isShortName()) return null;
      const i = line.number;
      const body = make("div", { class: "live-body" });
      const badge = make("span", { class: "live-badge" });
      const equation = make("span", { class: "live-equation" });
      equation.append(this.typeset(item));
      const planted = make("span", { class: "live-equation live-planted" });
      const element = make("figure", { class: "live-card live-line", "data-line": i }, make("figcaption", {}, equation, planted, badge), body);
      const call = item !== this.data.items[i];
      element.classList.toggle("added", !call && this.isAdded("items", item));
      const card = { i, part, call, grid: null, wrong: 0, badge, planted, body, element };
      this.fill(card);
      this.cards.push(card);
      return card;
    }

    /** The tables of a line: of what it defines, or of a derivative; a line that only compares has none. */
    fill(card) {
      const line = this.model.lines[card.i];
      card.holds = line.positions.join();
      const result = line.result();
      const shown = result !== null && (line.defines || line.name === null) && result.data.length <= 64;
      if (!shown) return;
      const label = line.name === null ? this.leftSide(line) : letterOf(this.model.label(line.name));
      const letters = this.lineLetters(line);
      const covers = (p) => line.name !== null || line.at.has(p);
      card.grid = this.grid(result, { label, letters, name: line.name, line: card.i, covers });
      const large = line.name === null && result.data.length > 24;
      card.body.append(large ? make("details", {}, make("summary", {}, `${result.data.length} numbers`), card.grid.element) : card.grid.element);
      card.of = line.name !== null && line.defines ? this.data.gradients[line.name] : undefined;
    }

    typeset({ html }) {
      return this.root.querySelector(`[data-typeset="${html}"]`).cloneNode(true);
    }

    leftSide(line) {
      return new Writer(line, null, false).write(line.parts[0]).replace(/<[^>]*>/g, "");
    }

    grid(array, options) {
      const grid = new Grid(array, options);
      this.grids.push(grid);
      return grid;
    }

    /** The letters of the axes of a named array, from the data or from its first use. */
    letters(name) {
      if (this.data.axes[name]) return this.data.axes[name];
      const { shape } = this.model.array(name);
      for (const line of this.model.lines) {
        const node = line.find(name);
        if (node && node[2].length && node[2].every((index) => index[0] === "idx")) return this.pad(node[2].map((index) => index[1]), shape);
      }
      return shape.map(() => "");
    }

    lineLetters(line) {
      const own = line.name !== null && this.data.gradients[line.name];
      if (own) return this.letters(own);
      if (line.name !== null && this.data.axes[line.name]) return this.data.axes[line.name];
      return this.pad(line.letters, (line.result() || { shape: [] }).shape);
    }

    /** Letters for the leading axes too, from an input with as many of them. */
    pad(letters, shape) {
      const missing = shape.length - letters.length;
      if (missing <= 0) return letters;
      const lead = Object.values(this.data.axes).find((axes) => axes.length >= missing + 1);
      return [...(lead ? lead.slice(0, missing) : Array(missing).fill("")), ...letters];
    }

    dock() {
      this.counter = make("span", { class: "live-counter" });
      this.terms = make("div", { class: "live-terms", "aria-live": "polite", tabindex: "0", "aria-label": "the terms of the number" });
      const button = (label, text, act) => make("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
      this.all = make("button", { type: "button", "aria-pressed": "true", onclick: () => this.go(null) }, "All lines");
      const steps = make("div", { class: "live-steps", role: "group", "aria-label": "Step through the derivation" },
        make("span", { class: "live-wide" }, "Line by line:"),
        button("Previous line", "◀", () => this.move(-1)), button("Next line", "▶", () => this.move(1)), this.all, this.counter,
        make("button", { type: "button", class: "live-close", "aria-label": "Hide the terms", onclick: () => this.let() }, "×"));
      this.bar = make("div", { class: "live-dock" }, steps, this.terms);
      return this.bar;
    }

    // what the reader does

    listen() {
      const root = this.made;
      const faceOf = (event) => (event.target.closest ? event.target.closest("[data-position]") : null);
      root.addEventListener("pointerover", (event) => {
        const face = faceOf(event);
        if (face) this.glance(face);
        this.emphasize(event.target.closest("[data-entries]"));
      });
      root.addEventListener("focusin", (event) => {
        const face = faceOf(event);
        if (face) this.glance(face, true);
        if (face && face.grid.editable) face.select();
      });
      root.addEventListener("click", (event) => {
        const face = faceOf(event);
        if (face && !face.grid.editable) this.pin(face);
        else if (face && face.grid.isSwitch) this.change(face, 1 - face.grid.array.data[face.dataset.position]);
        else if (!event.target.closest(".live-dock, input, select, button")) this.pin(null);
      });
      root.addEventListener("keydown", (event) => this.key(event, faceOf(event)));
      root.addEventListener("input", (event) => {
        const face = faceOf(event);
        if (!face) return;
        if (face.dataset.typing === undefined) face.dataset.typing = face.grid.array.data[face.dataset.position];
        const value = Number(face.value.replace("−", "-").replace(",", ".").trim() || NaN);
        const valid = Math.abs(value) <= LIMIT;
        face.setAttribute("aria-invalid", !valid);
        this.change(face, valid ? value : Number(face.dataset.typing)); // as before the typing, not as half of what was typed
      });
      root.addEventListener("pointerdown", (event) => {
        const face = faceOf(event);
        if (face && face.grid.editable) this.drag(event, face);
      });
      root.addEventListener("focusout", (event) => {
        const face = faceOf(event);
        if (face && face.grid.editable) this.endTyping(face);
      });
    }

    /** A number that is dragged sideways grows by 1 in 50 pixels. */
    drag(down, face) {
      const start = face.grid.array.data[face.dataset.position];
      const move = ({ clientX, pointerId }) => {
        const moved = clientX - down.clientX;
        if (Math.abs(moved) < 4 && !face.hasPointerCapture(pointerId)) return;
        face.setPointerCapture(pointerId);
        face.blur();
        this.change(face, Math.round(100 * start + 2 * moved) / 100);
      };
      const up = () => face.removeEventListener("pointermove", move);
      face.addEventListener("pointermove", move);
      for (const end of ["pointerup", "pointercancel"]) addEventListener(end, up, { once: true });
    }

    endTyping(face) {
      delete face.dataset.typing;
      face.setAttribute("aria-invalid", false);
      face.value = typed(face.grid.array.data[face.dataset.position]);
    }

    key(event, face) {
      if (event.key === "Escape") {
        this.let();
      } else if (face && face.grid.editable) {
        this.keyOfInput(event, face);
      } else if (face) {
        this.walk(event, face);
      }
    }

    /** Up and down change a number; left and right go on from the ends of its text, or while all of it is selected. */
    keyOfInput(event, face) {
      const { grid } = face;
      const up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (up) {
        event.preventDefault();
        delete face.dataset.typing;
        const step = (grid.range && grid.range.whole) || event.shiftKey ? 1 : 0.1;
        this.change(face, Math.round((grid.array.data[face.dataset.position] + up * step) * 1e6) / 1e6);
      } else if (event.key === "Enter") {
        this.endTyping(face);
        face.select();
      } else {
        const { selectionStart: start, selectionEnd: end, value } = face;
        const all = start === 0 && end === value.length;
        if (all || (event.key === "ArrowRight" ? start === value.length : end === 0)) this.walk(event, face);
      }
    }

    /** The arrow keys go from number to number. */
    walk(event, face) {
      const { grid } = face;
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns }[event.key];
      const next = by && grid.cells[Number(face.dataset.position) + by];
      if (!next) return;
      event.preventDefault();
      face.tabIndex = -1;
      next.face.tabIndex = 0;
      if (!grid.editable) this.pin(null);
      next.face.focus();
    }

    change(face, value) {
      const { grid } = face;
      if (grid.range) value = Math.min(grid.range.high, Math.max(grid.range.low, grid.range.whole ? Math.round(value) : value));
      this.model.set(grid.name, Number(face.dataset.position), value);
      this.compute();
    }

    /** Sets what is 0 where another input is 0, such as the target of an ignored row. */
    settle() {
      for (const [name, by] of Object.entries(this.data.zero || {})) {
        this.model.array(name).data.forEach((_, i, data) => { if (!this.model.array(by).data[i]) data[i] = 0; });
      }
    }

    compute() {
      this.settle();
      this.model.run();
      if (this.right) this.right.run();
      if (this.scheduled) return;
      this.scheduled = requestAnimationFrame(() => { this.scheduled = 0; this.refresh(); });
    }

    setInputs(choose) {
      for (const name of this.data.inputs) this.model.array(name).data.set(choose(name));
      this.compute();
    }

    reset() {
      this.setInputs((name) => this.first.get(name));
    }

    draw() {
      this.setInputs((name) => {
        const { shape, data } = this.model.array(name);
        return shape.length ? data.map(() => drawn(this.data.ranges[name])) : data;
      });
    }

    plant(k) {
      const mistake = k < 0 ? null : this.data.mistakes[k];
      this.model.plant(mistake);
      const inputs = Object.fromEntries(this.data.inputs.map((name) => [name, this.model.array(name)]));
      this.right = mistake && Live.model({ ...this.data, arrays: { ...this.data.arrays, ...inputs } });
      this.effect.textContent = mistake ? mistake.effect : "";
      this.root.classList.toggle("planted", Boolean(mistake));
      for (const card of this.cards) {
        const here = mistake !== null && mistake.line === card.i && !card.call;
        card.element.classList.toggle("mistaken", here);
        card.planted.replaceChildren();
        if (!here) continue;
        card.planted.append(this.typeset(mistake));
        this.unfold(card);
      }
      this.refresh();
    }

    move(by) {
      const last = this.steps.length - 1;
      const from = this.step === null ? (by > 0 ? -1 : last + 1) : this.step;
      this.go(Math.min(last, Math.max(0, from + by)));
    }

    go(step) {
      this.step = step;
      this.all.setAttribute("aria-pressed", String(step === null));
      const { steps } = this;
      const now = step === null ? null : steps[step];
      this.counter.textContent = now ? `Line ${step + 1} of ${steps.length}, ${now.part}` : "";
      const reads = new Set(now ? this.model.lines[now.i].mentions() : []);
      this.cards.forEach((card) => {
        const k = steps.indexOf(card);
        card.element.classList.toggle("now", card === now);
        card.element.classList.toggle("later", step !== null && k > step);
        card.element.inert = step !== null && k > step;
      });
      for (const grid of this.grids) {
        const card = grid.element.closest(".live-card");
        if (card && grid.name !== null) card.classList.toggle("read", reads.has(grid.name) && card !== (now && now.element));
      }
      if (!now) return;
      this.pin(null);
      this.reveal(now);
      if (now.grid) this.ask(now.grid.firstFace);
      else this.rest();
    }

    // what changes with the numbers

    /** Shows all numbers at once, and what they are compared with as soon as they rest. */
    refresh() {
      for (const grid of this.grids) if (grid.editable) grid.update();
      for (const card of this.cards) this.refreshNumbers(card);
      if (this.current) this.show(this.current);
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.check(), 60);
    }

    check() {
      clearTimeout(this.waiting);
      for (const card of this.cards) this.refreshBadge(card);
    }

    /** Makes the tables of a line again, if it holds for other elements now. */
    refill(card) {
      if (card.holds === this.model.lines[card.i].positions.join()) return;
      this.grids = this.grids.filter((grid) => grid !== card.grid);
      if (this.current && this.current.grid === card.grid) {
        this.pin(null);
        this.rest();
      }
      card.body.replaceChildren();
      card.grid = null;
      this.fill(card);
    }

    refreshNumbers(card) {
      card.wrong = 0;
      this.refill(card);
      if (!card.grid) return;
      card.grid.array = this.model.lines[card.i].result() || card.grid.array;
      const right = this.right ? this.right.lines[card.i].result() : null;
      card.wrong = card.grid.update(right && right.data);
    }

    refreshBadge(card) {
      const line = this.model.lines[card.i];
      const messages = card.wrong ? [`✗ ${card.wrong} of ${card.grid.cells.length} wrong`] : [];
      let bad = card.wrong > 0;
      if (card.of) {
        const { data } = card.grid.array;
        const worst = this.model.errors(data, card.of).reduce((m, x) => (x <= m ? m : x), 0);
        const far = !(worst <= NUMERICAL * Math.max(Live.largest(data), 1e-3));
        messages.push(`${far ? "✗ differs from the numerical gradient by" : "✓ equals the numerical gradient to"} ${worst === 0 ? "0" : power(worst, 0)}`);
        bad = bad || far;
      } else if (!bad && !line.environments.length) {
        messages.push("holds for no element now");
      } else if (!bad && (line.parts.length > 2 || !line.defines)) {
        const derivative = line.parts.some(Live.hasPartial);
        const allowed = derivative ? NUMERICAL : EXACT;
        const off = line.disagreement();
        bad = !(off <= allowed);
        messages.push(`${bad ? "✗ differs" : "✓ agrees"}: ${off === 0 ? "0" : power(off, 0)}`);
      }
      card.badge.textContent = messages.join("; ");
      card.badge.classList.toggle("bad", bad);
    }

    unfold({ element }) {
      const fold = element.parentElement.closest(".live-fold");
      if (fold) fold.open = true;
    }

    reveal(card) {
      this.unfold(card);
      const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      card.element.scrollIntoView({ block: "nearest", behavior: still ? "auto" : "smooth" });
    }

    // what a number is made of

    pin(face) {
      this.pinned = face === this.pinned ? null : face;
      if (face) this.ask(face, true);
      this.root.classList.toggle("pinned", Boolean(this.pinned));
    }

    /** Shows a number that the reader has asked for. If it was touched, it comes out from under the bar, which opens, but
        not over the results of an input that is changed. */
    ask(face, touched) {
      if (!face.grid.editable) this.root.classList.add("asked");
      this.show(face);
      if (touched && face.getBoundingClientRect().bottom > this.bar.getBoundingClientRect().top) face.scrollIntoView({ block: "nearest" });
    }

    /** No number is shown any more. */
    let() {
      this.pin(null);
      this.rest();
      this.root.classList.remove("asked");
    }

    /** Shows a number, unless another is held. */
    glance(face, touched = false) {
      if (!this.pinned) this.ask(face, touched);
    }

    unmark() {
      for (const cell of this.marked) cell.classList.remove("here", "source", "strong");
      this.marked = [];
    }

    /** Shows what a term reads. */
    emphasize(item) {
      for (const cell of this.marked) cell.classList.remove("strong");
      const entries = item ? item.dataset.entries.split(",") : [];
      for (const entry of entries) this.mark(...entry.split(" "), "strong");
    }

    mark(name, position, kind) {
      for (const grid of this.grids) {
        if (grid.name === name && grid.cells[position]) this.marked.push(grid.mark(position, kind));
      }
    }

    rest() {
      this.unmark();
      this.current = null;
      this.terms.innerHTML = '<p class="live-hint">Point at a number, tap it, or reach it with the Tab and arrow keys to see its terms here.</p>';
    }

    show(face) {
      const { grid } = face;
      const position = Number(face.dataset.position);
      const fresh = this.current !== face;
      this.current = face;
      this.unmark();
      this.marked.push(grid.mark(position, "here"));
      if (grid.editable) this.showInput(grid, position);
      else this.showTerms(grid, position);
      if (fresh) this.terms.scrollTop = 0;
    }

    /** A number's name: that of its array, and its place along the axes longer than 1. */
    nameOf(grid, position) {
      const indices = indicesAt(grid.array.shape, position).filter((_, i) => grid.array.shape[i] > 1).map(String);
      return `<i>${escape(grid.label)}</i>${indices.length ? `<sub>${joined(indices)}</sub>` : ""}`;
    }

    showInput(grid, position) {
      const gradient = Object.entries(this.data.gradients).find(([, of]) => of === grid.name);
      const title = `${this.nameOf(grid, position)} = ${long(grid.array.data[position])}`;
      let text = "";
      if (gradient && this.model.array(gradient[0])) {
        const slope = this.model.array(gradient[0]).data[position];
        this.mark(gradient[0], position, "source");
        text = `Its gradient is d${this.nameOf(grid, position)} = <span class="live-number">${long(slope)}</span>: `
          + `if this number grows by 0.01, the loss L = Σ dy · y changes by about ${long(slope / 100)}.`;
      }
      this.terms.innerHTML = `<p class="live-title">${title}</p><p>An input. ${text}</p>`;
    }

    showTerms(grid, position) {
      const line = this.model.lines[grid.line];
      const found = line.terms(position);
      if (!found) {
        this.terms.innerHTML = "<p>This number is computed by another line.</p>";
        return;
      }
      for (const [name, p] of found.entries) this.mark(name, p, "source");
      const writer = new Writer(line, found.e, false);
      const name = writer.write(line.parts[0]);
      const right = grid.cells[position].wrong;
      const [text, other] = right === null ? [long(found.value)] : apart(found.value, right, long);
      const wrong = right === null ? "" : ` <span class="live-right">≠ ${other}, which is right</span>`;
      const total = `<span class="live-total" data-value="${found.value}">${text}</span>`;
      const sides = found.node === line.parts[0] ? [name] : [name, writer.write(found.node)];
      this.terms.innerHTML = `<p class="live-title">${[...sides, total].join(" = ")}${wrong}</p>${listed(found)}`;
    }
  }

  /** Shows the derivation's text on the page at a level; a link may lead to what another level shows. */
  function showLevel(level) {
    for (const element of document.querySelectorAll(".level")) {
      const { classList } = element;
      classList.toggle("shown", classList.contains(`level-${level}`));
      classList.toggle("added", level > 0 && !classList.contains("level-0"));
    }
  }

  function follow() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const hidden = target && target.closest(".level:not(.shown)");
    const { page } = document.querySelector(".live") || {};
    if (!hidden || !page) return;
    page.to(page.whole.levels.length - 1);
    target.scrollIntoView();
  }

  function start() {
    for (const root of document.querySelectorAll(".live:not(.ready)")) {
      try {
        root.page = new Page(root);
        if ("planted" in root.dataset) root.page.begin();
      } catch (error) {
        root.append(make("p", { class: "live-effect" }, `These equations could not be computed here: ${error.message}`));
        throw error;
      }
    }
    follow();
    addEventListener("hashchange", follow);
  }

  Object.assign(Live, { GREEK, Writer, apart, kept, listed, make, normal, long, short, letterOf, LIMIT });

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
