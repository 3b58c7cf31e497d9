"""Operations in JavaScript give what the references give: run by Node, or else by Debian's chromium."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scratchformer.catalogue import OPERATIONS
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.javascript_code import javascript_source
from scratchformer.compiler.python_target import PythonTarget
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.optim.adam import adam_step
from scratchformer.rng import Bits
from scratchformer.testing.contracts import as_tuple
from scratchformer.testing.draw import Draw

COLUMN = {"C": 1, "D": 1, "F": 1, "V": 1}
CALLS = """
const given = (value) => value.bits ? BigInt(value.bits) : value.type ? new globalThis[value.type](value.data) : value;
const input = (inputs) => Object.fromEntries(Object.entries(inputs).map(([name, value]) => [name, given(value)]));
const output = (results) => Object.entries(results).map(([name, x]) => [name, typeof x === "number" ? [x] : [...x]]);
const run = ({ source, inputs }) => Object.fromEntries(output((0, eval)(`(${source})`)(input(inputs))));
const answer = JSON.stringify(CASES.map(run));
"""


class Call:
    """A call of a plan, with what it should give."""

    def __init__(self, name: str, plan: Any, inputs: dict, expected: dict) -> None:
        self.name, self.source, self.expected = name, javascript_source(plan), expected
        self.inputs = {key: given for key, value in inputs.items() if (given := as_json(value)) is not None}


def as_json(value: Any) -> Any:
    if isinstance(value, Bits):
        return {"bits": str(int(value.start))}
    if isinstance(value, np.ndarray) and value.ndim:
        kind = {"f": "Float64Array", "b": "Uint8Array"}.get(value.dtype.kind, "Int32Array")
        return {"type": kind, "data": value.astype(float).ravel().tolist()}
    return float(value) if isinstance(value, int | float | np.number | np.ndarray) else None


def calls_of(name: str, seed: int, sizes: dict[str, int]) -> list[Call]:
    """The forward and the backward of a case, with the results of the references; none if it cannot be compiled."""
    draw = Draw(seed, largest=7)
    draw.sizes |= sizes
    case = OPERATIONS[name](draw)
    twin = CompiledTwin(case.op, case.op_backward, PythonTarget())
    if not twin.fits(*case.args, **case.options):
        return []
    args = twin.in_order(case.args, case.options)
    call = twin.call(twin.signature(args))
    y, cache = case.op.reference(*args)
    dy = np.random.default_rng(seed).standard_normal(np.shape(y))[()]
    inputs = dict(zip(twin.names, args, strict=True)) | (twin.given(*args) or {} if twin.given else {})
    values = dict(inputs)
    _, *others = call.forward(values)
    kept = {key: values[key] for key in call.kept} | {twin.derivation.gradient: dy}
    results, gradients = (plan.results for plan in call.pair[:2])
    expected = as_tuple(case.op_backward.reference(dy, cache))
    sizes = sizes_of(twin, inputs) | {axis_name(axis): size for axis, size in call.shape.sizes.items()}
    return [
        Call(name, call.pair.forward, inputs | sizes, dict(zip(results, [y, *others], strict=True))),
        Call(f"{name}, backward", call.pair.backward, kept | sizes, dict(zip(gradients, expected, strict=True))),
    ]


def call_of_adam() -> Call:
    """A step of Adam, which changes its arrays in place."""
    w, g, m, v = np.random.default_rng(0).standard_normal((4, 7))
    args = dict(w=w, g=g, m=m, v=v * v, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.01, steps=3, share=0.5)
    plan = Derivation(adam_step.reference, None).compile().forward
    after = {name: np.copy(x) if isinstance(x, np.ndarray) else x for name, x in args.items()}
    adam_step.reference(**after)
    return Call("adam_step", plan, args, {name: after[name] for name in ("w", "m", "v")})


def axis_name(axis: str) -> str:
    return {"n": "rows", "column": "columns"}.get(axis, axis.upper())


def sizes_of(twin: CompiledTwin, values: dict) -> dict[str, int]:
    """The sizes of the last axes of arrays."""
    shapes = {key: value.shape[::-1] for key, value in values.items() if isinstance(value, np.ndarray)}
    axes = {key: array.axes[::-1] for key, array in twin.derivation.arrays.items() if key in shapes}
    pairs = [pair for key in axes for pair in zip(axes[key], shapes[key], strict=False)]
    return {axis_name(axis): size for axis, size in pairs if axis not in ("n", "column")}


def answer_of(program: str, folder: Path) -> Any:
    """The variable `answer` of a program, which is JSON."""
    if node := shutil.which("node"):
        script = folder / "program.js"
        script.write_text(f"{program}\nconsole.log(answer);", encoding="utf-8")
        return json.loads(subprocess.run([node, script], check=True, capture_output=True, timeout=600).stdout)
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("needs Node or Debian's chromium")
    page = folder / "page.html"
    script = f"<script>{program}\ndocument.querySelector('pre').textContent = answer;</script>"
    page.write_text(f'<!doctype html><meta charset="utf-8"><pre></pre>{script}', encoding="utf-8")
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, check=True, capture_output=True, timeout=600).stdout.decode()
    return json.loads(html.unescape(re.search("<pre>(.*?)</pre>", shown, re.DOTALL)[1]))


def test_every_operation_gives_what_the_reference_gives(tmp_path):
    drawn = [(name, seed, sizes) for name in OPERATIONS for seed, sizes in enumerate([{}, COLUMN])]
    calls = [call for each in drawn for call in calls_of(*each)] + [call_of_adam()]
    assert {"layernorm", "dropout", "rotary", "gather, backward", "gelu, tanh"} <= {call.name for call in calls}
    cases = json.dumps([{"source": call.source, "inputs": call.inputs} for call in calls]).replace("</", "<\\/")
    answers = answer_of(f"const CASES = {cases};{CALLS}", tmp_path)
    for call, results in zip(calls, answers, strict=True):
        assert results.keys() == call.expected.keys(), call.name
        for name, expected in call.expected.items():
            atol = 1e-12 * max(1, np.abs(expected).max())
            np.testing.assert_allclose(results[name], np.ravel(expected), 0, atol, err_msg=f"{call.name}: {name}")
