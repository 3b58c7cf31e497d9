/* What the models of a living step learn: see docs/_ext/living.py. Each task makes batches from the page's text, and shows
   what the model does with the first sequence. A page gives { text, draw, data, plan, step, writer }.

   reserved: tokens that stand for no character. guess: the loss of blind guessing. */
"use strict";

(function () {
  /** A text as numbers: its most frequent characters, one number for all others, and the reserved tokens. */
  class Text {
    constructor(text, symbols, reserved) {
      this.text = text.replace(/\s+/g, " ");
      const counts = new Map();
      for (const c of this.text) counts.set(c, (counts.get(c) || 0) + 1);
      const frequent = [...counts].sort((a, b) => b[1] - a[1]).slice(0, symbols - reserved.length - 1).map(([c]) => c);
      this.characters = [...frequent.sort(), "·"];
      const known = new Map(this.characters.map((c, i) => [c, i]));
      this.ids = Array.from(this.text, (c) => known.get(c) ?? this.characters.length - 1);
      this.symbols = [...this.characters, ...reserved];
    }

    written(ids) {
      return Array.from(ids, (id) => this.symbols[id] ?? "·").join("");
    }
  }

  const each = (count, make) => Array.from({ length: count }, (_, i) => make(i));
  const filled = (count, value) => new Array(count).fill(value);

  /** Where sequences of a length start. The first one is always the beginning of the text, so that it can be watched. */
  const starts = ({ text, draw, data }, length) => each(data.rows, (row) => (row ? Math.floor(draw() * (text.ids.length - length)) : 0));

  /** The logits that a step has computed: what its first cross-entropy was given. */
  function logits({ plan }, step) {
    return step.arrays[plan.calls.find((call) => call.operation === "cross_entropy").inputs.logits[0]];
  }

  /** A token by its probabilities, made sharper. */
  function sampled(z, draw) {
    const p = z.map((value) => Math.exp(1.4 * (value - Math.max(...z))));
    let rest = draw() * p.reduce((a, b) => a + b, 0);
    const id = p.findIndex((value) => (rest -= value) < 0);
    return id < 0 ? p.length - 1 : id;
  }

  const largest = (z) => z.indexOf(Math.max(...z));

  /** The model goes on with the beginning of the text. before: computes what it remembers of the tokens before. */
  function goOn(page, count, draw, before = () => {}) {
    const { text, data, plan, writer } = page;
    const { length, symbols } = data;
    const ids = text.ids.slice(0, length);
    for (let k = 0; k < count; k++) {
      before(ids);
      writer.arrays[plan.inputs.ids].set(ids.slice(-length));
      writer.forward();
      ids.push(sampled(logits(page, writer).subarray((length - 1) * symbols, (length - 1) * symbols + text.characters.length), draw));
    }
    return [text.written(ids.slice(0, length)), text.written(ids.slice(length))];
  }

  /** Sequences that start there, each token with the one that follows it. */
  const followed = ({ text, data: { length } }, from) => ({
    ids: from.flatMap((start) => text.ids.slice(start, start + length)),
    targets: from.flatMap((start) => text.ids.slice(start + 1, start + length + 1)),
  });

  const guessing = ({ text }) => Math.log(text.characters.length);

  const next = {
    reserved: [],
    says: "What it writes",
    guess: guessing,
    batch(page) {
      return followed(page, starts(page, page.data.length));
    },
    shown: (page) => page.given.ids.slice(0, page.data.length),
    write: goOn,
  };

  /** The text in order: each sequence goes on where the one before it ended, which the model remembers. */
  const segments = {
    ...next,
    batch(page) {
      const { text, data } = page;
      page.at ??= starts(page, data.length);
      page.at = page.at.map((at) => (at + data.length + 1 > text.ids.length ? 0 : at));
      const from = page.at;
      page.at = from.map((at) => at + data.length);
      return followed(page, from);
    },
    write: (page, count, draw) => goOn(page, count, draw, (ids) => {
      const { writer, data, plan } = page;
      writer.arrays[plan.inputs.memory].fill(0);
      if (ids.length < 2 * data.length) return;
      writer.arrays[plan.inputs.ids].set(ids.slice(-2 * data.length, -data.length));
      writer.forward();
      writer.carry();
    }),
  };

  /** Rows of two texts, with hidden tokens. The second text follows the first, or is from elsewhere. */
  const hidden = {
    reserved: ["|", "▢"],
    says: "What it reads in place of ▢",
    guess: (page) => guessing(page) + Math.log(2),
    batch(page) {
      const { text, draw, data } = page;
      const { rows, length, symbols, hidden: count } = data;
      const [bar, box] = [symbols - 2, symbols - 1];
      const half = length / 2 - 1;
      const given = { ids: [], lengths: filled(rows, length), segments: [], places: [], targets: [], unrelated: [] };
      for (const start of starts(page, length)) {
        const unrelated = start && draw() < 0.5 ? 1 : 0;
        const second = unrelated ? Math.floor(draw() * (text.ids.length - half)) : start + half;
        const ids = [bar, ...text.ids.slice(start, start + half), bar, ...text.ids.slice(second, second + half)];
        const places = new Set();
        while (places.size < count) {
          const place = Math.floor(draw() * length);
          if (ids[place] !== bar) places.add(place);
        }
        for (const place of [...places].sort((a, b) => a - b)) {
          given.places.push(place);
          given.targets.push(ids[place]);
          ids[place] = box;
        }
        given.ids.push(...ids);
        given.segments.push(...ids.map((_, i) => (i > half ? 1 : 0)));
        given.unrelated.push(unrelated);
      }
      return given;
    },
    shown: (page) => page.given.ids.slice(0, page.data.length),
    write(page) {
      const { text, data, given, step } = page;
      const ids = given.ids.slice(0, data.length);
      const z = logits(page, page.shown());
      const read = ids.slice();
      given.places.slice(0, data.hidden).forEach((place, k) => { read[place] = largest(z.subarray(k * data.symbols, (k + 1) * data.symbols)); });
      return [`${text.written(ids)} → `, text.written(read)];
    },
  };

  /** A text is translated into the same text, read backwards. */
  const backwards = {
    reserved: ["|"],
    says: "How it reads a text backwards",
    guess: guessing,
    batch(page) {
      const { text, data } = page;
      const { rows, source: length, symbols } = data;
      const source = starts(page, length).map((start) => text.ids.slice(start, start + length));
      const targets = source.map((ids) => ids.slice().reverse());
      const target = targets.map((ids) => [symbols - 1, ...ids.slice(0, -1)]);
      return { source: source.flat(), lengths: filled(rows, length), target: target.flat(), targets: targets.flat() };
    },
    shown: (page) => page.given.source.slice(0, page.data.source),
    write(page) {
      const { text, data, given, plan, writer } = page;
      const { source: length, symbols } = data;
      for (const name of ["source", "lengths", "target"]) writer.arrays[plan.inputs[name]].set(given[name]);
      const target = writer.arrays[plan.inputs.target];
      const ids = [];
      for (let t = 0; t < length; t++) {
        writer.forward();
        ids.push(largest(logits(page, writer).subarray(t * symbols, (t + 1) * symbols)));
        if (t + 1 < length) target[t + 1] = ids[t];
      }
      return [`${text.written(given.source.slice(0, length))} → `, text.written(ids)];
    },
  };

  /** Whether a text is written backwards. */
  const direction = {
    reserved: [],
    says: "Which way it reads",
    guess: () => Math.log(2),
    batch(page) {
      const { text, draw, data } = page;
      const { rows, length } = data;
      const labels = each(rows, (row) => (row && draw() < 0.5 ? 1 : 0));
      const ids = starts(page, length).map((start, row) => {
        const part = text.ids.slice(start, start + length);
        return labels[row] ? part.reverse() : part;
      });
      return { ids: ids.flat(), lengths: filled(rows, length), labels };
    },
    shown: (page) => page.given.ids.slice(0, page.data.length),
    write(page) {
      const { text, data, given } = page;
      const z = logits(page, page.shown());
      const p = 1 / (1 + Math.exp(z[0] - z[1]));
      return [`${text.written(given.ids.slice(0, data.length))} `, `backwards with a probability of ${p.toFixed(2)}`];
    },
  };

  Object.assign(globalThis.Living, { Text, tasks: { next, segments, hidden, backwards, direction } });
})();
