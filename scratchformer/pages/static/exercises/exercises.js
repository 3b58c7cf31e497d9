/* An exercise: inputs in a derivation. What is typed into one is evaluated beside the solution, on the arrays of runs that
   the build wrote into the page: see docs/_ext/exercises.py. */
"use strict";

(function () {
  const { make, apart, long, letterOf } = Live;
  const KEPT = "scratchformer exercise ";
  const EXACT = 1e-9; // two numbers are the same if they differ by less, relative to the largest
  const ONE_SIZE = "It is true for arrays of one size only: in place of a number write a size, such as C, or a name from above.";

  /** Expressions with the arrays of a run, as the one line of a model whose letters are those of all of them. */
  function lineOf(run, conditions, ...trees) {
    const equation = { parts: trees.map((tree) => ["group", tree]), relations: trees.slice(1).map(() => "="), for: conditions };
    return Live.model({ items: [{ text: "this answer", equation }], ...run }).lines[0];
  }

  /** The first place at which two expressions differ on the arrays of a run, and both values there; null if nowhere. */
  function difference(run, conditions, right, other) {
    const line = lineOf(run, conditions, right, other);
    const pairs = line.environments.map((e) => line.functions.map((f) => f(e)));
    const allowed = EXACT * Live.largest(pairs.map(([x]) => x));
    const at = pairs.findIndex(([x, y]) => !(Math.abs(x - y) <= allowed));
    if (at < 0) return null;
    const e = line.environments[at];
    const rows = line.lead.length ? [`row ${e[""]}`] : [];
    return { place: [...rows, ...line.letters.map((letter) => `${letter} = ${e[letter]}`)].join(", "), values: pairs[at] };
  }

  /** An answer as a tree. Throws an Error if it cannot be read, or is not of the form that is asked for. */
  function read(text, { left, known, never }, runs) {
    const refused = never.find(([pattern]) => new RegExp(pattern).test(text));
    if (refused) throw new Error(refused[1]);
    const letters = [...Live.free(left)];
    const tree = Live.parse(text, known, letters);
    Live.walk(tree, ([kind, name, indices]) => {
      const isSize = kind === "name" && !indices.length && name.toLowerCase() in runs[0].sizes;
      if (kind === "name" && !known.includes(name) && !isSize) throw new Error(`${letterOf(name)} is not known here: use what stands above, in terms of indices`);
    });
    const more = [...Live.free(tree)].find((letter) => !letters.includes(letter));
    if (more) throw new Error(`index ${more} is on the right only: sum over it`);
    for (const run of runs) {
      const line = lineOf(run, [], tree);
      for (const node of line.arrays()) line.layout(node).axes.forEach((size, i) => expectSize(line, node, i, size));
    }
    return tree;
  }

  function expectSize(line, [, name, indices], i, size) {
    const [kind, letter] = indices[i];
    if (kind === "idx" && line.size(letter) !== size) throw new Error(`index ${letter} has size ${size} in ${letterOf(name)}, but ${line.size(letter)} elsewhere`);
  }

  /** What is wrong with an answer to a blank, or "". */
  function judged(text, blank, runs) {
    try {
      const tree = read(text, blank, runs);
      const differs = (other) => runs.map((run) => difference(run, blank.for, other, tree));
      const found = differs(blank.right);
      const number = found.findIndex(Boolean);
      if (number < 0) return "";
      const { place, values } = found[number];
      const [right, typed] = apart(...values, long);
      const mistake = blank.mistakes.find(([, wrong]) => !differs(wrong).some(Boolean));
      return [
        `not true${place && ` at ${place}`}: expected ${right}, got ${typed}`,
        ...(number ? [ONE_SIZE] : []), ...(mistake ? [`This is what one gets when ${mistake[0]}.`] : []),
      ].join("\n");
    } catch (error) {
      return error.message;
    }
  }

  class Page {
    constructor(section) {
      this.section = section;
      this.data = JSON.parse(section.querySelector("script").textContent);
      this.blanks = [...section.querySelectorAll(".blank")].map((element, i) => ({
        ...this.data.blanks[i], element, input: element.querySelector("input"), says: element.querySelector(".says"),
        preview: element.querySelector(".preview"), mark: element.querySelector(".mark"),
      }));
      this.keep = KEPT + this.data.name;
      this.kept = { answers: {}, hints: 0, ...Live.kept(this.keep) };
      this.build();
      for (const blank of this.blanks) {
        blank.input.value = this.kept.answers[blank.line] || "";
        blank.input.addEventListener("input", () => this.typed(blank));
        blank.input.addEventListener("keydown", (event) => { if (event.key === "Enter") this.enter(blank); });
        blank.input.addEventListener("change", () => this.check());
        this.show(blank);
      }
      this.check();
    }

    save() {
      this.kept.answers = Object.fromEntries(this.blanks.map(({ line, input }) => [line, input.value]));
      Live.kept(this.keep, this.kept);
    }

    build() {
      const button = (text, action) => make("button", { type: "button", onclick: action }, text);
      this.hintButton = button("Hint", () => this.hint());
      this.verdict = make("div", { class: "verdict", role: "status" });
      this.hints = make("ol", { class: "hints" });
      const bar = make("div", { class: "exercise-bar" }, button("Check", () => this.check()), this.hintButton,
        button("Show the solution", () => this.fill(({ solution }) => solution)), button("Start over", () => this.reset()));
      this.section.append(bar, this.hints, this.verdict);
      this.showHints();
    }

    typed(blank) {
      this.mark(blank, "");
      this.show(blank);
      this.save();
    }

    /** Shows how an answer is read. */
    show({ input, preview, known, left }) {
      try {
        preview.innerHTML = new Live.Writer({ withs: new Map() }, null, false).write(Live.parse(input.value, known, [...Live.free(left)]));
      } catch {
        preview.replaceChildren();
      }
    }

    mark({ element, mark, says, input }, state, message = "") {
      element.dataset.state = state;
      mark.textContent = { right: "✓", wrong: "✗" }[state] || "";
      says.textContent = message || { right: "true" }[state] || "";
      input.setAttribute("aria-invalid", state === "wrong");
    }

    check() {
      for (const blank of this.blanks) {
        const text = blank.input.value.trim();
        const message = text && judged(text, blank, this.data.runs);
        this.mark(blank, message ? "wrong" : text && "right", message);
      }
      const passed = this.blanks.every(({ element }) => element.dataset.state === "right");
      this.verdict.replaceChildren(...(passed ? [this.done()] : []));
    }

    /** Checks the answers, and goes from a right one to the next that is not. */
    enter(blank) {
      this.check();
      if (blank.element.dataset.state !== "right") return;
      const next = this.blanks.slice(this.blanks.indexOf(blank)).find(({ element }) => element.dataset.state !== "right");
      if (next) next.input.focus();
    }

    done() {
      if (!this.data.next) return make("p", {}, "All are true. That was the last derivation.");
      const [name, title] = this.data.next;
      return make("p", {}, "All are true. Next: ", make("a", { href: `${name}.html` }, title));
    }

    hint() {
      this.kept.hints = Math.min(this.kept.hints + 1, this.data.hints.length);
      this.save();
      this.showHints();
    }

    showHints() {
      this.hints.replaceChildren(...this.data.hints.slice(0, this.kept.hints).map((text) => make("li", {}, text)));
      this.hintButton.disabled = this.kept.hints >= this.data.hints.length;
      this.hintButton.textContent = this.kept.hints ? "Next hint" : "Hint";
    }

    /** Fills in an answer to each blank. */
    fill(answer) {
      for (const blank of this.blanks) {
        blank.input.value = answer(blank);
        this.typed(blank);
      }
      this.check();
    }

    reset() {
      this.kept.hints = 0;
      this.fill(() => "");
      this.showHints();
      this.blanks[0].input.focus();
    }
  }

  Live.judged = judged;
  for (const section of document.querySelectorAll("section.exercise")) section.page = new Page(section);
})();
