/* An exercise: inputs in a derivation, and the course's check of what is typed, run by Python in the page (page.py). */
"use strict";

(function () {
  const KEYS = ["Σ", "δ", "√", "½", "²", "−", "·", "'"];
  const KEPT = "scratchformer exercise ";
  const PAUSE = 150; // milliseconds after a key, until the answer is typeset

  const make = (tag, properties = {}, ...inside) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...inside);
    return node;
  };

  /** Does something when what was changed before can be seen. */
  const afterPaint = (act) => requestAnimationFrame(() => setTimeout(act));

  class Page {
    constructor(section) {
      this.section = section;
      this.data = JSON.parse(section.querySelector("script").textContent);
      this.blanks = [...section.querySelectorAll(".blank")].map((element) => ({
        element, line: Number(element.dataset.line), input: element.querySelector("input"),
        says: element.querySelector(".says"), preview: element.querySelector(".preview"),
        mark: element.querySelector(".mark"),
      }));
      this.lines = this.data.start.split("\n");
      this.numbers = new Map([...section.querySelectorAll("[data-number]")].map(({ dataset }) => [dataset.line, dataset.number]));
      this.keep = KEPT + this.data.name;
      this.kept = this.read();
      this.build();
      for (const blank of this.blanks) {
        blank.input.value = this.kept.answers[blank.line] || "";
        blank.input.addEventListener("input", () => this.typed(blank));
        blank.input.addEventListener("focus", () => { this.last = blank; });
        blank.input.addEventListener("keydown", (event) => { if (event.key === "Enter") this.check(blank); });
        blank.input.addEventListener("change", () => { if (this.checked !== this.text()) this.check(); });
        if (blank.input.value) afterPaint(() => this.show(blank));
      }
      [this.last] = this.blanks;
      if (this.blanks.some(({ input }) => input.value)) this.check();
      else afterPaint(() => this.python); // so that the first answer need not wait for it
    }

    /** The checks of this exercise; Python is started when they are first needed. */
    get python() {
      if (!this.started) {
        __BRYTHON__.runPythonSource("import page", "exercise");
        this.started = beginExercise(JSON.stringify(this.data));
      }
      return this.started;
    }

    read() {
      try {
        return { answers: {}, hints: 0, ...JSON.parse(localStorage.getItem(this.keep)) };
      } catch {
        return { answers: {}, hints: 0 };
      }
    }

    save() {
      this.kept.answers = Object.fromEntries(this.blanks.map(({ line, input }) => [line, input.value]));
      try {
        localStorage.setItem(this.keep, JSON.stringify(this.kept));
      } catch { /* a browser that keeps nothing for files */ }
    }

    build() {
      const button = (text, action) => make("button", { type: "button", textContent: text, onclick: action });
      const keys = KEYS.map((key) => Object.assign(button(key, () => this.insert(key)), { title: `type ${key}` }));
      for (const key of keys) key.addEventListener("pointerdown", (event) => event.preventDefault()); // keeps the focus
      this.hintButton = button("Hint", () => this.hint());
      this.verdict = make("div", { className: "verdict", role: "status" });
      this.hints = make("ol", { className: "hints" });
      const bar = make("div", { className: "exercise-bar" }, button("Check", () => this.check()), this.hintButton,
        button("Show the solution", () => this.solve()), button("Start over", () => this.reset()));
      const keyboard = make("div", { className: "exercise-keys", role: "group", ariaLabel: "letters to type" }, ...keys);
      this.section.append(keyboard, bar, this.hints, this.verdict);
      this.showHints();
    }

    insert(key) {
      const { input } = this.last;
      input.focus();
      input.setRangeText(key, input.selectionStart, input.selectionEnd, "end");
      this.typed(this.last);
    }

    /** The file with what was typed. */
    text() {
      const lines = [...this.lines];
      for (const { line, input } of this.blanks) {
        const answer = input.value.trim().replaceAll('"""', '"').replace(/\s+/g, " ");
        if (answer) lines[line - 1] = lines[line - 1].replace(/= \?(?= for |$)/, () => `= ${answer}`);
      }
      return lines.join("\n");
    }

    typed(blank) {
      clearTimeout(blank.timer);
      this.mark(blank, "");
      this.save();
      blank.timer = setTimeout(() => this.show(blank), PAUSE);
    }

    show({ input, preview }) {
      preview.innerHTML = input.value.trim() && this.python.preview(input.getAttribute("aria-label"), input.value.trim());
    }

    mark({ element, mark, says, input }, state, message = "") {
      element.dataset.state = state;
      mark.textContent = { right: "✓", wrong: "✗" }[state] || "";
      says.textContent = message || { right: "true", checking: "checking…" }[state] || "";
      input.setAttribute("aria-invalid", state === "wrong");
    }

    /** A message with the numbers that lines have on the page, in place of those in the file. */
    numbered(message) {
      const [{ name }] = this.data.runs;
      return message.replaceAll(`${name}: line `, "line ").replace(/\bline (\d+)\b/g, (text, line) => (this.numbers.has(line) ? `line ${this.numbers.get(line)}` : text));
    }

    /** The verdict, which takes seconds. from: the line that asks for it. */
    check(from = null) {
      this.save();
      this.checked = this.text();
      if (this.section.ariaBusy !== "true") afterPaint(() => this.judge());
      this.section.ariaBusy = "true";
      this.from = from;
      this.mark(from || this.last, "checking");
      this.verdict.replaceChildren(make("p", { textContent: "checking…" }));
    }

    /** What the course says of a text, or that it could not be checked, whatever the error. */
    grade(text) {
      try {
        return JSON.parse(this.python.grade(text));
      } catch {
        return { passed: false, line: 0, reached: false, message: "This could not be checked. Change an answer, and check again." };
      }
    }

    /** The verdict of the course. Each line is marked: right above the first that is wrong or blank. */
    judge() {
      const { from } = this;
      const { passed, line, reached, message: said } = this.grade(this.checked);
      const message = this.numbered(said);
      this.section.ariaBusy = "false";
      const blank = message.includes("is still blank");
      for (const each of this.blanks) {
        const above = passed || (reached && line > 0 && each.line < line);
        if (each.line === line && !blank && !passed) this.mark(each, "wrong", message);
        else this.mark(each, above && each.input.value.trim() ? "right" : "");
      }
      const elsewhere = !this.blanks.some((each) => each.line === line);
      this.verdict.replaceChildren();
      if (passed || (elsewhere && !blank)) this.verdict.append(make("pre", { textContent: message }));
      if (passed) this.verdict.append(this.done());
      this.section.dataset.passed = passed;
      if (from && !passed && from.element.dataset.state === "right") {
        const next = this.blanks.find((each) => each.line > from.line && each.element.dataset.state !== "right");
        if (next) next.input.focus();
      }
    }

    done() {
      if (!this.data.next) return make("p", { textContent: "Done: that was the last derivation." });
      const [name, title] = this.data.next;
      return make("p", {}, "Done. Next: ", make("a", { href: `${name}.html`, textContent: title }));
    }

    hint() {
      this.kept.hints = Math.min(this.kept.hints + 1, this.data.hints.length);
      this.save();
      this.showHints();
    }

    showHints() {
      this.hints.replaceChildren(...this.data.hints.slice(0, this.kept.hints).map((text) => make("li", { textContent: text })));
      this.hintButton.disabled = this.kept.hints >= this.data.hints.length;
      this.hintButton.textContent = this.kept.hints ? "Next hint" : "Hint";
    }

    solve() {
      const solution = this.data.solution.split("\n");
      for (const { line, input } of this.blanks) {
        const [head, end] = this.lines[line - 1].split(/\?(?= for |$)/);
        input.value = solution[line - 1].slice(head.length, solution[line - 1].length - end.length);
      }
      this.check();
      this.blanks.forEach((blank) => afterPaint(() => this.show(blank)));
    }

    reset() {
      this.kept.hints = 0;
      for (const blank of this.blanks) {
        blank.input.value = "";
        blank.preview.replaceChildren();
        this.mark(blank, "");
      }
      this.verdict.replaceChildren();
      this.save();
      this.showHints();
      this.blanks[0].input.focus();
    }
  }

  const start = () => {
    for (const section of document.querySelectorAll("section.exercise")) section.page = new Page(section);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
