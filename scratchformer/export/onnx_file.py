"""ONNX files: a decoder's graph from token ids to logits, for any length up to its context and any batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import to_cpu
from ..checks import checked_on_host
from ..models import LanguageModel
from ..nn import Layer
from ..shell.files import replacing
from ..version import __version__
from .recording import Node, NotRecorded, Recorded, Recorder, Sizes

OPSET, IR_VERSION = 17, 8  # of 2022, which the programs of today read; 17 is the first with LayerNormalization
IN_ONE_FILE = 2_000_000_000  # bytes of weights; more are written to a file of their own beside the graph
DATA = ".data"  # the end of its name


def library() -> Any:
    """The package onnx; raises ImportError, which says what to install."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError("ONNX files need the library onnx: pip install 'scratchformer[export]'") from error
    return onnx


def write_onnx(model: LanguageModel, path: Path) -> None:
    """Write `model` to the new file `path`: input_ids (B, T), int64, to logits (B, T, V).

    T may be 1 to the model's context. More than 2 GB of weights go to a file beside it, whose name ends in .data.
    Raises NotRecorded if the model computes something that has no counterpart in ONNX here.
    """
    onnx = library()
    graph = onnx_graph(model)
    proto = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="scratchformer",
        producer_version=__version__,
    )
    apart = sum(len(each.raw_data) for each in graph.initializer) > IN_ONE_FILE
    data = path.name + DATA
    with replacing(path) as unfinished:
        onnx.save_model(proto, unfinished, save_as_external_data=apart, location=data if apart else None)
        if apart:
            os.replace(unfinished.with_name(data), path.with_name(data))


def onnx_graph(model: LanguageModel) -> Any:
    """The graph of `model`. It is recorded for batches of several sizes, and must be the same for all of them."""
    T = model.body.max_length
    if T < 2:
        raise NotRecorded(f"context: expected at least 2 for an export to ONNX, got {T}")
    batches = [(2, T), (3, T), (2, T - 1), (1, 1), (1, T), (4, (T + 1) // 2)]
    return joined(batches, [recorded(model, *batch) for batch in batches])


def recorded(model: LanguageModel, B: int, T: int) -> list[Node]:
    """The nodes of one run on ids (B, T)."""
    recorder = Recorder()
    with checked_on_host(), holding(model, recorder):
        logits, _ = model.forward(Recorded(recorder, "input_ids", (B, T), np.int64))
    recorder.record("Identity", [logits.astype(np.float32)], logits.shape, np.float32)
    nodes, recorder.nodes = recorder.nodes, []  # tables that are kept for the next call also keep the recorder
    return nodes


@contextmanager
def holding(model: Layer, recorder: Recorder) -> Iterator[None]:
    """Inside the block the parameters of `model` are constants of a recorder."""
    params = model.named_parameters()
    kept = {name: (p._data, p.written, p.flat) for name, p in params.items()}
    try:
        for name, p in params.items():
            p.bind(recorder.asarray(to_cpu(p.data), name=name), p.written, p.flat)
        yield
    finally:
        for name, p in params.items():
            p.bind(*kept[name])


def joined(batches: Sequence[tuple[int, int]], runs: Sequence[list[Node]]) -> Any:
    """One graph for all batches, from the nodes of runs of some (B, T).

    The first three are of (B, T), (B + 1, T) and (B, T − 1). They give the whole numbers b, t and c of each size n of a
    node as n = b B + t T + c; the other runs must agree. A constant of fewer rows than that of the first run must be
    part of it, and becomes a slice of it. Raises NotRecorded if the graphs differ in any other way.
    """
    onnx = library()
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    nodes, initializers = [], []
    names: dict[Any, str] = {}  # of constants and sizes, by what they are

    def constant(array: np.ndarray, name: str = "") -> str:
        key = name or (array.dtype.str, array.shape, array.tobytes())
        if key not in names:
            names[key] = name or f"c{len(names)}"
            initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), names[key]))
        return names[key]

    def sizes(each: Sequence[Sizes]) -> str:
        """The name of the input that these sizes, one for each run, become."""
        rows = [fitted(batches, values) for values in zip(*(x.values for x in each), strict=True)]
        matrix = np.array(rows, np.int64)  # (sizes, 3)
        if not matrix[:, :2].any():
            return constant(matrix[0, 2] if each[0].scalar else matrix[:, 2])
        matrix = matrix[0] if each[0].scalar else matrix
        key = ("sizes", matrix.shape, matrix.tobytes())
        if key not in names:
            names[key] = f"s{len(names)}"
            nodes.append(helper.make_node("MatMul", [constant(matrix), "batch_sizes"], [names[key]]))
        return names[key]

    differ = NotRecorded("the model computes something else for other lengths, which cannot be exported to ONNX")
    nodes.append(helper.make_node("Shape", ["input_ids"], ["ids_shape"]))
    nodes.append(helper.make_node("Concat", ["ids_shape", constant(np.array([1]))], ["batch_sizes"], axis=0))
    if len({len(run) for run in runs}) > 1:
        raise differ
    renamed: dict[str, str] = {}
    for i, each in enumerate(zip(*runs, strict=True)):
        node, result = each[0], f"n{i}"
        if any((x.op, x.name, x.attributes) != (node.op, node.name, node.attributes) for x in each):
            raise differ
        if node.constant is None:
            inputs = []
            for column in zip(*(x.inputs for x in each), strict=True):
                if isinstance(column[0], Sizes):
                    inputs.append(sizes(column))
                else:
                    inputs.append(renamed.get(column[0], column[0]))
                    if set(column) != {column[0]}:
                        raise differ
            nodes.append(helper.make_node(node.op, inputs, [result], **node.attributes))
            continue
        arrays = [x.constant for x in each]
        renamed[result] = constant(arrays[0], node.name)
        if any(a is not arrays[0] and not np.array_equal(a, arrays[0]) for a in arrays):
            starts = [place(a, arrays[0]) for a in arrays]
            ends = [start + len(a) for start, a in zip(starts, arrays, strict=True)]
            rows = [sizes([Sizes((n,)) for n in ns]) for ns in (starts, ends)]
            nodes.append(helper.make_node("Slice", [renamed.pop(result), *rows, constant(np.array([0]))], [result]))
    nodes[-1].output[0] = "logits"
    inputs = [helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "length"])]
    outputs = [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", "length", None])]
    return helper.make_graph(nodes, "decoder", inputs, outputs, initializers)


def fitted(batches: Sequence[tuple[int, int]], values: Sequence[int]) -> tuple[int, int, int]:
    """(b, t, c) with n = b B + t T + c for the size n of each batch (B, T)."""
    (B, T), b, t = batches[0], values[1] - values[0], values[0] - values[2]
    c = values[0] - b * B - t * T
    if any(b * B + t * T + c != n for (B, T), n in zip(batches, values, strict=True)):
        raise NotRecorded(f"the model's sizes {values} are no linear function of B and T: cannot be exported to ONNX")
    return b, t, c


def place(part: np.ndarray, whole: np.ndarray) -> int:
    """The row of `whole` at which the rows of `part` begin."""
    n = len(part) if part.ndim else 0
    for i in range(len(whole) - n + 1) if n and part.shape[1:] == whole.shape[1:] else ():
        if np.array_equal(whole[i], part[0]) and np.array_equal(whole[i : i + n], part):
            return i
    raise NotRecorded("the model uses other numbers for other lengths, which cannot be exported to ONNX")
