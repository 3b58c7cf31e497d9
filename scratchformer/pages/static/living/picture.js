/* The picture of a step: every array of its plan as a grid, its gradient beside it, and the calls joined by lines.

   const picture = new Living.Picture(plan, rows);      picture.element
   picture.draw(step, ready)                            ready(buffer): whether it has been computed
   picture.mark(buffer, positions)                      lights numbers */
"use strict";

(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const { make } = globalThis.Live;
  const { product } = globalThis.Living;

  /** An array, or the gradient of one, as one canvas for each matrix in it; of a batch the first sequence. */
  class Grid {
    constructor(plan, number, place, { rows, title, gradient, small }) {
      const { shape, role } = plan.buffers[number];
      const batched = role !== "parameter" && shape.length > 1 && shape[0] === rows;
      Object.assign(this, { title, gradient });
      [this.buffer, this.positions] = place;
      this.shape = batched ? shape.slice(1) : shape;
      if (this.shape.length === 0) this.shape = [1];
      this.columns = this.shape[this.shape.length - 1];
      this.lines = this.shape.length > 1 ? this.shape[this.shape.length - 2] : 1;
      this.size = product(this.shape);
      this.panels = [];
      this.element = make("div", { class: `living-grid${gradient ? " gradient" : ""}${small ? " small" : ""}` });
      for (let panel = 0; panel < this.size / (this.columns * this.lines); panel++) {
        const canvas = make("canvas", { width: this.columns, height: this.lines, "aria-hidden": "true" });
        const lights = make("span", { class: "living-lights", "aria-hidden": "true" });
        const holder = make("span", { class: "living-panel", style: `--columns: ${this.columns}; --lines: ${this.lines}` }, canvas, lights);
        Object.assign(canvas, { grid: this, panel });
        this.panels.push({ canvas, lights, image: new ImageData(this.columns, this.lines), context: canvas.getContext("2d") });
        this.element.append(holder);
      }
      if (this.size === 1 && !small) this.element.append(this.face = make("b"));
    }

    /** The position in its buffer of the number that is drawn i-th. */
    at(i) {
      return this.positions ? this.positions[i] : i;
    }

    value(step, i) {
      return step.arrays[this.buffer][this.at(i)];
    }

    draw(step, [zero, above, below], there) {
      let largest = 1e-30;
      for (let i = 0; i < this.size; i++) largest = Math.max(largest, Math.abs(this.value(step, i)) || 0);
      this.panels.forEach(({ context, image }, panel) => {
        const block = this.columns * this.lines;
        for (let k = 0; k < block; k++) {
          const i = panel * block + k;
          const x = there ? (this.value(step, i) ?? 0) / largest : 0;
          const colour = x < 0 ? below : above;
          const heat = Number.isNaN(x) ? 1 : Math.sqrt(Math.abs(x));
          for (let c = 0; c < 3; c++) image.data[4 * k + c] = zero[c] + (colour[c] - zero[c]) * heat;
          image.data[4 * k + 3] = there ? 255 : 90;
        }
        context.putImageData(image, 0, 0);
      });
      if (this.face) {
        this.face.textContent = there ? this.value(step, 0).toFixed(2) : "";
        this.button.setAttribute("aria-label", `${this.title} ${this.face.textContent}`);
      }
    }

    /** Lights the numbers that are drawn i-th. */
    light(numbers, kind) {
      const block = this.columns * this.lines;
      for (const i of numbers) {
        const { lights } = this.panels[Math.floor(i / block)];
        const [line, column] = [Math.floor((i % block) / this.columns), i % this.columns];
        lights.append(make("i", { class: kind, style: `--line: ${line}; --column: ${column}` }));
      }
    }
  }

  class Picture {
    constructor(plan, rows) {
      Object.assign(this, { plan, rows });
      this.calls = plan.calls.flatMap((call, number) => (call.phase === "forward" ? [number] : []));
      this.maker = new Map(); // buffer -> the call that computes it
      plan.calls.forEach((call, number) => {
        for (const buffer of Object.values(call.computed)) this.maker.set(buffer, number);
      });
      this.nodes = new Map(); // call -> its element
      this.grids = [];
      this.showing = new Map(); // buffer -> the grids that show it
      this.levels = this.levelled();
      this.lines = document.createElementNS(SVG, "svg");
      this.lines.setAttribute("aria-hidden", "true");
      this.flow = make("div", { class: "living-flow" }, this.lines, ...this.levels.map((calls) => (
        make("div", { class: "living-level" }, ...calls.map((number) => this.node(number)))
      )));
      this.element = make("div", { class: "living-picture" }, this.flow);
      this.edges = this.calls.flatMap((to) => this.before(to).map((from) => ({ from, to, skips: this.level.get(to) - this.level.get(from) > 1 })));
      const columns = this.levels.reduce((sum, calls) => sum + Math.max(...calls.map((number) => this.width(number))) * (calls.length > 1 ? 2 : 1), 0);
      this.flow.style.setProperty("--all", String(columns));
      this.flow.style.setProperty("--gaps", String(this.levels.length + 1));
    }

    /** The calls whose results a call takes. */
    before(number) {
      const makers = Object.values(this.plan.calls[number].inputs).map(([buffer]) => this.maker.get(buffer));
      return [...new Set(makers.filter((maker) => maker !== undefined))];
    }

    /** The calls by the length of the longest way to them. */
    levelled() {
      this.level = new Map();
      const levels = [];
      for (const number of this.calls) {
        const level = Math.max(-1, ...this.before(number).map((from) => this.level.get(from))) + 1;
        this.level.set(number, level);
        (levels[level] = levels[level] || []).push(number);
      }
      return levels;
    }

    width(number) {
      return Math.max(...this.gridsOf(number).map((buffer) => {
        const { shape } = this.plan.buffers[buffer];
        const own = shape.slice(shape[0] === this.rows ? 1 : 0);
        return product([...own.slice(0, -2), ...own.slice(-1)]);
      }));
    }

    /** What is drawn of a call: what it keeps that has two axes of its own, such as probabilities, and its result. */
    gridsOf(number) {
      const { buffers, calls } = this.plan;
      const computed = Object.values(calls[number].computed);
      const kept = computed.filter((buffer) => buffers[buffer].role === "kept" && buffers[buffer].axes.filter(Boolean).length > 1);
      return [...kept, calls[number].output];
    }

    label(number) {
      const { calls, loss } = this.plan;
      const { label, operation, output } = calls[number];
      if (output === loss) return "loss";
      if (operation === "add") return "+";
      return label === calls[number - 1]?.label ? operation : label; // of two in a row, the second is another operation
    }

    /** The title of an array that a call computes. */
    title({ label, operation, output, computed }, buffer) {
      const name = label === operation ? label : `${label} (${operation})`;
      return buffer === output ? name : `${Object.keys(computed).find((letter) => computed[letter] === buffer)} of ${name}`;
    }

    node(number) {
      const { plan } = this;
      const call = plan.calls[number];
      const node = make("figure", { class: "living-node" }, make("figcaption", {}, this.label(number)));
      for (const buffer of this.gridsOf(number)) node.append(this.pair(buffer, this.title(call, buffer), false));
      const weights = make("div", { class: "living-weights" });
      for (const [buffer] of Object.values(call.inputs)) {
        if (plan.buffers[buffer].role === "parameter") weights.append(this.pair(buffer, plan.buffers[buffer].name, true));
      }
      if (weights.childElementCount) node.append(weights);
      this.nodes.set(number, node);
      return node;
    }

    /** An array, and its gradient if it has one. */
    pair(buffer, title, small) {
      const { plan, rows } = this;
      const pair = make("div", { class: "living-pair" });
      const gradient = plan.gradients[buffer];
      for (const [place, isGradient] of [[[buffer, null], false], [gradient, true]]) {
        if (!place) continue;
        const grid = new Grid(plan, buffer, place, { rows, small, title: isGradient ? `gradient of ${title}` : title, gradient: isGradient });
        const button = make("button", { type: "button", class: "living-array", "aria-label": `${grid.title}, ${grid.shape.join(" by ")}`, tabindex: "-1" }, grid.element);
        Object.assign(button, { grid });
        grid.button = button;
        this.grids.push(grid);
        this.showing.set(place[0], [...(this.showing.get(place[0]) || []), grid]);
        pair.append(button);
      }
      return pair;
    }

    draw(step, ready = () => true) {
      const style = getComputedStyle(this.element);
      const colour = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
      const dark = style.colorScheme === "dark" || (style.colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
      const colours = (...names) => names.map((name) => colour(`--${name}-${dark ? "dark" : "light"}`));
      const [value, gradient] = [colours("zero", "value", "value-below"), colours("zero", "gradient", "gradient-below")];
      for (const grid of this.grids) grid.draw(step, grid.gradient ? gradient : value, ready(grid.buffer));
    }

    unmark() {
      for (const light of this.element.querySelectorAll(".living-lights > i")) light.remove();
    }

    /** Lights the numbers at these positions of a buffer, wherever they are drawn. */
    mark(buffer, positions, kind) {
      for (const grid of this.showing.get(buffer) || []) {
        const wanted = new Set(positions);
        const drawn = [];
        for (let i = 0; i < grid.size; i++) if (wanted.has(grid.at(i))) drawn.push(i);
        grid.light(drawn, kind);
      }
    }

    /** Draws the lines between the calls, from their places on the screen; skips go around what they skip. */
    connect() {
      const { flow, lines } = this;
      const origin = flow.getBoundingClientRect();
      lines.setAttribute("width", flow.scrollWidth);
      lines.setAttribute("height", flow.scrollHeight);
      lines.replaceChildren();
      const down = getComputedStyle(flow).flexDirection === "column";
      const box = (number) => {
        const { left, top, right, bottom } = this.nodes.get(number).getBoundingClientRect();
        return { left: left - origin.left, top: top - origin.top, right: right - origin.left, bottom: bottom - origin.top };
      };
      let lane = 0;
      const right = Math.max(...this.calls.map((number) => box(number).right));
      for (const edge of this.edges) {
        const [a, b] = [box(edge.from), box(edge.to)];
        let path;
        if (down) {
          const [x1, x2] = [(a.left + a.right) / 2, (b.left + b.right) / 2];
          const side = Math.min(flow.clientWidth - 5, right + 40) - 6 * (lane % 2);
          path = edge.skips
            ? `M${a.right},${a.bottom - 12} C${side},${a.bottom - 12} ${side},${a.bottom} ${side},${a.bottom + 20} L${side},${b.top - 12} C${side},${b.top + 8} ${side},${b.top + 12} ${b.right},${b.top + 14}`
            : `M${x1},${a.bottom} C${x1},${a.bottom + 14} ${x2},${b.top - 14} ${x2},${b.top}`;
        } else {
          const [y1, y2] = [a.top + 30, b.top + 30];
          const level = this.levels.slice(this.level.get(edge.from), this.level.get(edge.to) + 1).flat();
          const top = Math.min(...level.map((number) => box(number).top)) - 14;
          const bottom = Math.max(...level.map((number) => box(number).bottom)) + 10;
          const [x1, x2] = [(a.left + a.right) / 2, (b.left + b.right) / 2];
          const isLow = this.levels[this.level.get(edge.from)].indexOf(edge.from) > 0;
          path = edge.skips && isLow
            ? `M${x1},${a.bottom} C${x1},${bottom} ${a.right},${bottom} ${a.right + 20},${bottom} L${b.left - 20},${bottom} C${b.left},${bottom} ${x2},${bottom} ${x2},${b.bottom}`
            : edge.skips
            ? `M${x1},${a.top} C${x1},${top} ${a.right},${top} ${a.right + 20},${top} L${b.left - 20},${top} C${b.left},${top} ${x2},${top} ${x2},${b.top}`
            : `M${a.right},${y1} C${a.right + 12},${y1} ${b.left - 12},${y2} ${b.left},${y2}`;
        }
        lane += edge.skips ? 1 : 0;
        edge.path = document.createElementNS(SVG, "path");
        edge.path.setAttribute("d", path);
        edge.path.setAttribute("class", edge.skips ? "skip" : "");
        edge.path.setAttribute("pathLength", "100");
        lines.append(edge.path);
      }
    }

    /** The call whose result has this buffer as its gradient: where an array is used twice, a sum of two gradients. */
    summed(buffer) {
      const entry = Object.entries(this.plan.gradients).find(([, [gradient]]) => gradient === buffer);
      return entry && this.maker.get(Number(entry[0]));
    }

    /** Shows which call runs: phase is "forward" or "backward"; null for none. */
    now(number, phase) {
      for (const node of this.nodes.values()) node.classList.remove("forward", "backward");
      for (const { path } of this.edges) if (path) path.classList.remove("forward", "backward");
      if (number === null) return;
      const call = this.plan.calls[number];
      const shown = phase === "forward" ? number : call.forward ?? this.summed(call.output);
      if (this.nodes.has(shown)) this.nodes.get(shown).classList.add(phase);
      for (const edge of this.edges) if (edge.to === shown && edge.path) edge.path.classList.add(phase);
    }
  }

  Object.assign(globalThis.Living, { Picture });
})();
