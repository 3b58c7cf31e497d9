/* Runs a training step from its plan: see docs/_ext/step_plan.py. Nothing here knows a model.

   const plan = Living.sized(data, { H, D }, operations);   for sizes that the plan has as letters
   const step = new Living.Step(plan, weights);             weights: the numbers of each parameter, by name
   step.give({ ids, targets });                             the batch
   step.forward(); step.backward();                         every array of step.arrays, by the number of its buffer
   step.update(source, settings);                           the source of an optimizer's step */
"use strict";

(function () {
  const made = new Map();
  /** The function of a source. Each source is compiled once. */
  function compiled(source) {
    if (!made.has(source)) made.set(source, new Function(`return (${source});`)());
    return made.get(source);
  }

  const product = (shape) => shape.reduce((a, b) => a * b, 1);

  /** A size, which may be written with letters: "2HD" is twice the product of the sizes H and D. */
  function sizeOf(size, sizes) {
    if (typeof size === "number") return size;
    const [, factor, letters] = size.match(/^([^A-Z]*)(.*)$/);
    return [...letters].reduce((n, letter) => n * sizes[letter], Number(factor || 1));
  }

  /** The positions of a place: all in order (null), a list, or those that a first one and steps along axes give. */
  function listed(positions, size) {
    if (!positions || !Array.isArray(positions[1])) return positions;
    const [start, shape, steps] = positions;
    return shape.reduceRight((inner, n, axis) => {
      const all = [];
      for (let i = 0; i < size(n); i++) for (const at of inner) all.push(at + i * size(steps[axis]));
      return all;
    }, [size(start)]);
  }

  /** A plan for given sizes, with the functions that it uses. operations: their functions and mistakes, by name. */
  function sized(plan, sizes, operations) {
    const size = (n) => sizeOf(n, sizes);
    const each = (object, act) => Object.fromEntries(Object.entries(object || {}).map(([key, value]) => [key, act(value)]));
    const place = ([buffer, positions]) => [buffer, listed(positions, size)];
    const every = [...new Set(plan.calls.map((call) => call.operation))].map((name) => operations[name]);
    const functions = Object.assign({}, ...every.map((operation) => operation.functions));
    const used = new Set(plan.functions);
    return {
      ...plan,
      functions,
      mistakes: [...every.flatMap(({ mistakes }) => mistakes), ...(plan.mistakes || [])].filter((mistake) => Object.keys(mistake.functions).some((key) => used.has(key)) || mistake.plan),
      buffers: plan.buffers.map((buffer) => ({ ...buffer, shape: buffer.shape.map(size) })),
      calls: plan.calls.map((call) => ({
        ...call, inputs: each(call.inputs, place), adds: each(call.adds, place), sizes: each(call.sizes, size), shapes: each(call.shapes, (shape) => shape.map(size)),
      })),
      gradients: each(plan.gradients, place),
      carry: each(plan.carry, place),
    };
  }

  class Step {
    constructor(plan, weights) {
      this.plan = plan;
      const sizes = plan.parameters.map((number) => product(plan.buffers[number].shape));
      const total = sizes.reduce((a, b) => a + b, 0);
      [this.w, this.g, this.m, this.v] = [0, 1, 2, 3].map(() => new Float64Array(total));
      this.arrays = plan.buffers.map(() => null);
      plan.parameters.reduce((start, number, i) => {
        const end = start + sizes[i];
        this.arrays[number] = this.w.subarray(start, end);
        this.arrays[plan.gradients[number][0]] = this.g.subarray(start, end);
        return end;
      }, 0);
      plan.buffers.forEach((buffer, number) => {
        if (this.arrays[number]) return;
        this.arrays[number] = buffer.data ? Float64Array.from(buffer.data) : new Float64Array(product(buffer.shape));
      });
      this.planted = null;
      this.prepare();
      this.start(weights);
    }

    /** The weights at the beginning, and the means of the optimizer at 0. */
    start(weights) {
      for (const number of this.plan.parameters) this.arrays[number].set(weights[this.plan.buffers[number].name]);
      this.m.fill(0);
      this.v.fill(0);
      for (const name of Object.keys(this.plan.carry || {})) this.arrays[this.plan.inputs[name]].fill(0);
      this.steps = 0;
      this.before = null;
    }

    /** One of the plan's mistakes in place of the functions that it changes, or none of them (null). */
    plant(mistake) {
      this.planted = mistake;
      this.prepare();
    }

    prepare() {
      const { plan } = this;
      const environments = [];
      this.calls = plan.calls.map((call, number) => {
        const before = call.forward === undefined ? {} : environments[call.forward];
        const environment = { ...before, ...call.sizes };
        for (const [name, value] of Object.entries(call.numbers)) environment[`$${name}`] = value;
        const copies = [];
        for (const [name, [buffer, positions]] of Object.entries(call.inputs)) {
          const array = this.arrays[buffer];
          environment[`$${name}`] = positions ? new Float64Array(positions.length) : array;
          if (positions) copies.push([environment[`$${name}`], array, Int32Array.from(positions)]);
        }
        for (const [name, buffer] of Object.entries(call.computed)) environment[`$${name}`] = this.arrays[buffer];
        const { source, computed } = this.planted?.functions[call.function] || plan.functions[call.function];
        for (const [name, axes] of Object.entries(computed)) {
          if (environment[`$${name}`]) continue;
          environment[`$${name}`] = new Float64Array(product(axes.map((axis) => environment[axis.toUpperCase()])));
        }
        environments[number] = environment;
        const adds = Object.entries(call.adds || {}).map(([name, [buffer, positions]]) => (
          [this.arrays[buffer], environment[`$${name}`], positions && Int32Array.from(positions)]
        ));
        return { run: compiled(source), environment, copies, adds };
      });
      this.middle = plan.calls.findIndex((call) => call.phase === "backward");
    }

    give(batch) {
      for (const [name, numbers] of Object.entries(batch)) this.arrays[this.plan.inputs[name]].set(numbers);
    }

    /** One call of the plan. */
    call(number) {
      if (number === this.middle) this.g.fill(0);
      const { run, environment, copies, adds } = this.calls[number];
      for (const [to, from, positions] of copies) for (let i = 0; i < to.length; i++) to[i] = positions[i] < 0 ? 0 : from[positions[i]];
      run(environment);
      for (const [to, from, positions] of adds) {
        if (positions) for (let i = 0; i < from.length; i++) to[positions[i]] += from[i];
        else for (let i = 0; i < from.length; i++) to[i] += from[i];
      }
    }

    forward() {
      for (let number = 0; number < this.middle; number++) this.call(number);
      return this.loss();
    }

    backward() {
      for (let number = this.middle; number < this.calls.length; number++) this.call(number);
    }

    loss() {
      return this.arrays[this.plan.loss][0];
    }

    /** What the next batch is given of this one, such as a memory. */
    carry() {
      for (const [name, [buffer, positions]] of Object.entries(this.plan.carry || {})) {
        const [to, from] = [this.arrays[this.plan.inputs[name]], this.arrays[buffer]];
        for (let i = 0; i < to.length; i++) to[i] = from[positions ? positions[i] : i];
      }
    }

    /** A step of an optimizer. before(number, i): what it was given for a weight of a parameter, by the names of its equations. */
    update(source, settings) {
      this.steps++;
      const kept = Object.entries({ w0: this.w, g: this.g, m0: this.m, v0: this.v, velocity0: this.m }).map(([name, array]) => [name, array.slice()]);
      const from = (number) => this.arrays[number].byteOffset / this.w.BYTES_PER_ELEMENT;
      const decays = (number) => this.plan.buffers[number].shape.length > 1; // as in AdamW, only what has two axes does
      const given = (number) => ({ ...settings, steps: this.steps, decay: decays(number) ? settings.lr * settings.decay : 0 });
      this.before = (number, i) => ({ ...given(number), ...Object.fromEntries(kept.map(([name, array]) => [name, array[from(number) + i]])) });
      for (const number of this.plan.parameters) {
        const [start, end] = [from(number), from(number) + this.arrays[number].length];
        const [w, g, m, v] = [this.w, this.g, this.m, this.v].map((array) => array.subarray(start, end));
        compiled(source)({ ...given(number), w, g, m, v, velocity: m });
      }
    }
  }

  globalThis.Living = { Step, product, sized, sizeOf };
})();
