/* Arrays for numpy.py beside it: {shape, kind, re, im}, in row-major order. kind: f (float), i (integer), b (bool), c (complex).

   A complex number here is a number and its derivative times a tiny step, so that re and im follow the chain rule. */
"use strict";

globalThis.Arrays = (() => {
  const size = (shape) => shape.reduce((a, b) => a * b, 1);
  const make = (shape, kind, re, im = null) => ({ shape: [...shape], kind, re: Float64Array.from(re), im });
  const half = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // to even, as NumPy rounds
  const REAL = {
    add: (a, b) => a + b, subtract: (a, b) => a - b, multiply: (a, b) => a * b, divide: (a, b) => a / b, power: Math.pow,
    maximum: (a, b) => (Number.isNaN(a) || a > b ? a : b), negative: (a) => -a, absolute: Math.abs, exp: Math.exp,
    log: Math.log, log1p: Math.log1p, sqrt: Math.sqrt, tanh: Math.tanh, sin: Math.sin, cos: Math.cos,
    floor: Math.floor, rint: half,
    equal: (a, b) => +(a === b), not_equal: (a, b) => +(a !== b), less: (a, b) => +(a < b), less_equal: (a, b) => +(a <= b),
    greater: (a, b) => +(a > b), greater_equal: (a, b) => +(a >= b), logical_and: (a, b) => +(a && b),
    logical_or: (a, b) => +(a || b), logical_not: (a) => +!a, isfinite: (a) => +Number.isFinite(a),
    where: (c, a, b) => (c ? a : b), erf: (a) => Live.erf(a),
  };
  const SLOPES = { // of each function: the derivative times the steps of its arguments
    add: (a, b, da, db) => da + db, subtract: (a, b, da, db) => da - db, multiply: (a, b, da, db) => da * b + a * db,
    divide: (a, b, da, db) => (da - (a / b) * db) / b, negative: (a, da) => -da, exp: (a, da) => Math.exp(a) * da,
    log: (a, da) => da / a, sqrt: (a, da) => da / (2 * Math.sqrt(a)), tanh: (a, da) => (1 - Math.tanh(a) ** 2) * da,
    sin: (a, da) => Math.cos(a) * da, cos: (a, da) => -Math.sin(a) * da, where: (c, a, b, dc, da, db) => (c ? da : db),
    erf: (a, da) => (2 / Math.sqrt(Math.PI)) * Math.exp(-a * a) * da,
  };
  const BOOL = new Set("equal not_equal less less_equal greater greater_equal logical_and logical_or logical_not isfinite".split(" "));
  const FLOAT = new Set("divide exp log sqrt tanh sin cos erf".split(" "));

  function kindOf(name, arrays) {
    if (BOOL.has(name)) return "b";
    const kinds = arrays.slice(name === "where" ? 1 : 0).map((a) => a.kind).join("");
    const widest = [..."cfi"].find((kind) => kinds.includes(kind)) || (name === "where" || name === "maximum" ? "b" : "i");
    return FLOAT.has(name) && widest !== "c" ? "f" : widest;
  }

  /** The flat index into an array of this shape for each place of `out`, to which it broadcasts, with these strides. */
  function indices(out, strides) {
    let result = [0];
    out.forEach((length, axis) => {
      const next = new Array(result.length * length);
      result.forEach((base, i) => { for (let k = 0; k < length; k++) next[i * length + k] = base + k * strides[axis]; });
      result = next;
    });
    return result;
  }

  function stridesOf(shape) {
    const strides = new Array(shape.length).fill(1);
    for (let i = shape.length - 2; i >= 0; i--) strides[i] = strides[i + 1] * shape[i + 1];
    return strides;
  }

  /** The elements of an array at flat indices, with a new shape. */
  function pick(a, shape, flat) {
    return make(shape, a.kind, flat.map((i) => a.re[i]), a.im && Float64Array.from(flat, (i) => a.im[i]));
  }

  function spread(a, out) {
    if (size(out) === a.re.length && a.shape.length === out.length) return a;
    const strides = stridesOf(a.shape).map((stride, axis) => (a.shape[axis] === 1 ? 0 : stride));
    return pick(a, out, indices(out, [...new Array(out.length - a.shape.length).fill(0), ...strides]));
  }

  function map(name, out, ...arrays) {
    const wide = arrays.map((a) => spread(a, out));
    const n = size(out);
    const re = new Float64Array(n);
    for (let i = 0; i < n; i++) re[i] = REAL[name](...wide.map((a) => a.re[i]));
    const slope = arrays.some((a) => a.im) && SLOPES[name];
    if (!slope) return make(out, kindOf(name, arrays), re);
    const im = new Float64Array(n);
    for (let i = 0; i < n; i++) im[i] = slope(...wide.map((a) => a.re[i]), ...wide.map((a) => (a.im ? a.im[i] : 0)));
    return make(out, "c", re, im);
  }

  function transpose(a, order) {
    const strides = stridesOf(a.shape);
    const shape = order.map((axis) => a.shape[axis]);
    return pick(a, shape, indices(shape, order.map((axis) => strides[axis])));
  }

  const REDUCE = {
    sum: (a, x) => a + x, prod: (a, x) => a * x, any: (a, x) => +(a || x), all: (a, x) => +(a && x),
    max: (a, x) => (Number.isNaN(a) || a > x ? a : x), min: (a, x) => (Number.isNaN(a) || a < x ? a : x),
  };
  const BEGIN = { sum: 0, prod: 1, any: 0, all: 1, max: -Infinity, min: Infinity };

  /** A reduction over the last axis, of any length. */
  function reduce(name, a, initial) {
    const shape = a.shape.slice(0, -1);
    const [count, length] = [size(shape), a.shape[a.shape.length - 1]];
    const rows = Array.from({ length: count }, (_, i) => a.re.subarray(i * length, (i + 1) * length));
    if (name === "argmax") {
      return make(shape, "i", rows.map((row) => row.reduce((best, x, i) => (x > row[best] ? i : best), 0)));
    }
    const begin = initial === "" ? BEGIN[name] : Number(initial);
    const re = rows.map((row) => row.reduce(REDUCE[name], begin));
    const kind = { any: "b", all: "b", sum: a.kind === "b" ? "i" : a.kind }[name] || a.kind;
    if (!a.im) return make(shape, kind, re);
    const im = rows.map((row, i) => {
      const steps = a.im.subarray(i * length, (i + 1) * length);
      if (name === "sum") return steps.reduce((sum, x) => sum + x, 0);
      return steps.reduce((sum, x, k) => sum + row.reduce((product, y, j) => product * (j === k ? x : y), 1), 0); // of prod
    });
    return make(shape, "c", re, Float64Array.from(im));
  }

  return {
    make, map, transpose, reduce, spread, pick,
    /** An array from a text with its numbers. */
    read: (shape, kind, text) => make(shape, kind, text ? text.split(" ").map(Number) : []),
    reshaped: (a, shape) => ({ ...a, shape: [...shape] }),
    cast: (a, kind) => ({ ...a, kind, re: kind === "i" ? a.re.map(Math.trunc) : kind === "b" ? a.re.map((x) => +(x !== 0)) : a.re,
      im: kind === "c" ? a.im || new Float64Array(a.re.length) : null }),
    imag: (a) => make(a.shape, "f", a.im || new Float64Array(a.re.length)),
    dual: (re, im) => ({ ...re, kind: "c", im: im.re }),
    list: (a) => [...a.re].map(String),
  };
})();
