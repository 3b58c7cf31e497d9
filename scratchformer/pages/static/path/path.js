/* The questions of the path. An answer is checked by evaluating its equation on the numbers that the page has now.

   An element of class `question` holds the question, and a script of type application/json with the equation of the answer
   and those of known wrong answers, each with what is wrong with it: see docs/_ext/path.py. */
"use strict";

(function () {
  const KEY = "scratchformer-path"; // in the browser's storage: the numbers of the steps that are done
  const CLOSE = 0.02; // a typed number may differ by this share, since the numbers on the page are rounded
  const TRIES = 2; // wrong answers before the right one can be asked for

  /** The arrays of the page, and the letters of their axes: of its live derivation, or the loss of its living model. */
  function given() {
    const { page } = document.querySelector(".live, .living");
    if (page.model.values) {
      const names = [...page.model.values.keys()];
      return { arrays: Object.fromEntries(page.model.values), axes: Object.fromEntries(names.map((name) => [name, page.letters(name)])) };
    }
    const numbers = { loss: page.step.loss(), guess: page.task.guess(page), steps: page.losses.length };
    return { arrays: Object.fromEntries(Object.entries(numbers).map(([name, x]) => [name, { shape: [], data: [x] }])), axes: {} };
  }

  /** The value of an equation's right side, and its terms. */
  function evaluate(equation) {
    return Live.model({ items: [{ text: "", equation }], ...given(), shapes: { answer: [] } }).terms(0, 0);
  }

  /** A number as the reader types it: 0.5, 0,5, −1/3 or 2e-3; NaN for anything else. */
  function number(text) {
    const [above, below = "1", ...more] = text.replaceAll("−", "-").replaceAll(",", ".").split("/").map((part) => part.trim());
    return above && below && !more.length ? Number(above) / Number(below) : NaN;
  }

  const isNear = (x, y) => Number.isFinite(y) && Math.abs(x - y) <= Math.max(CLOSE * Math.abs(y), 0.005);

  /** What to say about a number that is none of the known wrong answers. */
  function general(x, right) {
    if (!Number.isFinite(right)) return "Not yet: first do what the question says.";
    if (isNear(-x, right)) return "The size is right, but not the sign.";
    if (x !== 0 && right !== 0 && Math.sign(x) !== Math.sign(right)) return `Not yet: it is ${right < 0 ? "negative" : "positive"}.`;
    return Math.abs(x) > Math.abs(right) ? "Not yet: it is smaller in size." : "Not yet: it is larger in size.";
  }

  const stored = () => [Live.kept(KEY)].flat().filter(Number.isInteger);

  /** Marks the steps that are done in the line of all steps. */
  function mark() {
    const done = stored();
    for (const link of document.querySelectorAll(".path-line a")) {
      if (!done.includes(Number(link.dataset.step)) || link.classList.contains("done")) continue;
      link.classList.add("done");
      link.setAttribute("aria-label", `${link.getAttribute("aria-label")}, done`);
    }
  }

  class Question {
    static evaluate = evaluate;

    constructor(root) {
      this.root = root;
      this.data = JSON.parse(root.querySelector("script").textContent);
      this.wrong = 0;
      const { make } = Live;
      const prompt = [...root.children].filter(({ tagName }) => tagName !== "SCRIPT");
      prompt.forEach((part, i) => { part.id = `question-${i}`; });
      const labelled = { "aria-labelledby": prompt.map(({ id }) => id).join(" ") };
      this.verdict = make("div", { class: "question-verdict", role: "status" });
      const { choices } = this.data;
      this.fields = choices.length
        ? choices.map((_, i) => make("input", { type: "radio", name: "answer", value: String(i) }))
        : [make("input", { type: "text", inputmode: "text", autocomplete: "off", spellcheck: "false", ...labelled })];
      const row = choices.length
        ? make("div", { role: "radiogroup", ...labelled }, ...choices.map((text, i) => make("label", {}, this.fields[i], ` ${text}`)))
        : this.fields[0];
      const form = make("form", { novalidate: true, onsubmit: (event) => { event.preventDefault(); this.check(); } },
        row, make("button", { type: "submit" }, "Check"));
      root.append(form, this.verdict);
    }

    /** The number that was typed or chosen. */
    answer() {
      const [field] = this.fields;
      if (field.type === "text") return number(field.value);
      const chosen = this.fields.find(({ checked }) => checked);
      return chosen ? Number(chosen.value) : NaN;
    }

    check() {
      document.querySelector(".living")?.page.stop();
      const x = this.answer();
      if (!Number.isFinite(x)) {
        this.say("bad", this.data.choices.length ? "Choose one." : "Type a number, such as 0.5, −2 or 1/3.");
        return;
      }
      const right = evaluate(this.data.answer);
      if (isNear(x, right.value)) {
        this.done(right);
        return;
      }
      this.wrong++;
      const known = this.data.wrong.find(({ equation }) => isNear(x, evaluate(equation).value));
      this.say("bad", known ? known.reason : general(x, right.value));
      if (this.wrong >= TRIES && Number.isFinite(right.value)) {
        const show = Live.make("button", { type: "button", onclick: () => this.say("", ...this.shown("It is", right)) }, "Show me");
        this.verdict.append(show);
      }
    }

    /** The answer with its terms. */
    shown(start, right) {
      const { make, long } = Live;
      const { choices } = this.data;
      if (choices.length) return [`${start} ${choices[right.value]}.`];
      const list = make("div", { class: "live" });
      list.innerHTML = Live.listed(right);
      return [`${start} ${long(right.value)}:`, list];
    }

    done(right) {
      const { make } = Live;
      const here = document.querySelector(".path-line [aria-current]");
      const next = here.parentElement.nextElementSibling?.firstElementChild;
      Live.kept(KEY, [...new Set([...stored(), Number(here.dataset.step)])]);
      mark();
      this.say("good", ...this.shown("Right:", right));
      if (next) this.verdict.append(make("a", { class: "lead-on", href: next.href }, `Next: ${next.title}`));
    }

    say(kind, ...content) {
      this.verdict.className = `question-verdict ${kind}`;
      this.verdict.replaceChildren(Live.make("p", {}, content[0]), ...content.slice(1));
    }
  }

  mark();
  for (const root of document.querySelectorAll(".question")) root.question = new Question(root);
})();
