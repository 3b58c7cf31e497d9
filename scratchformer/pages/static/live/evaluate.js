/* Evaluates a derivation in the page, element by element, from the syntax tree that Python's parser made.

   const model = Live.model(data);     data: {items, arrays, shapes, inputs, outputs, gradients, mistakes}, see docs/_ext/live.py
   model.set("q", 3, 0.5);             the number at a flat, row-major position
   model.run();                        every equation, in order
   model.values.get("dk").data         what they give
   model.terms(line, position)         the terms of one number, and the entries that it was computed from
   model.errors(numbers, "q")          how far they are from the derivatives of the loss by an input */
"use strict";

(function () {
  const COMPARE = {
    "=": (a, b) => a === b, "≠": (a, b) => a !== b, "<": (a, b) => a < b,
    "≤": (a, b) => a <= b, ">": (a, b) => a > b, "≥": (a, b) => a >= b,
  };
  const CALL = {
    exp: Math.exp, log: Math.log, log1p: Math.log1p, sqrt: Math.sqrt, tanh: Math.tanh, sin: Math.sin, cos: Math.cos,
    max: Math.max, min: Math.min, erf,
  };
  const BINARY = {
    "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b, "^": Math.pow,
    mod: (a, b) => a - b * Math.floor(a / b),
  };
  const UNARY = { neg: (a) => -a, floor: Math.floor, abs: Math.abs, group: (a) => a };
  const SLOPES = [ // shifts, and the weights of what f changes by there; the first is right to 1e-13
    [[1e-3, 8e3 / 12], [-1e-3, -8e3 / 12], [2e-3, -1e3 / 12], [-2e-3, 1e3 / 12]],
    ...[-1e-5, 1e-5, -1e-8, 1e-8].map((h) => [[h, 2 / h], [2 * h, -1 / 2 / h]]), // from below and from above
  ];
  const SIDES = [1, 2, 3, 4]; // they differ where there is no derivative, such as at the corner of relu
  const LEAD = ""; // the slot of the position within the leading axes

  /** The error function, to the last digits: a series of positive terms near 0, a continued fraction elsewhere. */
  function erf(x) {
    const a = Math.abs(x);
    if (a > 6) return Math.sign(x);
    const scale = Math.exp(-a * a) / Math.sqrt(Math.PI);
    let y;
    if (a < 2.5) {
      let term = 2 * a;
      let sum = term;
      for (let k = 1; term > sum * 1e-17; k++) sum += term *= (2 * a * a) / (2 * k + 1);
      y = scale * sum;
    } else {
      let fraction = a;
      for (let k = 60; k > 0; k--) fraction = a + k / 2 / fraction;
      y = 1 - scale / fraction;
    }
    return x < 0 ? -y : y;
  }

  /** The least difference from slopes of this size; 0 where the slopes differ, so that there is no derivative. */
  function gap(differences, size) {
    const steady = Math.max(...differences) - Math.min(...differences) <= 1e-3 * Math.max(size, 1e-2);
    return steady || differences.length === 1 ? Math.min(...differences.map(Math.abs)) : 0;
  }

  const largest = (numbers) => numbers.reduce((m, x) => (Number.isFinite(x) ? Math.max(m, Math.abs(x)) : m), 0);
  const plain = (letter) => letter.replace(/'+$/, "");
  const size = (shape) => shape.reduce((a, b) => a * b, 1);
  /** The indices of a flat position. */
  const indicesAt = (shape, position) => shape.map((n, i) => Math.floor(position / size(shape.slice(i + 1))) % n);
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const children = (node) => (Array.isArray(node) ? node.filter(Array.isArray) : []);

  /** Calls visit on a node and all below it; what is not a node (lists of nodes or conditions) is passed through. */
  function walk(node, visit) {
    if (typeof node[0] === "string") visit(node);
    for (const child of children(node)) walk(child, visit);
  }

  /** The names in nodes. */
  const named = (nodes) => nodes.flatMap((node) => [...(node[0] === "name" ? [node] : []), ...named(children(node))]);

  const isEquality = (relation) => relation === "=" || relation === ":=";
  const isPartial = (node) => node[0] === "partial";
  const hasPartial = (node) => isPartial(node) || children(node).some(hasPartial);

  /** The letters that a node leaves free. */
  function free(node, bound = new Set(), found = new Set()) {
    if (node[0] === "idx" && !bound.has(node[1])) found.add(node[1]);
    if (node[0] === "over" && node[1] !== "softmax") bound = new Set([...bound, ...node[2]]);
    for (const child of children(node)) free(child, bound, found);
    return found;
  }

  class Model {
    constructor(data) {
      this.data = data;
      this.values = new Map();
      for (const [name, array] of Object.entries(data.arrays)) {
        const data = array.data instanceof Float64Array ? array.data : Float64Array.from(array.data, Number);
        this.values.set(name, { shape: array.shape, data });
      }
      for (const [name, shape] of Object.entries(data.shapes || {})) {
        this.values.set(name, { shape, data: new Float64Array(size(shape)) });
      }
      this.inputs = data.inputs || [];
      this.aliases = new Map();
      this.sizes = new Map(Object.entries(data.sizes || {}));
      this.trace = null;
      this.slope = 0; // which of SLOPES a partial derivative is
      this.plant(null);
    }

    /** The lines, with one of the known mistakes in the place of its equation (or none of them). */
    plant(mistake) {
      const equations = this.data.items.map((item) => item.equation);
      this.lines = equations.map((equation, i) => {
        const wrong = mistake && mistake.line === i ? mistake.equation : null;
        return new Line(this, i, wrong || equation, wrong && equation);
      });
      this.findDefinitions();
      this.run();
    }

    array(name) {
      return this.values.get(this.resolve(name));
    }

    /** Which lines compute which name; the lines are compiled in an order in which every name is known. */
    findDefinitions() {
      const planted = this.lines.filter((line) => line.right);
      const lines = [...planted, ...this.lines.filter((line) => !line.right)];
      for (const line of lines) {
        if (!line.isShortName()) continue;
        const [short, name] = line.parts.map((part) => part[1]);
        this.aliases.set(short, name);
        if (this.inputs.includes(name)) this.aliases.set(`d${short}`, `d${name}`);
      }
      this.computing = new Map();
      const offer = (line) => {
        const name = line.isShortName() || line.source() < 0 ? null : line.target();
        if (name === null || name in this.data.arrays) return;
        this.computing.set(name, [...(this.computing.get(name) || []), line]);
      };
      lines.filter((line) => !line.needsDerivative()).forEach(offer);
      // What only a line with a partial derivative computes: the last one, which says most.
      const others = lines.filter((line) => line.needsDerivative() && !this.computing.has(line.target()));
      new Map(others.map((line) => [line.target(), line])).forEach(offer);
      this.order = [];
      const seen = new Set();
      const visit = (line) => {
        if (seen.has(line)) return;
        seen.add(line);
        for (const name of line.mentions()) {
          if (name !== line.target()) for (const before of this.computing.get(name) || []) visit(before);
        }
        this.order.push(line);
      };
      lines.forEach(visit);
      for (const line of this.lines) line.learnSizes();
      for (const [name, letters] of Object.entries(this.data.axes || {})) {
        letters.forEach((letter, i) => { if (letter && !this.sizes.has(letter)) this.sizes.set(letter, this.array(name).shape[i]); });
      }
      for (const line of this.order) line.compile();
      this.known = new Map();
    }

    resolve(name) {
      return this.aliases.get(name) || name;
    }

    set(name, position, value) {
      this.array(name).data[position] = value;
    }

    /** Computes every line, after working out where each holds now: "for k_n = 1" depends on the numbers. */
    run() {
      this.known.clear();
      this.defined = new Map(); // name -> which of its elements a line computes
      for (const line of this.order) {
        line.fit();
        line.define();
      }
    }

    /** L = Σ dy y, over every output that has a gradient. */
    loss() {
      let sum = 0;
      for (const [y, dy] of this.data.outputs) {
        const [a, b] = [this.array(y).data, this.array(dy).data];
        for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
      }
      return sum;
    }

    /** The lines that compute `names`, as far as they depend on `source`, in order. */
    between(source, names) {
      const reached = new Set([source]);
      const forward = this.order.filter((line) => {
        const depends = line.defines && line.name !== source && line.reads().some((name) => reached.has(name));
        if (depends) reached.add(line.name);
        return depends;
      });
      const needed = new Set(names);
      const path = [];
      for (const line of forward.reverse()) {
        if (!needed.has(line.name)) continue;
        path.unshift(line);
        for (const name of line.reads()) needed.add(name);
      }
      return path;
    }

    /** Adds each of `shifts` to each element of `source` in turn, and calls visit(position, what read() gives each time). */
    perturb(source, names, shifts, read, visit) {
      const { data } = this.array(source);
      const path = this.between(source, names);
      const kept = path.map((line) => this.values.get(line.name).data.slice());
      const { trace } = this;
      this.trace = null;
      data.forEach((old, i) => {
        const found = shifts.map((shift) => {
          data[i] = old + shift;
          for (const line of path) line.define();
          return read();
        });
        data[i] = old;
        visit(i, found);
      });
      path.forEach((line, i) => this.values.get(line.name).data.set(kept[i]));
      this.trace = trace;
    }

    /** ∂a/∂b for all their elements: row-major, a's position first. */
    slopes(a, b, number = this.slope) {
      const key = `${a}/${b} ${number}`;
      if (!this.known.has(key)) {
        const isLoss = a === "L" && !this.values.has("L");
        const names = isLoss ? this.data.outputs.map(([y]) => y) : [a];
        const read = isLoss ? () => [this.loss()] : () => this.array(a).data.slice();
        const columns = this.array(b).data.length;
        const middle = read();
        const slopes = new Float64Array(middle.length * columns);
        this.perturb(b, names, SLOPES[number].map(([shift]) => shift), read, (i, found) => {
          found.forEach((values, k) => values.forEach((value, j) => { slopes[j * columns + i] += SLOPES[number][k][1] * (value - middle[j]); }));
        });
        this.known.set(key, slopes);
      }
      return this.known.get(key);
    }

    /** How far numbers are from the derivatives of the loss by an array. */
    errors(numbers, of) {
      const sides = SIDES.map((number) => this.slopes("L", of, number));
      return Array.from(numbers, (x, i) => gap(sides.map((slopes) => x - slopes[i]), largest(sides.map((slopes) => slopes[i]))));
    }

    terms(number, position) {
      return this.lines[number].terms(position);
    }

    /** The name by which the equations call an array. */
    label(name) {
      for (const [short, long] of this.aliases) if (long === name) return short;
      return name;
    }
  }

  /** One equation. Its letters are slots of an environment `e`, an object from letter to number. */
  class Line {
    constructor(model, number, equation, right) {
      Object.assign(this, { model, number, equation, right, parts: equation.parts, defines: false });
      this.withs = new Map(equation.with || []);
      this.closures = new Map();
    }

    /** The name on the left, or null. */
    target() {
      return this.parts[0][0] === "name" ? this.model.resolve(this.parts[0][1]) : null;
    }

    /** Whether it only gives a short name, such as u := content_bias. */
    isShortName() {
      const whole = this.parts.every((part) => part[0] === "name" && part[2].length === 0);
      return whole && this.equation.relations.join() === ":=";
    }

    /** The part that computes the left side: the first without a partial derivative, if there is one; of a mistake, the
        part that is wrong. */
    source() {
      const equal = this.parts.map((_, i) => i > 0 && isEquality(this.equation.relations[i - 1]));
      const wrong = this.right ? this.parts.findIndex((part, i) => equal[i] && !same(part, this.right.parts[i])) : -1;
      if (wrong >= 0) return wrong;
      const plainly = this.parts.findIndex((part, i) => equal[i] && !hasPartial(part));
      return plainly >= 0 ? plainly : equal.lastIndexOf(true);
    }

    needsDerivative() {
      return !this.right && this.source() >= 0 && hasPartial(this.parts[this.source()]);
    }

    /** The names that the computing part needs. */
    reads() {
      return this.namesIn([this.parts[this.source()] || [], ...this.withs.values()]);
    }

    /** The names that stand anywhere in the line. */
    mentions() {
      return this.namesIn([...this.parts, ...this.withs.values(), ...(this.equation.for || [])]);
    }

    /** A node of the line that stands for `name`. */
    find(name) {
      return named(this.parts).find((node) => this.model.resolve(node[1]) === name) || null;
    }

    namesIn(nodes) {
      return [...new Set(named(nodes).map((node) => this.model.resolve(node[1])))];
    }

    compile() {
      if (this.isShortName()) return;
      const { model } = this;
      const [left] = this.parts;
      const source = this.source();
      this.lead = this.leadingAxes();
      this.shown = source > 0 && (left[0] === "name" || isPartial(left)) ? source : 0;
      const all = new Set(this.parts.flatMap((part) => [...free(part)]));
      for (const letter of this.withs.keys()) all.delete(letter);
      const own = left[0] === "name" || isPartial(left) ? free(left) : all;
      this.letters = [...own].filter((letter) => all.has(letter));
      const loose = [...all].filter((letter) => !own.has(letter));
      if (loose.length) throw this.error(`the left side lacks the index ${loose.join(", ")}`);
      this.name = this.target();
      this.computing = (model.computing.get(this.name) || []).includes(this);
      this.conditions = this.equation.for || [];
      this.fits = this.all(this.conditions);
      this.enumerate();
      this.functions = this.parts.map((part) => this.closure(part));
    }

    /** Where the equation holds now, and which elements are this line's. */
    fit() {
      if (this.isShortName()) return;
      if (named(this.conditions).length) this.enumerate();
      if (this.computing) this.claim();
    }

    error(message) {
      return new Error(`${this.model.data.items[this.number].text}: ${message}`);
    }

    /** A letter has one size in the whole derivation, with and without primes. */
    learnSizes() {
      for (const node of this.arrays()) {
        const { axes } = this.layout(node);
        node[2].forEach((index, i) => {
          const letter = index[0] === "idx" ? plain(index[1]) : null;
          if (letter !== null && !this.model.sizes.has(letter)) this.model.sizes.set(letter, axes[i]);
        });
      }
    }

    /** The leading axes that the equation's arrays share. */
    leadingAxes() {
      let lead = [];
      for (const node of this.arrays()) {
        lead = broadcast(lead, this.layout(node).leading, () => this.error(`the leading axes of ${node[1]} do not fit`));
      }
      return lead;
    }

    /** The nodes of the line that stand for a known array. */
    arrays() {
      const everywhere = [...this.parts, ...this.withs.values(), ...(this.equation.for || [])];
      return named(everywhere).filter((node) => this.model.array(node[1]));
    }

    isSize(node) {
      return node[2].length === 0 && /^[A-Z]$/.test(node[1]) && !this.model.array(node[1]);
    }

    /** The sizes of the axes that have an index (n: all leading axes as one), and of those that have none. */
    layout(node) {
      const { shape } = this.model.array(node[1]);
      const extra = shape.length - node[2].length;
      if (extra < 0) throw this.error(`${node[1]} has ${shape.length} axes, and ${node[2].length} indices`);
      const [first] = node[2];
      if (first && first[0] === "idx" && plain(first[1]) === "n") {
        return { axes: [size(shape.slice(0, extra + 1)), ...shape.slice(extra + 1)], leading: [] };
      }
      return { axes: shape.slice(extra), leading: shape.slice(0, extra) };
    }

    size(letter) {
      const n = this.model.sizes.get(plain(letter));
      if (n === undefined) throw this.error(`the size of the index ${letter} is not known`);
      return n;
    }

    /** All environments of the equation's letters, and the positions of its numbers in the array that it shows. */
    enumerate() {
      const shape = [...this.lead, ...this.letters.map((letter) => this.size(letter))];
      if (this.name === null) this.own = { shape, data: new Float64Array(size(shape)) };
      const position = this.name === null ? null : this.position(this.parts[0]);
      this.environments = [];
      this.positions = [];
      const block = size(shape.slice(this.lead.length));
      for (let k = 0; k < size(shape); k++) {
        const e = { [LEAD]: Math.floor(k / block) };
        indicesAt(shape, k).slice(this.lead.length).forEach((index, i) => { e[this.letters[i]] = index; });
        const p = position === null ? k : position(e);
        if (p < 0 || !this.fits(e)) continue;
        this.environments.push(e);
        this.positions.push(p);
      }
      this.at = new Map(this.positions.map((p, i) => [p, i]));
    }

    /** This line computes the elements of its left side that no line before it computes. */
    claim() {
      const { model } = this;
      const array = model.values.get(this.name);
      if (!model.defined.has(this.name)) model.defined.set(this.name, new Uint8Array(array.data.length));
      const taken = model.defined.get(this.name);
      this.mine = this.positions.map((p, i) => i).filter((i) => !taken[this.positions[i]]);
      this.defines = this.mine.length > 0;
      for (const i of this.mine) taken[this.positions[i]] = 1;
    }

    define() {
      if (!this.defines) return;
      const { data } = this.model.values.get(this.name);
      const f = this.functions[this.shown];
      for (const i of this.mine) data[this.positions[i]] = f(this.environments[i]);
    }

    /** What the line shows: the array of its left side, or the values of its computing part. */
    result() {
      if (this.isShortName()) return null;
      if (this.name !== null && this.model.values.has(this.name)) return this.model.values.get(this.name);
      this.environments.forEach((e, i) => { this.own.data[this.positions[i]] = this.functions[this.shown](e); });
      return this.own;
    }

    /** The largest difference between the parts, relative to the largest number among them and the arrays they are of. */
    disagreement() {
      if (this.isShortName()) return 0;
      const { model } = this;
      const slopes = this.parts.some(hasPartial) ? SIDES : [0];
      let worst = 0;
      let scale = this.mentions().reduce((m, name) => Math.max(m, largest((this.model.array(name) || { data: [] }).data)), 0);
      const { relations } = this.equation;
      for (const e of this.environments) {
        const each = slopes.map((number) => {
          model.slope = number;
          return this.functions.map((f) => f(e));
        });
        relations.forEach((relation, i) => {
          const pairs = each.map((values) => values.slice(i, i + 2));
          const size = largest(pairs.flat());
          if (isEquality(relation)) worst = Math.max(worst, gap(pairs.map(([a, b]) => (a === b ? 0 : a - b)), size));
          else if (!COMPARE[relation](...pairs[0])) worst = Infinity;
          scale = Math.max(scale, size);
        });
      }
      model.slope = 0;
      return scale > 0 ? worst / scale : worst;
    }

    closure(node) {
      if (!this.closures.has(node)) this.closures.set(node, this.build(node));
      return this.closures.get(node);
    }

    all(conditions) {
      const tests = conditions.map(([relation, a, b]) => {
        const [compare, f, g] = [COMPARE[relation], this.closure(a), this.closure(b)];
        return (e) => compare(f(e), g(e));
      });
      return (e) => tests.every((test) => test(e));
    }

    build(node) {
      const [kind] = node;
      if (kind === "num") return ((value) => () => value)(node[1] === null ? Infinity : node[1]);
      if (kind === "idx") return this.buildIndex(node[1]);
      if (kind === "name") return this.buildName(node);
      if (kind === "bracket") return ((test) => (e) => (test(e) ? 1 : 0))(this.all(node[1]));
      if (kind === "delta") {
        const [a, b] = [this.closure(node[1]), this.closure(node[2])];
        return (e) => (a(e) === b(e) ? 1 : 0);
      }
      if (kind === "call") {
        const [f, args] = [CALL[node[1]], node[2].map((arg) => this.closure(arg))];
        return args.length === 1 ? (e) => f(args[0](e)) : (e) => f(...args.map((arg) => arg(e)));
      }
      if (kind === "over") return this.buildOver(node);
      if (kind === "cases") {
        const cases = node[1].map(([value, conditions]) => [this.closure(value), this.all(conditions)]);
        const otherwise = this.closure(node[2]);
        return (e) => (cases.find(([, test]) => test(e)) || [otherwise])[0](e);
      }
      if (kind === "partial") return this.buildPartial(node);
      if (kind in UNARY) return ((f, a) => (e) => f(a(e)))(UNARY[kind], this.closure(node[1]));
      if (kind in BINARY) return ((f, a, b) => (e) => f(a(e), b(e)))(BINARY[kind], this.closure(node[1]), this.closure(node[2]));
      throw this.error(`${kind} is not known`);
    }

    /** A letter of a "with" clause has its value, unless a sum around it runs over the letter. */
    buildIndex(letter) {
      if (!this.withs.has(letter)) return (e) => e[letter];
      const f = this.closure(this.withs.get(letter));
      return (e) => (e[letter] === undefined ? f(e) : e[letter]);
    }

    buildName(node) {
      if (this.isSize(node)) {
        const letter = node[1].toLowerCase();
        const n = this.size(letter);
        return () => n;
      }
      const name = this.model.resolve(node[1]);
      const position = this.position(node);
      const { model } = this;
      const array = model.values.get(name);
      return (e) => {
        const p = position(e);
        if (p < 0) return NaN;
        if (model.trace) model.trace.set(`${name} ${p}`, [name, p]);
        return array.data[p];
      };
    }

    /** The flat position of an indexed name; −1 outside of the array. */
    position(node) {
      if (!this.model.array(node[1])) throw this.error(`${node[1]} is not known`);
      const { axes, leading } = this.layout(node);
      const indices = node[2].map((index) => this.closure(index));
      const strides = axes.map((_, i) => size(axes.slice(i + 1)));
      const starts = offsets(this.lead, leading, size(axes));
      return (e) => {
        let p = starts[e[LEAD]];
        for (let i = 0; i < indices.length; i++) {
          const k = indices[i](e);
          if (!(k >= 0 && k < axes[i])) return -1;
          p += k * strides[i];
        }
        return p;
      };
    }

    buildOver(node) {
      const [, kind, , body, conditions] = node;
      const f = this.closure(body);
      const each = this.each(node);
      if (kind === "sum") return (e) => { let s = 0; each(e, () => { s += f(e); }); return s; };
      if (kind === "prod") return (e) => { let s = 1; each(e, () => { s *= f(e); }); return s; };
      if (kind === "mean") return (e) => { let [s, n] = [0, 0]; each(e, () => { s += f(e); n++; }); return s / n; };
      if (kind === "max") return (e) => { let m = -Infinity; each(e, () => { m = Math.max(m, f(e)); }); return m; };
      if (kind === "min") return (e) => { let m = Infinity; each(e, () => { m = Math.min(m, f(e)); }); return m; };
      if (kind === "argmax") {
        const [letter] = node[2];
        return (e) => {
          let [m, at] = [-Infinity, 0];
          each(e, () => { const value = f(e); if (value > m) [m, at] = [value, e[letter]]; });
          return at;
        };
      }
      const test = this.all(conditions || []);
      return (e) => {
        if (!test(e)) return 0;
        const own = f(e);
        let [m, sum] = [-Infinity, 0];
        each(e, () => { m = Math.max(m, f(e)); });
        each(e, () => { sum += Math.exp(f(e) - m); });
        return Math.exp(own - m) / sum;
      };
    }

    /** A loop over the letters of a sum, in the environment itself, which is left as it was. */
    each(node) {
      const [, , letters, , conditions = []] = node;
      const sizes = letters.map((letter) => this.bound(letter, conditions));
      const test = this.all(conditions);
      const loop = (e, visit, i) => {
        if (i === letters.length) {
          if (test(e)) visit(e);
          return;
        }
        const letter = letters[i];
        const old = e[letter];
        const n = sizes[i](e);
        for (let k = 0; k < n; k++) {
          e[letter] = k;
          loop(e, visit, i + 1);
        }
        e[letter] = old;
      };
      return (e, visit) => loop(e, visit, 0);
    }

    /** The size of a letter that is summed over; if no array tells it, its upper bound does. */
    bound(letter, conditions) {
      const above = conditions.find(([relation, a]) => "<≤".includes(relation) && a[0] === "idx" && a[1] === letter);
      if (this.model.sizes.has(plain(letter)) || !above) {
        const n = this.size(letter);
        return () => n;
      }
      const [f, more] = [this.closure(above[2]), above[0] === "≤" ? 1 : 0];
      return (e) => f(e) + more;
    }

    buildPartial([, a, b]) {
      const { model } = this;
      const [above, below] = [model.resolve(a[1]), model.resolve(b[1])];
      const isLoss = above === "L" && !model.values.has("L");
      const row = isLoss ? () => 0 : this.position(a);
      const column = this.position(b);
      return (e) => {
        const [i, j] = [row(e), column(e)];
        if (i < 0 || j < 0) return NaN;
        return model.slopes(above, below)[i * model.array(below).data.length + j];
      };
    }

    /** The number at a position of what the line shows: its terms, and the entries it was made of. */
    terms(position) {
      const i = this.at.get(position);
      if (i === undefined) return null;
      const [node, e] = [this.parts[this.shown], { ...this.environments[i] }];
      return { ...this.traced(() => this.closure(node)(e)), line: this, e, node, terms: this.expand(node, e) };
    }

    /** What compute gives, and the entries of arrays that it reads. */
    traced(compute) {
      const { model } = this;
      model.trace = new Map();
      const value = compute();
      const entries = [...model.trace.values()];
      model.trace = null;
      return { value, entries };
    }

    /** A node as terms {sign, factors: [{node, e, inverse}], value, entries} that add up to it. Sums are expanded, nothing
        else. */
    expand(node, e) {
      return this.split(node, e).map((term) => ({ ...term, ...this.traced(() => term.factors.reduce((product, factor) => {
        const value = this.closure(factor.node)(factor.e);
        return factor.inverse ? product / value : product * value;
      }, term.sign)) }));
    }

    /** The terms of a sum over an index; of another function over one, such as a maximum, the numbers that it is of. */
    within(node, e) {
      const [, kind, , body] = node;
      if (kind === "sum" || kind === "mean") return this.expand(node, e);
      const numbers = [];
      this.each(node)(e, () => numbers.push({ ...atom(body, e)[0], ...this.traced(() => this.closure(body)(e)) }));
      return numbers;
    }

    split(node, e) {
      const [kind, a, b] = node;
      const negative = (terms) => terms.map((term) => ({ ...term, sign: -term.sign }));
      if (kind === "group") return isSum(a) || isProduct(a) ? this.split(a, e) : atom(node, e);
      if (kind === "neg") return negative(this.split(a, e));
      if (kind === "+") return [...this.split(a, e), ...this.split(b, e)];
      if (kind === "-") return [...this.split(a, e), ...negative(this.split(b, e))];
      if (kind === "*") return times(isSum(a) && !isSum(b) ? this.split(a, e) : this.whole(a, e), isSum(b) ? this.split(b, e) : this.whole(b, e));
      if (kind === "/") return times(isSum(a) ? this.split(a, e) : this.whole(a, e), atom(b, e, true));
      if (kind === "cases") return this.split((a.find(([, conditions]) => this.all(conditions)(e)) || [b])[0], e);
      if (kind === "over" && (a === "sum" || a === "mean")) {
        const found = [];
        let count = 0;
        this.each(node)(e, () => { count++; found.push(...this.split(node[3], e)); });
        return a === "sum" ? found : times(found, atom(["num", count, String(count)], e, true));
      }
      return atom(node, e);
    }

    /** A factor that is left as it is, unless it is a product itself. */
    whole(node, e) {
      return isPlus(node) || isSum(node) ? atom(node, e) : this.split(node, e);
    }
  }

  /** A term with one factor, or with one divisor. */
  const atom = (node, e, inverse = false) => [{ sign: 1, factors: [{ node, e: { ...e }, inverse }] }];
  /** The products of each term of one list with each of another. */
  const times = (left, right) => left.flatMap((a) => right.map((b) => ({ sign: a.sign * b.sign, factors: [...a.factors, ...b.factors] })));
  const isPlus = (node) => node[0] === "+" || node[0] === "-" || (node[0] === "group" && isPlus(node[1]));
  const isProduct = (node) => node[0] === "*" || node[0] === "/" || node[0] === "neg";
  /** Whether a sum can be reached through products, quotients and parentheses alone. */
  function isSum(node) {
    const [kind, a, b] = node;
    if (kind === "over") return a === "sum" || a === "mean";
    if (kind === "group" || kind === "neg" || kind === "/") return isSum(a);
    return ["+", "-", "*"].includes(kind) && (isSum(a) || isSum(b));
  }

  function broadcast(a, b, error) {
    const rank = Math.max(a.length, b.length);
    const pad = (shape) => [...Array(rank - shape.length).fill(1), ...shape];
    const [x, y] = [pad(a), pad(b)];
    return x.map((n, i) => {
      if (n !== y[i] && n !== 1 && y[i] !== 1) throw error();
      return Math.max(n, y[i]);
    });
  }

  /** For each position in the leading axes `lead`, where an array begins whose own leading axes are `leading`. */
  function offsets(lead, leading, block) {
    const strides = leading.map((n, i) => (n > 1 ? block * size(leading.slice(i + 1)) : 0));
    const start = (own) => own.reduce((sum, k, i) => sum + k * strides[i], 0);
    return Array.from({ length: size(lead) }, (_, l) => start(indicesAt(lead, l).slice(lead.length - leading.length)));
  }

  window.Live = { model: (data) => new Model(data), erf, largest, indicesAt, walk, free, hasPartial };
})();
