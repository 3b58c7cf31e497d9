/* New numbers in the inputs of a live page: the same ones each time that it is opened. */

globalThis.seed ??= 1;
const uniform = () => (globalThis.seed = (globalThis.seed * 16807) % 2147483647) / 2147483647;

/** A number between two others, a whole one or one with three digits. */
const within = ({ low, high, whole }) => (
  whole ? low + Math.floor(uniform() * (high - low + 1)) : Number((low + uniform() * (high - low)).toPrecision(3))
);

/** A normally distributed number with two decimals, but not 0, where a corner may be. */
function normal() {
  const x = Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  return Math.round(100 * x) / 100 || normal();
}

function draw(page) {
  page.setInputs((name) => {
    const { shape, data } = page.model.array(name);
    const range = page.data.ranges[name];
    return shape.length ? Float64Array.from(data, () => (range ? within(range) : normal())) : data;
  });
}
