"""As much of NumPy as the checks of derivations use, on the arrays of arrays.js, for Python in a browser."""

import builtins

from browser import window

Arrays = window.Arrays
KINDS = {bool: "b", int: "i", float: "f", complex: "c"}
inf, nan = float("inf"), float("nan")
generic = ()  # no scalars: a reduction of a whole array gives a number of Python


class DType:
    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return self.kind == KINDS.get(other)


class ndarray:
    def __init__(self, js):
        self.js, self.shape = js, tuple(js.shape)
        self.ndim, self.size, self.dtype = len(self.shape), product(self.shape), DType(js.kind)

    @property
    def real(self):
        return self.astype(float) if self.js.kind == "c" else self

    @property
    def imag(self):
        return ndarray(Arrays.imag(self.js))

    @property
    def flat(self):
        return self.tolist_flat()

    def tolist_flat(self):
        kind = {"b": lambda x: x != "0", "i": lambda x: int(float(x))}.get(self.js.kind, number)
        return [kind(x) for x in Arrays.list(self.js)]

    def reshape(self, *shape):
        shape = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if -1 in shape:
            known = -product(shape)
            shape[shape.index(-1)] = self.size // known if known else 0
        if product(shape) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {tuple(shape)}")
        return ndarray(Arrays.reshaped(self.js, shape))

    def ravel(self):
        return self.reshape(self.size)

    def transpose(self, order):
        return ndarray(Arrays.transpose(self.js, list(order)))

    def astype(self, type):
        return ndarray(Arrays.cast(self.js, KINDS[type]))

    def copy(self):
        return self

    def squeeze(self, axis):
        return self.reshape([size for place, size in enumerate(self.shape) if place != axis])

    def reduced(self, name, axis=None, keepdims=False, initial=None):
        axes = tuple(range(self.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        axes = [place % self.ndim for place in axes]
        rest = [place for place in range(self.ndim) if place not in axes]
        shape = [self.shape[place] for place in rest]
        moved = self.transpose([*rest, *axes]).reshape([*shape, product(self.shape[place] for place in axes)])
        result = ndarray(Arrays.reduce(name, moved.js, "" if initial is None else str(float(initial))))
        if axis is None:
            return result.flat[0]
        return result.reshape([1 if i in axes else n for i, n in enumerate(self.shape)]) if keepdims else result

    def any(self, axis=None):
        return self.reduced("any", axis)

    def all(self, axis=None):
        return self.reduced("all", axis)

    def max(self, axis=None, initial=None, keepdims=False):
        return self.reduced("max", axis, keepdims, initial)

    def min(self, axis=None, initial=None, keepdims=False):
        return self.reduced("min", axis, keepdims, initial)

    def sum(self, axis=None, keepdims=False):
        return self.reduced("sum", axis, keepdims)

    def prod(self, axis=None):
        return self.reduced("prod", axis)

    def argmax(self, axis=None, keepdims=False):
        return self.reduced("argmax", axis, keepdims)

    def __getitem__(self, key):
        keys = list(key) if isinstance(key, tuple) else [key]
        if isinstance(keys[0], ndarray) and keys[0].js.kind == "b":
            (mask,) = keys
            inner = self.shape[mask.ndim :]
            rows = [i for i, inside in enumerate(mask.flat) if inside]
            step = product(inner)
            return self.picked((len(rows), *inner), [row * step + i for row in rows for i in range(step)])
        if isinstance(keys[0], ndarray) and keys[0].ndim:
            shape, flat = broadcast_shapes(*(each.shape for each in keys)), None
            for place, size in zip(keys, self.shape, strict=True):
                flat = place if flat is None else flat * size + place
            return self.picked(shape, broadcast_to(flat, shape).flat)
        shape, flat = [], [0]
        for axis, size in enumerate(self.shape):
            each = keys[axis] if axis < len(keys) else slice(None)
            inside = range(*each.indices(size)) if isinstance(each, slice) else [int(each) % size]
            if isinstance(each, slice):
                shape.append(len(inside))
            flat = [base * size + i for base in flat for i in inside]
        return self.picked(shape, flat) if shape else self.picked(shape, flat).flat[0]

    def picked(self, shape, flat):
        return ndarray(Arrays.pick(self.js, list(shape), flat))

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __len__(self):
        return self.shape[0]

    def __float__(self):
        return number(Arrays.list(self.js)[0])

    def __int__(self):
        return int(float(self))

    __index__ = __int__

    def __bool__(self):
        return float(self) != 0

    def __format__(self, spec):
        return format(float(self), spec) if spec else str(self)

    def __str__(self):
        return str(self.flat[0])

    def __hash__(self):
        return hash(float(self))

    def __round__(self):
        return round(float(self))

    def __pow__(self, other):
        return pointwise("power", self, other)

    def __matmul__(self, other):
        return (self * other).sum()

    def __neg__(self):
        return pointwise("negative", self)

    def __abs__(self):
        return pointwise("absolute", self)

    def __invert__(self):
        return pointwise("logical_not", self)


def operator(name, swapped=False):
    return lambda self, other: pointwise(name, other, self) if swapped else pointwise(name, self, other)


for _method, _name in {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}.items():
    setattr(ndarray, f"__{_method}__", operator(_name))
    setattr(ndarray, f"__r{_method}__", operator(_name, swapped=True))
for _method, _name in {
    "and": "logical_and", "or": "logical_or", "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
    "gt": "greater", "ge": "greater_equal",
}.items():  # fmt: skip
    setattr(ndarray, f"__{_method}__", operator(_name))
ndarray.__ror__, ndarray.__rand__ = ndarray.__or__, ndarray.__and__


def number(text):
    return {"Infinity": inf, "-Infinity": -inf, "NaN": nan}[text] if text[-1] in "yN" else float(text)


def product(numbers):
    result = 1
    for each in numbers:
        result *= each
    return result


def made(shape, kind, numbers):
    """An array with these numbers. They are passed as a text: JavaScript does not know Python's numbers."""
    text = " ".join(each if isinstance(each, str) else str(float(each)) for each in numbers)
    return ndarray(Arrays.read(shape, kind, text.replace("inf", "Infinity").replace("nan", "NaN")))


def asarray(value, dtype=None):
    if isinstance(value, ndarray):
        array = value
    elif isinstance(value, complex):
        array = ndarray(Arrays.dual(asarray(value.real).js, asarray(value.imag).js))
    elif isinstance(value, (list, tuple)):
        array = stack([asarray(each) for each in value]) if value else made([0], "f", [])
    else:
        array = made([], KINDS[type(value)], [value])
    return array.astype(dtype) if dtype else array


array = asarray


def pointwise(name, *values):
    arrays = [asarray(value) for value in values]
    return ndarray(Arrays.map(name, list(broadcast_shapes(*(each.shape for each in arrays))), *(a.js for a in arrays)))


def broadcast_shapes(*shapes):
    result = []
    for place in range(1, builtins.max(map(len, shapes), default=0) + 1):
        sizes = {shape[-place] for shape in shapes if len(shape) >= place} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes do not go together: {', '.join(map(str, shapes))}")
        result.append(sizes.pop() if sizes else 1)
    return tuple(reversed(result))


def broadcast_to(value, shape):
    value = asarray(value)
    if broadcast_shapes(value.shape, shape) != tuple(shape):
        raise ValueError(f"shape {value.shape} does not broadcast to {tuple(shape)}")
    return ndarray(Arrays.spread(value.js, list(shape)))


def broadcast_arrays(*values):
    shape = broadcast_shapes(*(each.shape for each in values))
    return [broadcast_to(each, shape) for each in values]


def function(name):
    return lambda *values: pointwise(name, *values)


for _name in (
    "add subtract multiply divide power maximum negative exp log log1p sqrt tanh sin cos floor rint equal not_equal "
    "less less_equal greater greater_equal isfinite where erf"
).split():
    globals()[_name] = function(_name)
round = rint  # noqa: F821
abs = function("absolute")


class logical_and:
    @staticmethod
    def reduce(arrays):
        result = array(True)
        for each in arrays:
            result = result & each
        return result


class errstate:
    def __init__(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def filled(value):
    return lambda shape, dtype=float: broadcast_to(
        asarray(value).astype(dtype), [shape] if isinstance(shape, int) else shape
    )


ones, zeros = filled(1.0), filled(0.0)


def ones_like(x):
    return ones(x.shape, float)


def zeros_like(x):
    return zeros(x.shape, int)


def arange(size, dtype=int):
    return made([size], KINDS[dtype], range(size))


def eye(rows, columns=None, dtype=float):
    return (arange(rows).reshape(rows, 1) == arange(rows if columns is None else columns)).astype(dtype)


def nan_to_num(x, nan=0.0):
    return where(x == x, x, nan)  # noqa: F821


def clip(x, low, high):
    return where(x < low, low, where(x > high, high, x))  # noqa: F821


def shape(x):
    return x.shape


def ravel(x):
    return asarray(x).ravel()


def argmax(x):
    return asarray(x).argmax()


def max(x, initial=None):
    return asarray(x).max(initial=initial)


def all(x):
    return asarray(x).all()


def prod(x):
    return product(x)


def ptp(x):
    return asarray(x).max() - asarray(x).min()


def count_nonzero(x):
    return int((x != 0).sum())


def iscomplexobj(x):
    return asarray(x).js.kind == "c"


def array_equal(a, b):
    return a.shape == b.shape and bool((a == b).all())


def unravel_index(flat, shape):
    places = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        places.insert(0, place)
    return tuple(places)


def take_along_axis(x, indices, axis):
    places = [arange(n).reshape([n if i == place else 1 for i in range(x.ndim)]) for place, n in enumerate(x.shape)]
    return x[tuple(indices if place == axis else each for place, each in enumerate(places))]


def stack(arrays):
    shape, kind = arrays[0].shape, arrays[0].js.kind
    data = [each for one in arrays for each in Arrays.list(one.js)]
    return made([len(arrays), *shape], kind, data)


def moveaxis(x, source, target):
    source, target = ([each] if isinstance(each, int) else list(each) for each in (source, target))
    order = [axis for axis in range(x.ndim) if axis not in source]
    for to, axis in sorted(zip(target, source, strict=True)):
        order.insert(to, axis)
    return x.transpose(order)


def diagonal(x, axis1, axis2):
    rest = [axis for axis in range(x.ndim) if axis not in (axis1, axis2)]
    moved = x.transpose([axis1, axis2, *rest])
    steps = arange(moved.shape[0] if moved.shape[0] < moved.shape[1] else moved.shape[1])
    rows = moved.reshape(moved.shape[0] * moved.shape[1], *moved.shape[2:])
    chosen = [int(step) * (moved.shape[1] + 1) for step in steps.flat]
    inner = product(rows.shape[1:])
    picked = rows.picked([len(chosen), *rows.shape[1:]], [row * inner + i for row in chosen for i in range(inner)])
    return picked.transpose([*range(1, picked.ndim), 0])


def flatnonzero(x):
    return asarray([i for i, each in enumerate(x.flat) if each])


def argwhere(x):
    return [list(unravel_index(i, x.shape)) for i, each in enumerate(x.flat) if each]


def unique(x, return_inverse=False, return_counts=False):
    flat = x.flat
    values = sorted(set(flat))
    if not return_inverse:
        return asarray(values)
    return (
        asarray(values),
        asarray([values.index(each) for each in flat]),
        asarray([flat.count(each) for each in values]),
    )
