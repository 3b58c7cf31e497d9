/* The page of a living training step: it plays, trains, explains numbers, and lets a known mistake be planted.

   An element of class `living` names its model, whose data is a script of its own: see docs/_ext/living.py. Whatever is
   computed here is computed by step.js, from the plan, and explained by live/evaluate.js, from the same equations. */
"use strict";

(function () {
  const { Step, Picture, product } = globalThis.Living;
  const { make, Writer, listed, long, short, letterOf } = globalThis.Live;
  const PACE = 95; // milliseconds for each call while it plays
  const BUDGET = 9; // milliseconds of training in each frame
  const SAMPLE = 64; // characters that the model writes
  const POINTS = 300; // of the curve
  const RATES = [0.001, 0.003, 0.01, 0.03, 0.1];

  /** Random numbers from 0 to 1 that are the same each time: mulberry32. */
  function random(seed) {
    let state = seed;
    return () => {
      state = (state + 0x6d2b79f5) | 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }

  /** A text as numbers: its most frequent characters, and one number for all others. */
  class Text {
    constructor(text, symbols) {
      this.text = text.replace(/\s+/g, " ");
      const counts = new Map();
      for (const c of this.text) counts.set(c, (counts.get(c) || 0) + 1);
      const frequent = [...counts].sort((a, b) => b[1] - a[1]).slice(0, symbols - 1).map(([c]) => c);
      this.symbols = [...frequent.sort(), "·"];
      const known = new Map(this.symbols.map((c, i) => [c, i]));
      this.ids = Array.from(this.text, (c) => known.get(c) ?? this.symbols.length - 1);
    }
  }

  class Page {
    constructor(root, name, data) {
      Object.assign(this, { root, name, data });
      this.plan = this.data.plan;
      this.adam = { ...this.data.adam };
      this.step = new Step(this.plan, this.data.weights);
      this.writer = new Step(this.plan, this.data.weights);
      this.wrong = null;
      this.ready = null; // the buffers that are computed while a step is played
      this.mode = "still";
      this.read(this.data.text);
      this.build();
      this.restart();
      this.observer = new ResizeObserver(() => this.picture.connect());
      this.observer.observe(this.picture.flow);
      this.rest();
      this.picture.connect();
      root.classList.add("ready");
      this.still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      if (!this.still) setTimeout(() => { if (this.mode === "still") this.play(); }, 400);
    }

    read(text) {
      this.text = new Text(text, this.data.symbols);
    }

    // What is on the page

    build() {
      const button = (text, title, act) => make("button", { type: "button", title, onclick: act }, text);
      this.picture = new Picture(this.plan, { rows: this.data.rows, make, labels: this.labels() });
      this.playing = button("▶ Play", "one step, call by call: forward, then backward", () => (this.mode === "play" ? this.stop() : this.play()));
      this.training = button("Train", "many steps a second", () => (this.mode === "train" ? this.stop() : this.train()));
      this.training.className = "living-main";
      const once = button("Step", "forward, backward and one step of Adam", () => { this.stop(); this.once(); this.show(); });
      const again = button("Start again", "the weights of the beginning", () => { this.stop(); this.restart(); });
      this.rate = make("select", { "aria-label": "learning rate", onchange: () => { this.adam.lr = Number(this.rate.value); } },
        ...RATES.map((lr) => make("option", { value: String(lr), selected: lr === this.adam.lr }, String(lr))));
      this.mistake = make("select", { "aria-label": "plant a known mistake in the backward", onchange: () => this.plant(this.mistake.selectedIndex - 1) },
        make("option", {}, "no mistake"),
        ...this.plan.mistakes.map(({ operation, title }) => make("option", {}, `${operation}: ${title[0].toLowerCase()}${title.slice(1)}`)));
      const choices = Object.entries(JSON.parse(this.root.dataset.models))
        .map(([key, title]) => make("option", { value: key, selected: key === this.name }, title));
      const chosen = make("select", { "aria-label": "model", onchange: () => this.replace(chosen.value) }, ...choices);
      this.status = make("p", { class: "living-status", role: "status" });
      this.bar = make("div", { class: "living-bar" }, this.playing, once, this.training, again,
        make("label", {}, "model ", chosen), make("label", {}, "learning rate ", this.rate), make("label", { class: "living-mistake" }, "sabotage ", this.mistake));
      this.tokens = make("p", { class: "living-tokens" });
      this.curve = make("canvas", { width: 640, height: 250, role: "img", "aria-label": "the loss after each step" });
      this.probe = make("span", { hidden: true }); // computes the colours of the theme
      this.sample = make("p", { class: "living-sample", "aria-live": "off" });
      this.verdict = make("div", { class: "living-verdict" });
      this.explained = make("div", { class: "living-explained", "aria-live": "polite" });
      this.table = make("div", { class: "living-table" });
      const own = make("textarea", { rows: "4", "aria-label": "a text to train on", spellcheck: "false" });
      own.value = this.data.text;
      const use = button("Train on this text", "with new weights", () => this.use(own.value));
      this.refused = make("p", { class: "living-refused", role: "alert" });
      this.root.append(
        this.tokens, this.picture.element, this.bar, this.status, this.verdict, this.probe,
        make("div", { class: "living-below" },
          make("div", { class: "living-learning" },
            make("div", { class: "living-writes" }, make("h2", {}, "What it writes"), this.sample),
            make("div", {}, make("h2", {}, "The loss after each step"), this.curve),
            make("details", {}, make("summary", {}, "Another text"), own, use, this.refused)),
          make("div", { class: "living-number" },
            make("button", { type: "button", class: "living-close", "aria-label": "close", onclick: () => this.let() }, "×"), make("h2", {}, "Where a number comes from"), this.explained, this.table)),
      );
      this.listen();
    }

    labels() {
      const { calls, buffers } = this.plan;
      const letter = (number, buffer) => Object.entries(calls[number].computed).find(([, each]) => each === buffer)[0];
      return {
        of: (number) => ({ add: "+" })[calls[number].operation] || (calls[number].output === this.plan.loss ? "loss" : calls[number].label),
        array: (number, buffer) => {
          const { label, operation, output } = calls[number];
          const name = label === operation ? label : `${label} (${operation})`;
          return buffer === output ? name : `${letter(number, buffer)} of ${name}`;
        },
        weight: (buffer) => buffers[buffer].name,
      };
    }

    listen() {
      const { element } = this.picture;
      const under = (event) => {
        const { target } = event;
        if (target.tagName !== "CANVAS") return null;
        const { grid, panel } = target;
        const box = target.getBoundingClientRect();
        const column = Math.min(grid.columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * grid.columns)));
        const line = Math.min(grid.lines - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * grid.lines)));
        return [grid, (panel * grid.lines + line) * grid.columns + column];
      };
      element.addEventListener("pointermove", (event) => {
        const here = under(event);
        if (here && !this.pinned && this.mode !== "train") this.point(...here);
      });
      element.addEventListener("pointerleave", () => { if (!this.pinned) this.rest(); });
      element.addEventListener("click", (event) => {
        const here = under(event);
        const array = event.target.closest(".living-array");
        if (here) this.pin(...here);
        else if (array) {
          this.pin(array.grid, 0);
          this.cells[0].focus();
        }
      });
      element.addEventListener("keydown", (event) => this.move(event, [...element.querySelectorAll(".living-array")], 0));
      this.table.addEventListener("keydown", (event) => {
        if (event.key === "Escape") this.grid.button.focus();
        else this.move(event, this.cells, this.grid.columns);
      });
      element.querySelector(".living-array").tabIndex = 0;
      this.root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.let(); });
    }

    /** The arrow keys go from one button to the next; with columns, in two directions. */
    move(event, buttons, columns) {
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns || 1, ArrowUp: -(columns || 1) };
      const at = buttons.indexOf(document.activeElement);
      const to = buttons[at + steps[event.key]];
      if (at < 0 || !to) return;
      event.preventDefault();
      buttons[at].tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    }

    // Training

    restart() {
      this.draw = random(1);
      this.losses = [];
      this.wrongLosses = [];
      for (const step of this.steps()) step.start(this.data.weights);
      this.writer.start(this.data.weights);
      this.before = null; // what the last step of Adam was given
      this.unseen = null;
      this.compute();
      this.show();
    }

    steps() {
      return this.wrong ? [this.step, this.wrong] : [this.step];
    }

    /** The one whose arrays are shown. */
    shown() {
      return this.wrong && this.isAlike() ? this.wrong : this.step;
    }

    /** Whether the step with the mistake has the same arrays; wrong code may have other calls. */
    isAlike() {
      const [right, wrong] = [this.plan.buffers, this.wrong.plan.buffers];
      return right.length === wrong.length && right.every(({ name }, i) => name === wrong[i].name);
    }

    /** The next batch. Its first sequence is always the beginning of the text, so that it can be watched. */
    batch() {
      const { rows, length } = this.data;
      const { ids } = this.text;
      const [inputs, targets] = [[], []];
      for (let row = 0; row < rows; row++) {
        const start = row === 0 ? 0 : Math.floor(this.draw() * (ids.length - length));
        inputs.push(...ids.slice(start, start + length));
        targets.push(...ids.slice(start + 1, start + length + 1));
      }
      return { ids: inputs, targets };
    }

    /** Forward and backward on the next batch. */
    compute() {
      this.given = this.batch();
      for (const step of this.steps()) {
        step.give(this.given);
        step.forward();
        step.backward();
      }
    }

    /** A step of Adam with the gradients that are there, and forward and backward again. */
    once() {
      this.losses.push(this.step.loss());
      if (this.wrong) this.wrongLosses.push(this.wrong.loss());
      const { w, m, v, g } = this.shown();
      const given = { w0: w, m0: m, v0: v, g };
      this.before ??= Object.fromEntries(Object.keys(given).map((name) => [name, new Float64Array(w.length)]));
      for (const [name, array] of Object.entries(given)) this.before[name].set(array);
      for (const step of this.steps()) step.update(this.adam);
      this.compute();
    }

    train() {
      this.stop();
      this.mode = "train";
      this.status.setAttribute("aria-live", "off"); // it changes all the time
      this.training.textContent = "Pause";
      this.ready = null;
      let frames = 0;
      let [since, count] = [performance.now(), 0];
      const frame = () => {
        if (this.mode !== "train") return;
        const start = performance.now();
        do { this.once(); count++; } while (performance.now() - start < BUDGET);
        frames++;
        if (frames % 2) this.paint();
        if (start - since > 400) {
          this.speed = Math.round((1000 * count) / (start - since));
          [since, count] = [start, 0];
          this.write();
          this.say();
          if (this.pinned) this.fill();
        }
        this.timer = requestAnimationFrame(frame);
      };
      frame();
    }

    stop() {
      cancelAnimationFrame(this.timer);
      clearTimeout(this.timer);
      const playing = this.mode === "play";
      this.mode = "still";
      this.training.textContent = "Train";
      this.status.setAttribute("aria-live", "polite");
      this.playing.textContent = "▶ Play";
      if (playing) {
        for (const step of this.steps()) { step.forward(); step.backward(); }
        this.picture.now(null);
      }
      this.ready = null;
      this.show();
    }

    /** One step, slowly: every call forward, every call backward, then Adam. */
    play() {
      this.stop();
      this.mode = "play";
      this.playing.textContent = "❚❚ Stop";
      const { plan } = this;
      this.ready = new Set([...Object.values(plan.inputs), ...plan.parameters]);
      let number = 0;
      const next = () => {
        if (this.mode !== "play") return;
        if (number === plan.calls.length) {
          this.picture.now(null);
          this.mode = "still";
          this.playing.textContent = "▶ Play";
          this.ready = null;
          this.once();
          this.show();
          this.flash();
          return;
        }
        const call = plan.calls[number];
        for (const step of this.steps()) step.call(number);
        for (const buffer of Object.values(call.computed)) this.ready.add(buffer);
        for (const [buffer] of Object.values(call.adds || {})) this.ready.add(buffer);
        this.picture.now(number, call.phase);
        this.status.textContent = call.phase === "forward" ? "Forward: from the text to the loss." : "Backward: from the loss to the gradient of every number.";
        this.paint();
        number++;
        this.timer = setTimeout(next, PACE);
      };
      next();
    }

    /** The weights light up: Adam has moved them. */
    flash() {
      this.picture.element.classList.add("moved");
      setTimeout(() => this.picture.element.classList.remove("moved"), 900);
      this.status.textContent = `Adam has moved every weight against its gradient. The loss was ${long(this.losses[this.losses.length - 1])}.`;
    }

    use(text) {
      const enough = this.data.length + 2;
      if (text.trim().length < enough) {
        this.refused.textContent = `The text needs at least ${enough} characters.`;
        return;
      }
      this.refused.textContent = "";
      this.stop();
      this.read(text);
      this.restart();
      this.train();
    }

    /** Another model in the place of this one. */
    replace(name) {
      this.stop();
      this.observer.disconnect();
      this.root.classList.remove("pinned", "planted");
      open(this.root, name);
    }

    // Sabotage

    plant(number) {
      this.stop();
      const mistake = this.plan.mistakes[number] || null;
      this.wrong = null;
      if (mistake && mistake.plan && !globalThis.LivingModels[mistake.plan]) {
        load(this.root, mistake.plan, () => this.plant(number));
        return;
      }
      if (mistake) {
        this.wrong = new Step(mistake.plan ? globalThis.LivingModels[mistake.plan] : this.plan, this.data.weights);
        if (!mistake.plan) this.wrong.plant(mistake);
      }
      this.root.classList.toggle("planted", Boolean(mistake));
      for (const node of this.picture.nodes.values()) node.classList.remove("mistaken");
      if (mistake) {
        this.plan.calls.forEach((call) => {
          if (call.function in mistake.functions) this.picture.nodes.get(call.forward).classList.add("mistaken");
        });
      }
      this.planted = mistake;
      this.restart();
      this.compare();
      if (mistake && !this.still) this.train();
    }

    /** What the mistake changes in the gradients of the first step, when both have the same weights. */
    compare() {
      this.verdict.replaceChildren();
      for (const grid of this.picture.grids) grid.button.classList.remove("wrong");
      if (!this.planted) return;
      const { effect, right, wrong, code } = this.planted;
      let [square, all] = [0, 0];
      this.step.g.forEach((x, i) => { square += (x - this.wrong.g[i]) ** 2; all += x * x; });
      const share = Math.sqrt(square / all);
      for (const grid of this.picture.grids) {
        const known = this.isAlike() || grid.buffer < 2 * this.plan.parameters.length; // those of parameters come first
        const differs = known && this.step.arrays[grid.buffer].some((x, i) => Math.abs(x - this.wrong.arrays[grid.buffer][i]) > 1e-12);
        grid.button.classList.toggle("wrong", differs);
      }
      const verdict = make("p", {}, share > 1e-9
        ? `The gradient is off by ${short(100 * share)}% of its length. `
        : "With the weights of the beginning, the gradient is still the same. ", effect);
      this.race = make("p", { class: "living-race" });
      const pair = make("p", { class: "living-equations" });
      if (code) pair.append(...code.map((text, i) => make("code", { class: i ? "wrong" : "right" }, text)));
      else pair.innerHTML = `<span class="right">${right}</span><span class="wrong">${wrong}</span>`;
      this.verdict.append(pair, verdict, this.race);
    }

    // What is shown

    show() {
      this.paint();
      this.write();
      this.say();
      this.fill();
    }

    paint() {
      this.picture.draw(this.shown(), this.ready ? (buffer) => this.ready.has(buffer) : undefined);
      this.plot();
    }

    say() {
      const { losses } = this;
      const tokens = this.given.ids.slice(0, this.data.length).map((id) => this.text.symbols[id]);
      this.tokens.replaceChildren(...tokens.map((c) => make("span", {}, c === " " ? "␣" : c)));
      const guess = Math.log(this.text.symbols.length);
      const speed = this.mode === "train" && this.speed ? `, ${this.speed} steps a second` : "";
      this.status.textContent = `Step ${losses.length}${speed}. Loss ${this.shown().loss().toFixed(3)}; blind guessing has ${guess.toFixed(2)}.`;
      if (this.wrong && losses.length) {
        const mean = (list) => list.slice(-50).reduce((a, b) => a + b, 0) / Math.min(50, list.length);
        this.race.textContent = `After ${losses.length} steps: loss ${mean(losses).toFixed(3)} without the mistake, ${mean(this.wrongLosses).toFixed(3)} with the mistake.`;
      }
    }

    /** The loss after each step: its mean over as many steps as make POINTS points. */
    plot() {
      const { curve } = this;
      const context = curve.getContext("2d");
      const colour = (name) => {
        this.probe.style.color = `var(${name})`;
        return getComputedStyle(this.probe).color;
      };
      const [w, h, left, bottom, margin] = [curve.width, curve.height, 40, 36, 110];
      context.clearRect(0, 0, w, h);
      const guess = Math.log(this.text.symbols.length);
      const each = Math.max(1, Math.ceil(this.losses.length / POINTS));
      const points = (losses) => {
        const means = [];
        for (let i = 0; i < losses.length; i += each) {
          const part = losses.slice(i, i + each);
          means.push(part.reduce((a, b) => a + b, 0) / part.length);
        }
        return means;
      };
      const [right, wrong] = [points(this.losses), points(this.wrongLosses)];
      const top = Math.min(3 * guess, Math.max(guess * 1.15, ...right, ...wrong.filter(Number.isFinite)));
      const count = Math.max(10, right.length);
      const x = (i) => left + ((w - left - margin) * i) / (count - 1);
      const y = (loss) => (h - bottom) * (1 - Math.min(loss, top) / top) + 6;
      context.font = "22px system-ui, sans-serif";
      context.fillStyle = colour("--soft");
      context.strokeStyle = colour("--line");
      context.lineWidth = 2;
      for (const level of [0, 1, 2, 3, 4, 6, 8].filter((level) => level < top)) {
        context.beginPath();
        context.moveTo(left, y(level));
        context.lineTo(w - margin, y(level));
        context.stroke();
        context.fillText(String(level), left - 28, y(level) + 7);
      }
      context.setLineDash([6, 6]);
      context.strokeStyle = colour("--soft");
      context.beginPath();
      context.moveTo(left, y(guess));
      context.lineTo(w - margin, y(guess));
      context.stroke();
      context.setLineDash([]);
      context.fillText("guessing", w - margin + 8, y(guess) + 7);
      context.fillText(`${this.losses.length} steps`, w - margin - 120, h - 6);
      for (const [means, name, ink] of [[wrong, "mistake", "--bad"], [right, wrong.length ? "right" : "loss", "--value"]]) {
        if (!means.length) continue;
        context.strokeStyle = colour(ink);
        context.fillStyle = colour(ink);
        context.lineWidth = 4;
        context.beginPath();
        means.forEach((loss, i) => (i ? context.lineTo(x(i), y(loss)) : context.moveTo(x(i), y(loss))));
        context.stroke();
        const last = means.length - 1;
        context.fillText(name, x(last) + 8, y(means[last]) + (name === "mistake" ? -6 : 8));
      }
    }

    /** The model goes on with the text: each next character is drawn from its probabilities. */
    write() {
      const { writer } = this;
      const { length } = this.data;
      if (this.losses.length === this.unseen) return;
      this.unseen = this.losses.length;
      writer.w.set(this.shown().w);
      const draw = random(7 + this.losses.length);
      const ids = this.text.ids.slice(0, length);
      const logits = this.plan.calls[this.picture.calls[this.picture.calls.length - 1]].inputs.logits[0];
      const symbols = this.data.symbols;
      for (let k = 0; k < SAMPLE; k++) {
        writer.arrays[this.plan.inputs.ids].set(ids.slice(-length));
        writer.forward();
        const z = writer.arrays[logits].subarray((length - 1) * symbols, length * symbols).slice(0, this.text.symbols.length);
        const p = z.map((value) => Math.exp(1.4 * (value - Math.max(...z))));
        let rest = draw() * p.reduce((a, b) => a + b, 0);
        let id = p.findIndex((value) => (rest -= value) < 0);
        if (id < 0) id = p.length - 1;
        ids.push(id);
      }
      const written = (part) => part.map((id) => this.text.symbols[id]).join("");
      this.sample.replaceChildren(make("span", { class: "prompt" }, written(ids.slice(0, length))), written(ids.slice(length)));
    }

    // Where a number comes from

    /** No number is kept any more. */
    let() {
      this.pinned = null;
      this.root.classList.remove("pinned");
      this.rest();
    }

    rest() {
      this.picture.unmark();
      this.grid = null;
      this.table.replaceChildren();
      this.explained.replaceChildren(make("p", { class: "living-hint" }, "Point at any number in the picture: its terms appear here, and the numbers that it was made of light up. Click to keep it."));
    }

    pin(grid, i) {
      if (this.mode === "play") this.stop();
      this.pinned = [grid, i];
      this.root.classList.add("pinned");
      this.point(grid, i);
      this.list();
    }

    /** The array of the pinned number, as a table of numbers. */
    list() {
      const [grid, pinned] = this.pinned;
      this.grid = grid;
      this.cells = [];
      const editable = this.plan.buffers[grid.buffer].role === "parameter";
      const tables = grid.panels.map((_, panel) => {
        const rows = [];
        for (let line = 0; line < grid.lines; line++) {
          const row = make("tr");
          for (let column = 0; column < grid.columns; column++) {
            const i = (panel * grid.lines + line) * grid.columns + column;
            const act = () => { this.pinned = [grid, i]; this.point(grid, i); };
            const cell = make("button", { type: "button", tabindex: i === pinned ? "0" : "-1", onfocus: act, onclick: act });
            cell.number = i;
            this.cells.push(cell);
            row.append(make("td", {}, cell));
          }
          rows.push(row);
        }
        return make("table", { "aria-label": `${grid.title}${grid.panels.length > 1 ? `, ${panel}` : ""}` }, make("tbody", {}, ...rows));
      });
      const change = make("label", { class: "living-change" }, "Change this weight: ");
      const input = make("input", { type: "number", step: "0.1", "aria-label": "the weight", oninput: () => this.change(Number(input.value)) });
      change.append(input);
      this.changing = editable ? input : null;
      this.table.replaceChildren(...(editable ? [change] : []), make("p", { class: "living-title" }, grid.title), ...tables);
      this.fill();
    }

    /** A weight gets another value, and everything is computed again. */
    change(value) {
      if (!Number.isFinite(value)) return;
      const [grid, i] = this.pinned;
      for (const step of this.steps()) {
        step.arrays[grid.buffer][grid.at(i)] = value;
        step.forward();
        step.backward();
      }
      this.unseen = null;
      this.paint();
      this.say();
      this.write();
      this.fill();
      this.explain(grid, i);
    }

    /** The numbers of the table, as they are now. */
    fill() {
      if (!this.pinned || !this.grid) return;
      const [grid, pinned] = this.pinned;
      const step = this.shown();
      let largest = 1e-30;
      for (let i = 0; i < grid.size; i++) largest = Math.max(largest, Math.abs(grid.value(step, i)));
      for (const cell of this.cells) {
        const x = grid.value(step, cell.number);
        cell.textContent = short(x);
        cell.className = `${x < 0 ? "below" : "above"}${grid.gradient ? " gradient" : ""}${cell.number === pinned ? " here" : ""}`;
        cell.style.setProperty("--heat", `${Math.round((100 * Math.abs(x)) / largest)}%`);
      }
      if (this.changing && document.activeElement !== this.changing) this.changing.value = String(Number(grid.value(step, pinned).toPrecision(5)));
      if (this.mode === "train") this.explain(grid, pinned);
    }

    point(grid, i) {
      this.picture.unmark();
      grid.light([i], "here");
      this.explain(grid, i);
      if (this.grid === grid) this.fill();
    }

    explain(grid, i) {
      const buffer = grid.buffer;
      const position = grid.at(i);
      const { plan } = this;
      const call = this.picture.maker.get(buffer);
      const value = grid.value(this.shown(), i);
      if (call !== undefined) {
        const [name] = Object.entries(plan.calls[call].computed).find(([, each]) => each === buffer);
        this.terms(call, name, position, grid.title);
        return;
      }
      const { name, role } = plan.buffers[buffer];
      const adds = plan.calls.flatMap((each, number) => Object.entries(each.adds || {})
        .filter(([, [to]]) => to === buffer).map(([of, [, positions]]) => [number, of, positions]));
      if (adds.length === 1) {
        const [number, of, positions] = adds[0];
        this.terms(number, of, positions ? positions.indexOf(position) : position, grid.title);
      } else if (adds.length) {
        this.explained.innerHTML = `<p class="living-title">${grid.title} = ${long(value)}</p><p>The sum of what ${adds.length} calls add to it.</p>`;
      } else if (role === "parameter") {
        const at = this.offset(buffer) + position;
        const step = this.shown();
        this.explained.innerHTML = `<p class="living-title">${name} = ${long(value)}</p>`
          + `<p>A weight. Its gradient is ${long(step.g[at])}: if it grows by 0.01, the loss changes by about ${long(step.g[at] / 100)}. `
          + `Click it to change it.</p>${this.before ? this.updated(at) : ""}`;
        const gradient = plan.gradients[buffer];
        this.picture.mark(gradient[0], [position], "source");
      } else {
        this.explained.innerHTML = `<p class="living-title">${name} = ${long(value)}</p>`;
      }
    }

    /** How the last step of Adam computed a weight, in the terms of its equations. */
    updated(at) {
      const { update } = this.data;
      const given = { ...this.adam, steps: this.shown().steps, decay: 0 };
      const arrays = Object.fromEntries(Object.entries(update.arrays).map(([name, { shape }]) => (
        [name, { shape: shape.map(() => 1), data: [shape.length ? this.before[name][at] : given[name]] }]
      )));
      const shapes = Object.fromEntries(Object.entries(update.shapes).map(([name, shape]) => [name, shape.map(() => 1)]));
      const model = Live.model({ ...update, arrays, shapes });
      const seen = new Set();
      const lists = model.lines.flatMap((line, i) => {
        const name = line.target();
        if (!shapes[name] || !shapes[name].length || seen.has(name)) return [];
        seen.add(name);
        const { value, terms } = model.terms(i, 0);
        const title = `${letterOf(name)} = <b data-update="${name}" data-value="${value}">${long(value)}</b>`;
        return [`<p class="living-equation">${update.items[i].html}</p><p>${title}</p>${listed(model, line, terms)}`];
      });
      return `<p class="living-inner">The last step of Adam:</p>${lists.reverse().join("")}`;
    }

    offset(buffer) {
      let start = 0;
      for (const number of this.plan.parameters) {
        if (number === buffer) return start;
        start += product(this.plan.buffers[number].shape);
      }
      return start;
    }

    /** The terms of one number that a call has computed, from the equation that computed it. */
    terms(number, name, position, title) {
      const { plan } = this;
      const call = plan.calls[number];
      const { equations, aliases } = plan.functions[call.function];
      const { tree, html, link } = equations[name];
      const model = this.model(number, tree, aliases);
      const found = model.terms(0, position);
      const line = model.lines[0];
      for (const [of, p] of found.entries) this.light(number, aliases[of] || of, p);
      const left = new Writer(model, line, found.e, false).write(line.parts[0]);
      const inner = found.inner.map(({ node, e, value }) => `<p class="living-inner">with ${new Writer(model, line, e, false).write(node)} = ${long(value)}</p>`);
      const wrong = this.planted && call.function in this.planted.functions && this.planted.name === name;
      this.explained.innerHTML = `<p class="living-title">${title}: ${left} = <b data-value="${found.value}">${long(found.value)}</b></p>`
        + `<p class="living-equation">${html}</p>`
        + `${wrong ? `<p class="living-wrong">A mistake is planted here. It computes ${this.planted.wrong} instead, which gives ${long(this.shown().arrays[call.computed[name]][position])}.</p>` : ""}`
        + `${listed(model, line, found.terms)}${inner.join("")}`
        + `<p><a href="${content()}${link}">The derivation of ${call.operation}</a></p>`;
    }

    /** An equation with the arrays of a call, as live/evaluate.js takes it. */
    model(number, tree, aliases) {
      const environment = this.shown().environment(number);
      const { plan } = this;
      const arrays = {};
      for (const [key, value] of Object.entries(environment)) {
        if (!key.startsWith("$")) continue;
        const name = key.slice(1);
        const shape = this.shape(number, name);
        if (shape) arrays[name] = { shape, data: typeof value === "number" ? [value] : value };
      }
      for (const [short, long_] of Object.entries(aliases)) if (arrays[long_]) arrays[short] = arrays[long_];
      const axes = {};
      const item = { text: plan.calls[number].operation, equation: tree };
      return Live.model({ items: [item], arrays, shapes: {}, inputs: [], outputs: [], gradients: {}, mistakes: [], axes });
    }

    /** The shape of an array that a call was given or has computed. */
    shape(number, name) {
      const call = this.plan.calls[number];
      if (name in call.computed) return this.plan.buffers[call.computed[name]].shape;
      if (call.shapes && name in call.shapes) return call.shapes[name];
      if (name in call.numbers) return [];
      return call.forward === undefined ? null : this.shape(call.forward, name);
    }

    /** Lights a number that a call was given or has computed. */
    light(number, name, position) {
      const call = this.plan.calls[number];
      if (name in call.computed) this.picture.mark(call.computed[name], [position], "source");
      else if (name in call.inputs) {
        const [buffer, positions] = call.inputs[name];
        this.picture.mark(buffer, [positions ? positions[position] : position], "source");
      } else if (call.forward !== undefined) this.light(call.forward, name, position);
    }
  }

  /** The way from this page to the site's root. */
  const content = () => document.documentElement.dataset.content_root || "";

  /** Loads the data of a model or mistake. */
  function load(root, key, then) {
    const failed = () => root.append(make("p", {}, "The model could not be loaded."));
    document.head.append(make("script", { src: `${content()}_static/living/models/${key}.js`, onload: then, onerror: failed }));
  }

  /** Shows a model, whose data is loaded first if it is not there yet. */
  function open(root, name) {
    const there = () => {
      root.replaceChildren();
      root.page = new Page(root, name, globalThis.LivingModels[name]);
    };
    if (globalThis.LivingModels?.[name]) return there();
    return load(root, name, there);
  }

  const start = () => document.querySelectorAll(".living").forEach((root) => open(root, root.dataset.model));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
