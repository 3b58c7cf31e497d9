/* The page of a living training step: it plays, trains, explains numbers, and lets a known mistake be planted.

   An element of class `living` names its model, whose data is a script of its own: see docs/_ext/living.py. Whatever is
   computed here is computed by step.js, from the plan, and explained by live/evaluate.js, from the same equations. */
"use strict";

(function () {
  const { Step, Picture, Text, tasks, product, sized, sizeOf } = globalThis.Living;
  const { make, Writer, letterOf, listed, long, normal, short, LIMIT } = globalThis.Live;
  const PACE = 95; // milliseconds for each call while it plays
  const BUDGET = 9; // milliseconds of training in each frame
  const SAMPLE = 64; // characters that the model writes
  const POINTS = 300; // of the curve
  const RATES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1];
  const GENERATOR = "LanguageModel"; // the model that is put together from parts

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

  /** The weights at the beginning: normal numbers with the plan's means and deviations, the same ones each time. */
  function beginning(plan, sizes) {
    const draw = random(3);
    return Object.fromEntries(plan.parameters.map((number) => {
      const { name, shape } = plan.buffers[number];
      const [mean, deviation, inputs] = plan.start[name];
      const spread = deviation / Math.sqrt(sizeOf(inputs, sizes));
      return [name, Float64Array.from({ length: product(shape) }, () => (spread ? mean + spread * normal(draw) : mean))];
    }));
  }

  class Page {
    constructor(root) {
      this.data = models().settings;
      this.choice = choiceOf(root);
      Object.assign(this, { root, name: this.choice.model });
      const { width, heads, optimizer } = this.choice;
      this.sizes = { H: heads, D: width / heads };
      this.plan = sized(models()[keyOf(this.choice)], this.sizes, operations());
      this.task = tasks[this.plan.task];
      const [of, settings, lr] = this.data.optimizers[optimizer];
      this.update = this.data.steps[of];
      this.mistakes = [...this.plan.mistakes, ...this.update.mistakes];
      this.settings = { lr: this.choice.rate || lr, ...this.data.settings, ...settings };
      this.weights = beginning(this.plan, this.sizes);
      this.step = new Step(this.plan, this.weights);
      this.writer = new Step(this.plan, this.weights);
      this.wrong = null;
      this.ready = null; // the buffers that are computed while a step is played
      this.mode = "still";
      this.read(this.choice.text || this.data.text);
      this.build();
      this.restart();
      this.observer = new ResizeObserver(() => this.picture.connect());
      this.observer.observe(this.picture.flow);
      this.rest();
      this.picture.connect();
      root.classList.add("ready");
      this.still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      if (!this.still) setTimeout(() => { if (this.mode === "still" && root.page === this) this.play(); }, 400);
    }

    read(text) {
      this.choice.text = text;
      this.text = new Text(text, this.data.symbols, this.task.reserved);
    }

    // What is on the page

    build() {
      const button = (text, title, act) => make("button", { type: "button", title, onclick: act }, text);
      this.picture = new Picture(this.plan, this.data.rows);
      this.playing = button("▶ Play", "one step, call by call: forward, then backward", () => (this.mode === "play" ? this.stop() : this.play()));
      this.training = button("Train", "many steps a second", () => (this.mode === "train" ? this.stop() : this.train()));
      this.training.className = "living-main";
      const once = button("Step", `forward, backward and one step of ${this.choice.optimizer}`, () => { this.stop(); this.once(); this.show(); });
      const again = button("Start again", "with the initial weights", () => { this.stop(); this.restart(); });
      const select = (name, label, options, act, titles = {}) => {
        const chosen = make("select", { "aria-label": label, onchange: () => act(options[chosen.selectedIndex]) },
          ...options.map((option) => make("option", { selected: option === name }, String(titles[option] ?? option))));
        return make("label", {}, `${label} `, chosen);
      };
      const part = (name, options) => select(this.choice[name], name, options, (value) => this.replace({ [name]: value }));
      const { parts, sizes, optimizers } = this.data;
      const titles = JSON.parse(this.root.dataset.models);
      const model = select(this.name, "model", Object.keys(titles), (name) => this.replace({ model: name }), titles);
      const chosen = this.name === GENERATOR ? Object.entries({ ...sizes, ...parts }).map(([name, options]) => part(name, options)) : [];
      const optimizer = select(this.choice.optimizer, "optimizer", Object.keys(optimizers), (name) => this.replace({ optimizer: name, rate: 0 }));
      const rates = [...new Set([...RATES, this.settings.lr])].sort((a, b) => a - b);
      const rate = select(this.settings.lr, "learning rate", rates, (lr) => {
        this.choice.rate = lr;
        this.settings = { ...this.settings, lr };
      });
      this.mistake = make("select", { "aria-label": "plant a known mistake in the backward", onchange: () => this.plant(this.mistake.selectedIndex - 1) },
        make("option", {}, "no mistake"),
        ...this.mistakes.map(({ operation, title }) => make("option", {}, `${operation}: ${title[0].toLowerCase()}${title.slice(1)}`)));
      this.status = make("p", { class: "living-status", role: "status" });
      this.bar = make("div", { class: "living-bar" }, this.playing, once, this.training, again,
        make("label", { class: "living-mistake" }, "sabotage ", this.mistake));
      this.parts = make("details", { class: "living-parts", open: Boolean(this.choice.unfolded), ontoggle: () => { this.choice.unfolded = this.parts.open; } },
        make("summary", {}, "Another model or optimizer"), make("div", { class: "living-bar" }, model, ...chosen, optimizer, rate));
      this.tokens = make("p", { class: "living-tokens" });
      this.curve = make("div", { class: "living-curve", role: "img", "aria-label": "the loss after each step" });
      this.sample = make("p", { class: "living-sample", "aria-live": "off" });
      this.verdict = make("div", { class: "living-verdict" });
      this.explained = make("div", { class: "living-explained", "aria-live": "polite" });
      this.changing = make("div", { class: "living-change" });
      const own = make("textarea", { rows: "4", "aria-label": "a text to train on", spellcheck: "false" });
      own.value = this.choice.text;
      const use = button("Train on this text", "with new weights", () => this.use(own.value));
      this.refused = make("p", { class: "living-refused", role: "alert" });
      this.root.append(
        this.tokens, this.picture.element, this.bar, this.parts, this.status, this.verdict,
        make("div", { class: "living-below" },
          make("div", { class: "living-learning" },
            make("div", { class: "living-writes" }, make("h2", {}, this.task.says), this.sample),
            make("div", {}, make("h2", {}, "The loss after each step"), this.curve),
            make("details", {}, make("summary", {}, "Another text"), own, use, this.refused)),
          make("div", { class: "living-number" },
            make("button", { type: "button", class: "living-close", "aria-label": "close", onclick: () => this.let() }, "×"), make("h2", {}, "Where a number comes from"), this.explained, this.changing)),
      );
      this.listen();
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
        else if (array) this.pin(array.grid, 0);
      });
      element.addEventListener("keydown", (event) => this.move(event, event.target.closest(".living-array")));
      element.querySelector(".living-array").tabIndex = 0;
      this.root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.let(); });
    }

    /** The arrow keys go from one array to the next, and in the array of the number that is kept from number to number. */
    move(event, button) {
      const inside = this.pinned && this.pinned[0] === button.grid;
      const down = inside ? button.grid.columns : 1;
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: down, ArrowUp: -down }[event.key];
      if (!by) return;
      event.preventDefault();
      if (inside) {
        const to = this.pinned[1] + by;
        if (to >= 0 && to < button.grid.size) this.pin(button.grid, to);
        return;
      }
      const buttons = this.picture.grids.map((grid) => grid.button);
      const next = buttons[buttons.indexOf(button) + by];
      if (!next) return;
      button.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }

    // Training

    restart() {
      this.draw = random(1);
      this.losses = [];
      this.wrongLosses = [];
      for (const step of this.steps()) step.start(this.weights);
      this.writer.start(this.weights);
      this.at = null; // where the sequences are in the text
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

    /** Forward and backward on the next batch. */
    compute() {
      this.given = this.task.batch(this);
      for (const step of this.steps()) {
        step.give(this.given);
        step.forward();
        step.backward();
      }
    }

    /** A step of the optimizer with the gradients that are there, and forward and backward again. */
    once() {
      this.losses.push(this.step.loss());
      if (this.wrong) this.wrongLosses.push(this.wrong.loss());
      for (const step of this.steps()) {
        step.update(step === this.wrong && this.planted.source ? this.planted.source : this.update.source, this.settings);
        step.carry();
      }
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
          this.fill();
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
          this.once();
          this.stop();
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

    /** Another model, or other parts or an optimizer, in the place of this one. */
    replace(choice) {
      this.stop();
      this.observer.disconnect();
      this.root.classList.remove("pinned", "planted");
      Object.assign(this.choice, choice);
      open(this.root);
    }

    // Sabotage

    plant(number) {
      this.stop();
      const mistake = this.mistakes[number] || null;
      this.wrong = null;
      if (mistake && mistake.plan && !models()[mistake.plan]) {
        load(this.root, [mistake.plan], () => load(this.root, neededBy(mistake.plan), () => this.plant(number)));
        return;
      }
      if (mistake) {
        const plan = mistake.plan ? sized(models()[mistake.plan], this.sizes, operations()) : this.plan;
        this.wrong = new Step(plan, this.weights);
        if (!mistake.plan) this.wrong.plant(mistake);
      }
      this.root.classList.toggle("planted", Boolean(mistake));
      for (const node of this.picture.nodes.values()) node.classList.remove("mistaken");
      if (mistake) {
        this.plan.calls.forEach((call, number) => {
          if (call.function in mistake.functions) this.picture.nodes.get(call.forward ?? number).classList.add("mistaken");
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
      const { effect, right, wrong, code, source } = this.planted;
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
        : source ? "The gradient is right, but not the step that is made of it. "
          : "With the initial weights, it does not change the gradient yet. ", effect);
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
      const tokens = Array.from(this.task.shown(this), (id) => this.text.written([id]));
      this.tokens.replaceChildren(...tokens.map((c) => make("span", {}, c === " " ? "␣" : c)));
      const guess = this.task.guess(this);
      const speed = this.mode === "train" && this.speed ? `, ${this.speed} steps a second` : "";
      this.status.textContent = `Step ${losses.length}${speed}. Loss ${this.shown().loss().toFixed(3)}; blind guessing would have ${guess.toFixed(2)}.`;
      if (this.wrong && losses.length) this.race.textContent = this.judged();
    }

    /** What the mistake has done to training so far, from the losses of the last steps. */
    judged() {
      const { losses, wrongLosses } = this;
      const mean = (list) => list.slice(-50).reduce((a, b) => a + b, 0) / Math.min(50, list.length);
      const [right, wrong] = [mean(losses), mean(wrongLosses)];
      const both = `After ${losses.length} steps: loss ${right.toFixed(3)} without the mistake, ${wrong.toFixed(3)} with it. `;
      if (losses.length < 100) return both;
      const learned = (losses[0] - wrong) / (losses[0] - right);
      const worse = Math.round((100 * (wrong - right)) / right);
      if (!(learned > 0.25)) return `${both}The mistake has ruined training.`;
      if (worse > 1) return `${both}The loss is ${worse}% higher${worse < 10 ? ", which is easily overlooked" : ""}.`;
      return `${both}So far, the loss does not show it.`;
    }

    /** The loss after each step: its mean over as many steps as make POINTS points. */
    plot() {
      const [w, h, left, bottom, margin] = [640, 250, 40, 36, 110];
      const guess = this.task.guess(this);
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
      const top = Math.min(3 * guess, Math.max(guess * 1.15, ...[...right, ...wrong].filter(Number.isFinite)));
      const count = Math.max(10, right.length);
      const x = (i) => left + ((w - left - margin) * i) / (count - 1);
      const y = (loss) => 6 + (h - bottom) * (loss < top ? 1 - loss / top : 0); // also of NaN, when training is ruined
      const text = (at, height, written) => `<text x="${at}" y="${height}">${written}</text>`;
      const level = (loss, kind) => `<path class="${kind}" d="M${left},${y(loss)}H${w - margin}"/>`;
      const levels = [0, 1, 2, 3, 4, 6, 8].filter((loss) => loss < top).map((loss) => level(loss, "height") + text(left - 28, y(loss) + 7, loss));
      const wrongIsAbove = wrong.at(-1) >= right.at(-1); // their names keep clear of each other
      const curve = (means, kind, shift) => {
        const known = means.map((loss, i) => `${x(i)},${y(loss)}`);
        return known.length ? `<g class="${kind}"><polyline points="${known.join(" ")}"/>${text(x(known.length - 1) + 8, y(means.at(-1)) + shift, kind)}</g>` : "";
      };
      this.curve.innerHTML = `<svg viewBox="0 0 ${w} ${h}">${levels.join("")}${level(guess, "guess")}${text(w - margin + 8, y(guess) + 7, "guessing")}`
        + text(w - margin - 120, h - 6, `${this.losses.length} steps`) + curve(wrong, "mistake", wrongIsAbove ? -6 : 22)
        + `${curve(right, wrong.length ? "right" : "loss", wrong.length ? (wrongIsAbove ? 22 : -6) : 8)}</svg>`;
    }

    /** What the model makes of the text. */
    write() {
      const { writer } = this;
      if (this.losses.length === this.unseen) return;
      this.unseen = this.losses.length;
      writer.w.set(this.shown().w);
      const [prompt, written] = this.task.write(this, SAMPLE, random(7 + this.losses.length));
      this.sample.replaceChildren(make("span", { class: "prompt" }, prompt), written);
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
      this.changing.replaceChildren();
      this.explained.replaceChildren(make("p", { class: "living-hint" }, "Point at any number in the picture: its terms appear here, and the numbers that it was made of light up. Click to keep it, and to change a weight."));
    }

    pin(grid, i) {
      if (this.mode === "play") this.stop();
      this.pinned = [grid, i];
      this.root.classList.add("pinned");
      this.point(grid, i);
      this.changing.replaceChildren(...(this.isWeight(grid) ? this.input() : []));
    }

    /** An input for the pinned weight. */
    input() {
      const refused = make("span", { class: "living-refused", role: "status" });
      let before = this.value();
      const input = make("input", {
        type: "number", step: "0.1", value: String(Number(before.toPrecision(5))), onselect: () => { before = this.value(); },
        oninput: () => {
          const valid = Math.abs(input.valueAsNumber) <= LIMIT;
          refused.textContent = valid ? "" : ` Type a number, such as −0.5. The weight is still ${long(before)}.`;
          this.change(valid ? input.valueAsNumber : before);
        },
        onblur: () => {
          refused.textContent = "";
          input.value = String(Number(this.value().toPrecision(5)));
        },
      });
      return [make("label", {}, "Change this weight: ", input), refused];
    }

    /** The pinned number. */
    value() {
      const [grid, i] = this.pinned;
      return grid.value(this.shown(), i);
    }

    /** Whether a grid shows weights, not their gradients. */
    isWeight(grid) {
      return !grid.gradient && this.plan.buffers[grid.buffer].role === "parameter";
    }

    /** Gives another value to the pinned weight, and computes everything again. */
    change(value) {
      const [grid, i] = this.pinned;
      for (const step of this.steps()) {
        step.before = null; // the last step of the optimizer does not lead to these numbers
        step.arrays[grid.buffer][grid.at(i)] = value;
        step.forward();
        step.backward();
      }
      this.unseen = null;
      this.paint();
      this.say();
      this.write();
      this.explain(grid, i);
    }

    /** Explains the pinned number as it is now. */
    fill() {
      if (this.pinned) this.explain(...this.pinned);
    }

    point(grid, i) {
      this.picture.unmark();
      grid.light([i], "here");
      this.explain(grid, i);
    }

    explain(grid, i) {
      this.describe(grid, i);
      for (const list of this.explained.querySelectorAll(".live-list")) list.tabIndex = 0; // so that keys can scroll it
    }

    describe(grid, i) {
      const buffer = grid.buffer;
      const position = grid.at(i);
      const { plan } = this;
      const call = this.picture.maker.get(buffer);
      const value = grid.value(this.shown(), i);
      if (call !== undefined) {
        const [name] = Object.entries(plan.calls[call].computed).find(([, each]) => each === buffer);
        this.explained.innerHTML = this.terms(call, name, position, grid.title);
        return;
      }
      const { name, role } = plan.buffers[buffer];
      const adds = plan.calls.flatMap((each, number) => Object.entries(each.adds || {})
        .filter(([, [to]]) => to === buffer).map(([of, [, positions]]) => [number, of, positions]));
      const parts = adds.map(([call_, of, positions]) => [call_, of, positions ? positions.indexOf(position) : position]).filter(([, , at]) => at >= 0);
      if (parts.length === 1) {
        const [number, of, at] = parts[0];
        this.explained.innerHTML = this.terms(number, of, at, grid.title);
      } else if (parts.length) { // such as of a table that is the output map too
        this.explained.innerHTML = `<p class="living-title">${grid.title} = <b data-value="${value}">${long(value)}</b></p><p>The sum of what ${parts.length} calls add to it:</p>`
          + parts.map(([number, of, at]) => this.terms(number, of, at, plan.calls[plan.calls[number].forward].label)).join("");
      } else if (role === "parameter") {
        const gradient = plan.gradients[buffer];
        const slope = this.shown().arrays[gradient[0]][position];
        this.explained.innerHTML = `<p class="living-title">${name} = ${long(value)}</p>`
          + `<p>A weight. Its gradient is ${long(slope)}: if it grows by 0.01, the loss changes by about ${long(slope / 100)}. `
          + `${this.pinned ? "" : "Click it to change it."}</p>${this.shown().before ? this.updated(buffer, position) : ""}`;
        this.picture.mark(gradient[0], [position], "source");
      } else {
        this.explained.innerHTML = `<p class="living-title">${name} = ${long(value)}</p>`;
      }
    }

    /** The last step of the optimizer for a weight, from the weight back to its gradient: its equations with their terms. */
    updated(number, i) {
      const { arrays, items, mistakes } = this.update;
      const given = this.shown().before(number, i);
      const one = Object.fromEntries(Object.entries(arrays).map(([name, { shape }]) => [name, { shape, data: [given[name]] }]));
      const model = Live.model({ ...this.update, arrays: one });
      const mistake = mistakes.find((each) => each === this.planted);
      model.plant(mistake);
      const lines = model.lines.filter(({ defines, letters }) => defines && letters.length).map((line) => {
        const found = line.terms(0);
        const planted = line.right ? '<p class="living-wrong">A mistake is planted here:</p>' : "";
        const { html } = line.right ? mistake : items[line.number];
        return `${planted}<p class="living-equation">${html}</p><p>${letterOf(line.name)} = <b data-update="${line.name}" data-value="${found.value}">${long(found.value)}</b></p>${listed(found)}`;
      });
      return `<p class="living-inner">The last step of ${this.choice.optimizer}, with the gradient before it:</p>${lines.reverse().join("")}`;
    }

    /** The terms of one number that a call has computed, from the equation that computed it. */
    terms(number, name, position, title) {
      const { plan } = this;
      const call = plan.calls[number];
      const { equations, aliases } = plan.functions[call.function];
      const { tree, html, link } = equations[name];
      const found = this.model(number, tree, aliases).terms(0, position);
      for (const [of, p] of found.entries) this.light(number, aliases[of] || of, p);
      const left = new Writer(found.line, found.e, false).write(found.line.parts[0]);
      const wrong = this.planted && call.function in this.planted.functions && this.planted.name === name;
      return `<p class="living-title">${title}: ${left} = <b data-value="${found.value}">${long(found.value)}</b></p>`
        + `<p class="living-equation">${html}</p>`
        + `${wrong ? `<p class="living-wrong">A mistake is planted here. It computes ${this.planted.wrong} instead, which gives ${long(this.shown().arrays[call.computed[name]][position])}.</p>` : ""}`
        + `${listed(found)}`
        + `<p><a href="${content()}${link}">The derivation of ${call.operation}</a></p>`;
    }

    /** An equation with the arrays of a call, as live/evaluate.js takes it. */
    model(number, tree, aliases) {
      const { environment } = this.shown().calls[number];
      const { plan } = this;
      const arrays = {};
      for (const [key, value] of Object.entries(environment)) {
        if (!key.startsWith("$")) continue;
        const name = key.slice(1);
        const shape = this.shape(number, name);
        if (shape) arrays[name] = { shape, data: typeof value === "number" ? [value] : value };
      }
      for (const [short, long_] of Object.entries(aliases)) if (arrays[long_]) arrays[short] = arrays[long_];
      const { M } = environment; // stands in an equation where no array has its index
      return Live.model({ items: [{ text: plan.calls[number].operation, equation: tree }], arrays, sizes: M ? { m: M } : {} });
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

  const models = () => (globalThis.LivingModels ??= {});
  /** The functions and mistakes of each operation, by its name. */
  const operations = () => Object.fromEntries(Object.entries(models()).filter(([key]) => key.startsWith("of-")).map(([key, value]) => [key.slice(3), value]));
  const neededBy = (key) => [...new Set(models()[key].calls.map((call) => `of-${call.operation}`))];
  const keyOf = ({ model, positions, norm, order, depth }) => (model === GENERATOR ? [model, positions, norm, order, depth].join("-") : model);

  /** What the reader has chosen. */
  function choiceOf(root) {
    root.choice ??= { model: root.dataset.model, ...models().settings.first };
    return root.choice;
  }

  /** Loads the data of models, mistakes or operations that are not there yet. */
  function load(root, keys, then) {
    const missing = keys.filter((key) => !models()[key]);
    let waiting = missing.length;
    if (!waiting) return then();
    const failed = () => root.append(make("p", {}, "The model could not be loaded."));
    const loaded = () => { if (!--waiting) then(); };
    document.head.append(...missing.map((key) => make("script", { src: `${content()}_static/living/models/${key}.js`, onload: loaded, onerror: failed })));
    return undefined;
  }

  /** Shows the chosen model, whose data is loaded first. */
  function open(root) {
    load(root, ["settings"], () => {
      const key = keyOf(choiceOf(root));
      load(root, [key], () => load(root, neededBy(key), () => {
        root.replaceChildren();
        root.page = new Page(root);
      }));
    });
  }

  document.querySelectorAll(".living").forEach((root) => open(root));
})();
