/* Reads an answer: an expression in the notation of docs/notation.md, as the tree that live/evaluate.js evaluates.

   Live.parse("y_k (dy_k - sum_i dy_i y_i)", names, letters)     names: the known arrays, in ASCII
                                                                 letters: the indices on the left of the equation
   Throws an Error that says where it cannot be read. Cases, "for", "with" and ∂ are no part of an answer. */
"use strict";

(function () {
  const TOKEN = new RegExp([
    "(?<number>\\d+(?:\\.\\d+)?(?:e-?\\d+)?|[½π∞])", "(?<power>⁻¹|[²³⁴])", "(?<relation><=|>=|!=|[=<>≤≥≠])",
    "(?<sign>\\*\\*|[-−+/·*^()\\[\\]{},√⌊⌋Σ])", "(?<word>\\p{L}\\u0302?(?:[\\p{L}\\d]\\u0302?)*)",
    "_(?<indices>(?:[a-z]['’′]*)*)", "(?<prime>['’′]+)",
  ].join("|"), "uy");
  const SAME = { "−": "-", "*": "·", "**": "^", "<=": "≤", ">=": "≥", "!=": "≠" };
  const NUMBERS = { "½": 0.5, "π": Math.PI, pi: Math.PI, "∞": null, inf: null }; // null: JSON has no infinity
  const POWERS = { "²": 2, "³": 3, "⁴": 4, "⁻¹": -1 };
  const CALLS = ["exp", "log", "log1p", "sqrt", "tanh", "sin", "cos", "erf", "max", "min", "abs", "floor"];
  const OVER = ["sum", "prod", "mean", "max", "min", "argmax", "softmax"];
  const REFUSED = {
    "∂": "write the answer without ∂", partial: "write the answer without ∂",
    for: 'leave out "for": the answer must hold for all indices; use δ or [...] instead',
    with: 'leave out "with": write what the letter stands for',
    where: "cases are not read here: [i = k] is 1 where i = k, and 0 elsewhere",
  };
  const FACTOR = 'a number, a name, "(", "[" or Σ';
  const ASCII = Object.fromEntries(Object.entries(Live.GREEK).map(([name, letter]) => [letter, name]));

  const entry = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);

  /** The ASCII spelling of a name: γ is gamma, x̂ is xhat. */
  function canonical(name) {
    return Array.from(name.normalize("NFD"), (letter) => ASCII[letter] ?? letter).join("").replaceAll("\u0302", "hat");
  }

  function tokens(text) {
    const found = [];
    let at = 0;
    while (at < text.length) {
      TOKEN.lastIndex = at;
      const match = TOKEN.exec(text);
      if (match) {
        const [kind, part] = Object.entries(match.groups).find(([, each]) => each !== undefined);
        found.push({ kind, text: entry(SAME, part) ?? part, rest: text.slice(at) });
      } else if (text[at].trim()) {
        throw new Error(entry(REFUSED, text[at]) || `"${text[at]}" has no meaning here: type a/b, sqrt(a), sum_i, x_i^2, xhat, gamma`);
      }
      at += match ? match[0].length : 1;
    }
    return [...found, { kind: "end", text: "", rest: "" }];
  }

  /** Recursive descent over the tokens of one expression. */
  class Parser {
    constructor(text, names, letters) {
      Object.assign(this, { names, tokens: tokens(text), at: 0 });
      this.around = letters; // the indices of the left side and of the sums around what is read
      this.used = new Set(letters); // all letters that stand for an index somewhere
    }

    get next() {
      return this.tokens[this.at];
    }

    take() {
      return this.tokens[this.at++];
    }

    sees(...texts) {
      return this.next.kind !== "indices" && texts.includes(this.next.text);
    }

    accept(...texts) {
      return this.sees(...texts) ? this.take().text : null;
    }

    expect(text) {
      if (!this.accept(text)) this.fail(`"${text}"`);
    }

    fail(expected, { text, rest } = this.next) {
      throw new Error(entry(REFUSED, text) || `expected ${expected} ${rest ? `in place of "${rest}"` : "at the end"}`);
    }

    sum() {
      let node = this.accept("-") ? ["neg", this.product()] : this.product();
      while (this.sees("+", "-")) node = [this.take().text, node, this.product()];
      return node;
    }

    product() {
      let node = this.factor();
      while (this.sees("·", "/", "mod") || this.startsFactor()) {
        const sign = this.accept("·", "/", "mod") || "·";
        node = [sign === "·" ? "*" : sign, node, this.factor()];
      }
      return node;
    }

    startsFactor() {
      const { kind, text } = this.next;
      return kind === "number" || (kind === "word" && text !== "and" && !entry(REFUSED, text)) || this.sees("(", "[", "⌊", "√", "Σ");
    }

    factor() {
      const node = this.base();
      if (this.next.kind === "power") {
        const { text } = this.take();
        return ["^", node, ["num", POWERS[text], text]];
      }
      if (!this.accept("^")) return node;
      return ["^", node, this.accept("-") ? ["neg", this.base()] : this.base()];
    }

    base() {
      const token = this.take();
      const { kind, text } = token;
      if (Object.hasOwn(NUMBERS, text) && !this.names.includes(canonical(text))) return ["num", NUMBERS[text], text];
      if (kind === "number") return ["num", Number(text), text];
      if (kind === "word" && !entry(REFUSED, text)) return this.word(text);
      if (kind !== "sign") this.fail(FACTOR, token);
      if (text === "(") return this.closed("group", this.sum(), ")");
      if (text === "[") return this.closed("bracket", this.conditions(), "]");
      if (text === "⌊") return this.closed("floor", this.sum(), "⌋");
      if (text === "√") {
        const node = this.factor();
        return ["call", "sqrt", [node[0] === "group" ? node[1] : node]];
      }
      return text === "Σ" ? this.over("sum") : this.fail(FACTOR, token);
    }

    closed(kind, inside, end) {
      this.expect(end);
      return [kind, inside];
    }

    word(name) {
      const known = this.names.includes(canonical(name));
      const indexed = this.next.kind === "indices";
      if (!known && indexed && OVER.includes(name)) return this.over(name);
      if (CALLS.includes(name) && !indexed && (!known || this.sees("("))) return this.call(name);
      if (!known && OVER.includes(name)) throw new Error(`${name} needs the index that it runs over, as in ${name}_i(x_i)`);
      return this.indexed(canonical(name));
    }

    /** Expressions with commas between them. */
    list(start, end) {
      this.expect(start);
      const each = [this.sum()];
      while (this.accept(",")) each.push(this.sum());
      this.expect(end);
      return each;
    }

    call(name) {
      const inside = this.list("(", ")");
      const expected = name === "max" || name === "min" ? "two arguments" : "one argument";
      if (inside.length !== (expected === "one argument" ? 1 : 2)) throw new Error(`${name} takes ${expected}, got ${inside.length}`);
      return name === "abs" || name === "floor" ? [name, inside[0]] : ["call", name, inside];
    }

    /** A name with its indices, δ with two, or a letter that is an index or a name: see `resolved`. */
    indexed(name) {
      const indices = this.next.kind === "indices" ? this.indices() : [];
      for (const index of indices) Live.walk(index, ([kind, letter]) => { if (kind === "idx") this.used.add(letter); });
      if (indices.length === 2 && ["d", "delta"].includes(name) && !this.names.includes(name)) return ["delta", ...indices];
      if (indices.length || !/^[a-z]$/.test(name)) return ["name", name, indices];
      return ["idx", name + (this.next.kind === "prime" ? "'".repeat(this.take().text.length) : "")];
    }

    /** Lower-case letters, each with its primes, or expressions in braces. */
    indices() {
      const { text } = this.take();
      if (!text) return this.list("{", "}");
      return text.match(/[a-z]['’′]*/g).map((letter) => ["idx", letter.replace(/[’′]/g, "'")]);
    }

    conditions() {
      const conditions = [];
      do conditions.push(...this.condition(this.sum())); while (this.accept(",", "and"));
      return conditions;
    }

    /** One or more relations: 0 ≤ i < k. */
    condition(left) {
      if (this.next.kind !== "relation") this.fail("a relation such as ≤");
      const conditions = [];
      while (this.next.kind === "relation") {
        const relation = this.take().text;
        const right = this.sum();
        conditions.push([relation, left, right]);
        left = right;
      }
      return conditions;
    }

    /** A sum over _s, _{s,t} or _{s, s ≤ t}; the body of others, such as mean_c, is in parentheses. */
    over(kind) {
      if (this.next.kind !== "indices") this.fail('"_" and the index that it runs over');
      const nodes = this.next.text ? this.indices() : [];
      const conditions = [];
      if (!nodes.length) {
        this.take();
        this.expect("{");
        do {
          const node = this.sum();
          if (this.next.kind === "relation") conditions.push(...this.condition(node));
          else nodes.push(node);
        } while (this.accept(","));
        this.expect("}");
      }
      const letters = (nodes.length ? nodes : conditions.flat().slice(1, 2)).map(([node, letter]) => (node === "idx" ? letter : this.fail("an index letter")));
      const { around } = this;
      const again = kind !== "softmax" && letters.find((letter) => around.includes(letter));
      if (again) throw new Error(`${again} is an index of this equation already: in the ${kind}, write ${again}'`);
      letters.forEach((letter) => this.used.add(letter));
      this.around = [...around, ...letters];
      if (kind !== "sum") this.expect("(");
      const body = kind === "sum" ? this.product() : this.sum();
      if (kind !== "sum") this.expect(")");
      this.around = around;
      return ["over", kind, letters, body, conditions];
    }
  }

  /** The tree in which a letter on its own is a name, unless it is an index elsewhere in the equation. */
  function resolved(tree, used) {
    if (!Array.isArray(tree)) return tree;
    if (tree[0] === "idx") return used.has(tree[1]) ? tree : ["name", tree[1], []];
    return tree.map((part) => resolved(part, used));
  }

  Live.parse = (text, names, letters) => {
    const parser = new Parser(text, names, letters);
    const tree = parser.sum();
    if (parser.next.kind !== "end") parser.fail("an operator or the end");
    return resolved(tree, parser.used);
  };
})();
