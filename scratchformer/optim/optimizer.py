"""The base of all optimizers: parameters in groups, stepped over the flat arrays; and clipping."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from inspect import signature
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, array_module, device_of, to_cpu
from ..checks import expect_boolean, expect_floating, expect_instance, expect_number
from ..dispatch import has_twin, operation
from ..nn import FlatParameters, Param
from ..nn.layer import Structure
from ..ops.rounding import round_into
from ..shell.text import printable, shown

CHUNK = 1 << 16  # elements that a CPU processes at once, so that intermediate results stay in cache
LARGE_CHUNK = 1 << 24  # elements that another device processes at once; intermediate results take 64 MB each


def pieces(flat: Array) -> list[slice]:
    """Slices of a flat array (P,): of cache size on a CPU, larger ones on any other device."""
    size = CHUNK if array_module(flat) is np else LARGE_CHUNK
    return [slice(start, min(start + size, flat.size)) for start in range(0, flat.size, size)]


@dataclass(frozen=True)
class Group:
    """A rule for how an optimizer treats the parameters that match.

    match: a pattern for full names, such as "output.*" or "*.gamma" (`*` matches anything). lr, weight_decay: replace
    the optimizer's. When a schedule changes the optimizer's `lr`, the group's changes in proportion. frozen: the
    parameters are not changed, and the optimizer keeps no state for them.
    """

    match: str
    lr: float | None = None
    weight_decay: float | None = None
    frozen: bool = False

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.match)

    def check(self) -> None:
        """Raise TypeError or ValueError, naming what is wrong."""
        expect_instance("groups: match", self.match, str)
        expect_boolean(**{f"frozen of group {self.match!r}": self.frozen})
        for name in ("lr", "weight_decay"):
            if (value := getattr(self, name)) is not None:
                expect_number(f"{name} of group {self.match!r}", value)


class Treatment(NamedTuple):
    """How a parameter is updated."""

    lr: float  # as a multiple of the optimizer's
    weight_decay: float
    frozen: bool
    whole: bool = False  # updated as an array of its shape, which is not cut


class Stretch(NamedTuple):
    """Parameters that are adjacent in the flat arrays and are treated alike, or one that is updated as a whole."""

    flat: FlatParameters
    where: slice  # in the flat arrays
    state: slice  # in the optimizer's buffers
    treatment: Treatment
    shape: tuple[int, ...] | None = None  # of a parameter that is updated as a whole

    def cuts(self) -> list[int]:
        """Where in the flat array a piece begins, between processes too."""
        start = self.where.start
        return [start] if self.shape else [start + part.start for part in pieces(self.flat.data[self.where])]


class Pieces(NamedTuple):
    """Parts of an array (P,), which a GPU changes together, in one call of an operation that changes arrays in place:
    see `compiler.cuda_pieces`. For such an operation it is like an array.
    """

    flat: Array
    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def dtype(self) -> np.dtype:
        return self.flat.dtype

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def flags(self) -> Any:
        return self.flat.flags

    def reshape(self, _size: int) -> Pieces:
        return self

    def part(self, which: slice) -> Pieces:
        return Pieces(self.flat, self.starts[which], self.shapes[which])


def scaled(g: Array, share: float | Array) -> Array:
    """g times a number, or times an array () on its device, in the type of g."""
    if isinstance(share, float | int):
        return g if share == 1 else (share * g).astype(g.dtype, copy=False)
    return share.astype(g.dtype) * g  # a float64 array () would widen g


class Optimizer:
    """Updates parameters from their gradients.

    params: `layer.parameters()` of a model or of a part of one; or a list of Params, each of which is stepped once,
    however often it is listed (tied weights). Parameters that are adjacent in the flat arrays are stepped together.
    lr: the learning rate, an attribute that a schedule may set before each step; the other settings stay as they are
    given here. weight_decay: see each optimizer.
    groups: rules for some of the parameters. The first group that matches a parameter applies to it; a parameter that
    matches none has the optimizer's own settings. Parameters that are `frozen` are not stepped. `buffers` are the names
    of the state arrays, each as long as all stepped parameters together.

    The layer's parameters must stay the same. If one has been added, removed or frozen, or if the layer has been moved
    or cast, the next step raises ValueError and changes nothing.
    """

    buffers: tuple[str, ...] = ()

    def __init__(
        self, params: Iterable[Param], lr: float, weight_decay: float = 0.0, groups: Sequence[Group] = ()
    ) -> None:
        expect_instance("params", params, Iterable)
        expect_number("lr", lr)
        expect_number("weight_decay", weight_decay)
        self.lr, self.weight_decay = float(lr), float(weight_decay)  # of NumPy's they would make float64 of float32
        self.layer = getattr(params, "layer", None)
        self.params = list({id(p): p for p in params}.values())
        for i, p in enumerate(self.params):
            expect_instance(f"params[{i}]", p, Param)
        if not self.params:
            raise ValueError("params: expected at least one parameter, got none")
        self.names = list(self.layer.named_parameters()) if self.layer else [p.name for p in self.params]
        self.treatments = self._treat(groups)
        self.stepped = [p for p, how in zip(self.params, self.treatments, strict=True) if not how.frozen]
        self.frozen = [p.frozen for p in self.params]
        self.structure: Structure | None = None  # of the layer, when its parameters were last found to be the same
        if not self.stepped:
            raise ValueError("groups: expected a parameter that is not frozen, got none")
        self.steps = 0
        first, size = self.stepped[0].data, sum(p.data.size for p in self.stepped)
        for name in self.buffers:
            setattr(self, name, array_module(first).zeros(size, first.dtype))
        self.place = _place(self.stepped)
        self.part: slice | None = None  # of the flat array, if only this is stepped
        self.flats: list[FlatParameters] = []  # where the parameters were when they were laid out
        self.views: list[Array] = []  # what `gradients` returns
        self.work: tuple[Any, bool, list] | None = None  # the pieces of a step, and what they are for
        self._lay_out()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"flats": [], "together": [], "alike": [], "views": [], "work": None, "structure": None}

    def _treat(self, groups: Sequence[Group]) -> list[Treatment]:
        """How each parameter is treated: by the first group that matches it."""
        if not isinstance(groups, list | tuple) or not all(isinstance(group, Group) for group in groups):
            raise TypeError(f"groups: expected a list of Groups, got {shown(groups)}")
        for group in groups:
            group.check()
            if group.lr is not None and not self.lr > 0:
                raise ValueError(f"lr: expected a number > 0, since a group has its own, got {self.lr}")
        treatments, used = [], set()
        for name, p in zip(self.names, self.params, strict=True):
            group = next((group for group in groups if group.matches(name)), Group("*"))
            used.add(id(group))
            whole = self.is_whole(name, p)
            lr = self.rate_of(whole) if group.lr is None else float(group.lr / self.lr)
            decay = self.decay_of(p) if group.weight_decay is None else group.weight_decay
            frozen = group.frozen or p.frozen
            treatments.append(Treatment(lr, 0.0 if frozen else float(decay), frozen, whole and not frozen))
        for group in groups:
            if id(group) not in used:
                names = ", ".join(self.names[-4:])
                rest = "" if group is groups[0] else " that no group before it matches"
                raise ValueError(f"groups: {group.match!r} matches no parameter{rest}; the last ones are {names}")
        return treatments

    def is_whole(self, name: str, p: Param) -> bool:
        """Whether `update` gets a parameter as an array of its shape, instead of pieces of the flat arrays."""
        return False

    def rate_of(self, whole: bool) -> float:
        """The learning rate of a parameter for which no group sets one, as a multiple of the optimizer's."""
        return 1.0

    def cost_of(self, whole: bool) -> float:
        """About how long `update` takes for one number of a parameter, in units that are the same for all."""
        return 1.0

    def decay_of(self, p: Param) -> float:
        """The weight decay of a parameter for which no group sets one."""
        return self.weight_decay

    def settings(self) -> dict[str, Any]:
        """The kind of optimizer and its treatment of each parameter, as JSON values for a snapshot.

        "groups" lists the different treatments, each with the names of its parameters; "lr" is a multiple of the
        optimizer's.
        """
        by_treatment: dict[Treatment, list[str]] = {}
        for name, how in zip(self.names, self.treatments, strict=True):
            by_treatment.setdefault(how, []).append(name)
        groups = [how._asdict() | {"parameters": names} for how, names in by_treatment.items()]
        return {"class": type(self).__name__, "groups": groups}

    def zero_grad(self) -> None:
        """Set the gradients of the stepped parameters to zero. The optimizer's state does not change."""
        for grad in self.gradients():
            grad[...] = 0

    def gradients(self) -> list[Array]:
        """The gradients of the stepped parameters, for clipping: as few views of the flat arrays as possible."""
        self._lay_out()
        if not self.views:
            runs = [(run.flat, run.where) for run in self._kept(self.together, self.part)]
            # On a GPU each view takes several calls, and is not cut for threads.
            if runs and array_module(runs[0][0].grad) is not np:
                runs = neighbours_joined(runs)
            self.views = [flat.grad[where] for flat, where in runs]
        return [*self.views]

    def slices(self, count: int) -> list[slice]:
        """Slices of the flat array that take about equally long to step. No piece is cut, neither of `step` nor of
        clipping.

        Raises ValueError if the parameters are in several flat arrays, or in another order than in theirs.
        """
        self._lay_out()
        (flat, *others) = set(self.flats)
        if others:
            raise ValueError(f"params: expected one flat array, got {1 + len(others)}")
        work = 0.0  # of all numbers so far
        before: dict[int, float] = {}  # each start of a piece
        for run in self.together:
            cost = self.cost_of(run.shape is not None)
            before |= {start: work + cost * (start - run.where.start) for start in run.cuts()}
            work += cost * (run.where.stop - run.where.start)
        if list(before) != sorted(before):
            raise ValueError("params: expected them in the order of the flat array, to divide them among processes")
        even = (i * work / count for i in range(1, count))
        cuts = [0, *(min(before, key=lambda start: abs(before[start] - cut)) for cut in even), flat.data.size]
        return [slice(a, b) for a, b in pairwise(cuts)]

    def state_of(self, part: slice) -> slice:
        """Where in the buffers the state for a part of the flat array is."""
        self._lay_out()
        slices = [run.state for run in self._kept(self.together, part)]
        return slice(slices[0].start, slices[-1].stop) if slices else slice(0, 0)

    def keep(self, part: slice) -> None:
        """From now on step only a part of the flat array, one of its `slices`, and keep only the state for it."""
        self.kept = self.state_of(part)
        self.part, self.views, self.work = part, [], None
        for name in self.buffers:
            setattr(self, name, getattr(self, name)[self.kept].copy())

    def _kept(self, runs: list[Stretch], part: slice | None) -> Iterator[Stretch]:
        """What is to be stepped of runs if only a part of the flat array is; with None, everything."""
        for run in runs:
            if part is None:
                yield run
                continue
            start, stop = max(run.where.start, part.start), min(run.where.stop, part.stop)
            shift = run.state.start - run.where.start
            if start < stop:
                yield run._replace(where=slice(start, stop), state=slice(start + shift, stop + shift))

    def step(self, map: Callable = map, share: float | Array = 1.0, half: Array | None = None) -> None:
        """Update the parameters in place from their gradients, which are not changed.

        map: applies a function to independent pieces of the arrays; the `map` of a thread pool runs them in parallel.
        The largest come first, so that threads which take turns have about equal work. share: the number
        by which gradients are first multiplied, see `share_for`. half: an array as long as the flat array, which
        gets the new weights, rounded to its type.
        """
        self._expect_same_parameters()
        self._lay_out()
        self.steps += 1
        flat = self.flats[0].data  # on a GPU operations take `Pieces` of the flat arrays
        together = array_module(flat) is not np and has_twin(round_into, *2 * (Pieces(flat, (0,), (flat.shape,)),))
        if self.work is None or self.work[0] is not half or self.work[1] != together:
            self.work = half, together, self._pieces(half, together)

        def update(item: tuple[list[Any], Treatment]) -> None:
            (w, g, *buffers), how = item
            to = None if half is None else buffers.pop()
            settings: dict[str, Any] = dict(lr=float(self.lr) * how.lr, weight_decay=how.weight_decay)
            if self.scales:
                self.update(w, g, *buffers, share=share, **settings)
            else:
                self.update(w, scaled(g, share), *buffers, **settings)
            if to is not None:
                round_into(w, to)

        list(map(update, self.work[2]))

    @cached_property
    def scales(self) -> bool:
        """Whether `update` multiplies the gradient itself, by its argument `share`. Then it also takes `Pieces`."""
        return "share" in signature(self.update).parameters

    def joins(self, how: Treatment) -> bool:
        """Whether `update` takes `Pieces` of parameters that are treated so."""
        return self.scales

    def _pieces(self, half: Array | None, together: bool) -> list[tuple[list[Any], Treatment]]:
        """What `update` gets in a step, the largest first: views of the arrays, and how they are treated.

        together: where `joins` allows it, `Pieces` of all parameters that are treated alike. Matrices are put together
        if they, or their transposes, have the same shape.
        """
        work: list[tuple[list[Any], Treatment]] = []
        first = 0 if self.part is None else self.kept.start  # of the state that is kept
        joined: dict[tuple, list[Stretch]] = {}
        for run in self._kept(self.alike, self.part):
            if together and self.joins(run.treatment):
                joined.setdefault((run.flat, run.treatment, *sorted(run.shape or ())), []).append(run)
                continue
            arrays = [run.flat.data[run.where], run.flat.grad[run.where]]
            state = slice(run.state.start - first, run.state.stop - first)
            arrays += [getattr(self, name)[state] for name in self.buffers]
            arrays += [] if half is None else [half[run.where]]
            if run.shape:
                work.append(([a.reshape(run.shape) for a in arrays], run.treatment))
            else:
                work += [([a[part] for a in arrays], run.treatment) for part in pieces(arrays[0])]
        for (flat, treatment, *shape), runs in joined.items():
            runs.sort(key=lambda run: run.shape or ())
            count = max(1, LARGE_CHUNK // math.prod(shape))
            for some in (runs[start : start + count] for start in range(0, len(runs), count)):
                shapes = tuple(run.shape or (run.where.stop - run.where.start,) for run in some)
                here, place = tuple(run.where.start for run in some), tuple(run.state.start - first for run in some)
                parts = [Pieces(flat.data, here, shapes), Pieces(flat.grad, here, shapes)]
                parts += [Pieces(getattr(self, name), place, shapes) for name in self.buffers]
                work.append((parts + ([] if half is None else [Pieces(half, here, shapes)]), treatment))
        return sorted(work, key=lambda item: (item[1].whole, item[0][0].size), reverse=True)

    def update(self, w: Array, g: Array, *buffers: Any, **settings: Any) -> None:
        """Step one piece of the flat arrays, or in its shape one parameter that `is_whole`: change `w` and `buffers`
        in place, but not `g`. settings: lr and weight_decay. If it has an argument `share`, g is to be multiplied by
        that first, and all arrays may be `Pieces`.
        """
        raise TypeError(f"{type(self).__name__} has no update")

    def _lay_out(self) -> None:
        """Find the runs again if the parameters' arrays have changed; parameters outside flat arrays are put into one.
        Raises ValueError if parameters were moved or cast.
        """
        if [p.flat for p in self.stepped] == self.flats:
            return
        if (place := _place(self.stepped)) != self.place:
            raise ValueError(f"params: expected {self.place}, got {place}: make the optimizer after layer.to()")
        if loose := [p for p in self.stepped if p.flat is None]:
            FlatParameters(loose)
        self.flats, self.views, self.work = [p.flat for p in self.stepped if p.flat], [], None
        self.together = list(self._runs(lambda _how: None))
        self.alike = list(self._runs(lambda how: how))

    def _runs(self, kind: Callable[[Treatment], Any]) -> Iterator[Stretch]:
        """The stepped parameters, as runs of neighbours whose treatments have the same `kind`. One that is updated as a
        whole is a run by itself.
        """
        slices = {flat: flat.slices() for flat in set(self.flats)}
        stops = accumulate(p.data.size for p in self.stepped)
        treatments = (how for how in self.treatments if not how.frozen)
        runs = [
            Stretch(
                flat, slices[flat][id(p)], slice(stop - p.data.size, stop), how, p.data.shape if how.whole else None
            )
            for p, flat, stop, how in zip(self.stepped, self.flats, stops, treatments, strict=True)
        ]

        # Between neighbours the distance is the same in the flat array and in the buffers.
        def alike(run: Stretch) -> tuple:
            start = run.state.start if run.shape else None
            return run.flat, run.where.start - run.state.start, start, kind(run.treatment)

        for _, same in groupby(runs, alike):
            first, *_, last = [*same] * 2
            where, state = (slice(a.start, b.stop) for a, b in ((first.where, last.where), (first.state, last.state)))
            yield first._replace(where=where, state=state)

    def _expect_same_parameters(self) -> None:
        """Raise ValueError if parameters of the layer were added, removed, frozen or unfrozen."""
        if (
            self.structure is not None
            and self.structure.is_unchanged()
            and self.frozen == [p.frozen for p in self.params]
        ):
            return
        ids = {id(p) for p in self.params}
        now = {} if self.layer is None else {id(p): name for name, p in self.layer.named_parameters().items()}
        changes = {
            "added": [name for key, name in now.items() if key not in ids],
            "removed": [name for name, p in zip(self.names, self.params, strict=True) if now and id(p) not in now],
            "frozen or unfrozen": [
                name for name, p, before in zip(self.names, self.params, self.frozen, strict=True) if p.frozen != before
            ],
        }
        for what, names in changes.items():
            if names:
                listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                raise ValueError(f"params: {listed} {what} after the optimizer was made: make a new optimizer")
        self.structure = None if self.layer is None else Structure(self.layer)

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state by name, on the CPU: the number of steps, a checksum of the names of the parameters that it is for,
        and the buffers.
        """
        state = {name: to_cpu(getattr(self, name)).copy() for name in self.buffers}
        return {"steps": np.array(self.steps, np.int64), "parameters": np.array(self._checksum, np.int64), **state}

    @cached_property
    def _checksum(self) -> int:
        """CRC-32 of the names of the stepped parameters, in order."""
        names = (name for name, how in zip(self.names, self.treatments, strict=True) if not how.frozen)
        return zlib.crc32("\n".join(names).encode())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises ValueError, and changes nothing, if it is from another optimizer or model."""
        if np.asarray(state.get("parameters", self._checksum)).tolist() != self._checksum:
            raise ValueError(
                "state of another optimizer: its parameters have other names or another order, or others are frozen"
            )
        expected = {name: _kind(getattr(self, name)) for name in self.buffers}
        expected |= {"steps": "int64 ()", "parameters": "int64 ()"}
        given = {name: _kind(value) for name, value in state.items()}
        for name in sorted(expected.keys() | given.keys(), key=str):
            if expected.get(name) != given.get(name):
                got = f"expected {expected.get(name, 'none')}, got {given.get(name, 'none')}"
                raise ValueError(f"state of another optimizer: {printable(str(name))}: {got}")
        self.steps = int(state["steps"])
        xp = array_module(self.stepped[0].data)
        for name in self.buffers:
            getattr(self, name)[...] = xp.asarray(to_cpu(state[name]))


def neighbours_joined(runs: list[tuple[FlatParameters, slice]]) -> list[tuple[FlatParameters, slice]]:
    """Slices of flat arrays, of which those that follow each other are one."""
    joined: list[tuple[FlatParameters, slice]] = []
    for flat, where in runs:
        if joined and joined[-1][0] is flat and joined[-1][1].stop == where.start:
            where = slice(joined.pop()[1].start, where.stop)
        joined.append((flat, where))
    return joined


def _kind(value: Any) -> str:
    """The dtype and shape of an array: "float32 (3, 4)"."""
    return f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else type(value).__name__


def _place(params: list[Param]) -> str:
    """The dtype and device of parameters: "float32 on cpu"."""
    return " and ".join(sorted({f"{p.data.dtype} on {device_of(p.data)}" for p in params}))


@operation
def sum_of_squares(x: Array) -> Array:
    """Σ_i x_i² of an array (n,), in float64."""
    wide = x.astype(np.float64)
    return wide @ wide


@operation
def scale(x: Array, share: float | Array) -> None:
    """Multiply an array (n,) in place. share: a number; on a GPU it may be an array () there.

    With x0 for x before,

        x_i = share x0_i
    """
    x *= share


def global_norm(grad: Array | Sequence[Array], map: Callable = map, gather: Callable | None = None) -> float | Array:
    """‖g‖, the root of the sum of squares of a flat gradient (P,), or of several arrays taken together. It is computed
    in float64. map: as for `Optimizer.step`. gather: for a gradient of which every process has a part; makes of a list
    the lists of all processes, in order. On a GPU the norm is an array () there, since for a number the host would have
    to wait.
    """
    squares = list(map(sum_of_squares, _cut(grad)))
    squares = squares if gather is None else [*chain(*gather(squares))]
    total = sum(squares[1:], *squares[:1])
    xp = array_module(total)
    return math.sqrt(float(total)) if xp is np else xp.sqrt(total)


def clip_by_global_norm(
    grad: Array | Sequence[Array], max_norm: float, map: Callable = map, gather: Callable | None = None
) -> float | Array:
    """Scale gradients in place so that their norm is at most `max_norm`. Returns their norm before scaling, see
    `global_norm`.

    grad: a flat gradient (P,), such as `model.flat.grad`, or several arrays taken together, such as
    `optimizer.gradients()`. All are scaled by the same number, so the direction is preserved. If the norm is not
    finite, nothing is scaled. map: applies a function to independent pieces, as for `Optimizer.step`. gather: see
    `global_norm`.

    With g the gradient before and c after,

        norm = √(Σ_i g_i²)        c_i = min(1, max_norm/norm) g_i        √(Σ_i c_i²) = min(norm, max_norm)

    Source: Pascanu et al., "On the difficulty of training RNNs", 2013, algorithm 1.
    """
    expect_number("max_norm", max_norm, zero=False, infinite=True)
    norm = global_norm(grad, map, gather)
    share = share_for(norm, max_norm)
    if not isinstance(share, float) or share != 1:
        list(map(lambda piece: scale(piece, share), _cut(grad)))
    return norm


@operation
def share_for(norm: float | Array, max_norm: float) -> float | Array:
    """The number by which a gradient of this norm is multiplied, so that its norm is at most `max_norm`; 1 if the norm
    is not finite. On a GPU it is an array (), as the norm is.
    """
    xp = array_module(norm)
    if xp is np:
        return max_norm / norm if math.isfinite(norm) and norm > max_norm else 1.0
    too_long = xp.isfinite(norm) & (norm > max_norm)  # which the host does not know
    return xp.where(too_long, max_norm / xp.where(too_long, norm, 1), 1)


def _cut(grad: Array | Sequence[Array]) -> list[Array]:
    """Views of one or several arrays, on a CPU in pieces of cache size."""
    arrays: list[Array] = [*grad] if isinstance(grad, list | tuple) else [grad]
    cut = []
    for g in arrays:
        expect_floating(grad=g)
        if not g.flags.c_contiguous:
            raise ValueError("grad: expected contiguous arrays, since they are scaled in place")
        flat = g.reshape(-1)
        whole = array_module(flat) is not np and has_twin(sum_of_squares, flat)  # which needs no intermediate results
        cut += [flat] if whole else [flat[part] for part in pieces(flat)]
    return cut
