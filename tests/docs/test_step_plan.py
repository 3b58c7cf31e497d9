"""Plans of a step: operations and models in JavaScript give what the references give, or it is said why they cannot."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from scratchformer import nn
from scratchformer.catalogue import OPERATIONS
from scratchformer.dispatch import reference_only
from scratchformer.pages.live import STATIC
from scratchformer.testing.draw import Draw

pytest.importorskip("sphinx")

from letters import LetterSizes
from step_plan import StepPlan, operations_json, plan_of
from traced import CASES
from tracing import trace_operation

# Whose equations have an argmax, random bits, or a backward that is given only as a derivative.
WITHOUT = {"dense", "max_pool", "dropout", "dropout_add"}
RUN = """
for (const { plan, sizes, operations, batch, weights } of CASES) {
  const step = new Living.Step(Living.sized(plan, sizes, operations), weights);
  step.give(batch);
  for (let call = 0; call < plan.calls.length; call++) step.call(call);
  answers.push(step.arrays.map((array) => [...array]));
}
console.log(JSON.stringify(answers));
"""


def computed(folder, plans):
    """The buffers of each plan after its calls."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs Node")
    program = folder / "program.js"
    runtime = (STATIC / "living/step.js").read_text(encoding="utf-8")
    program.write_text(f"{runtime}\nconst answers = [];\nconst CASES = {json.dumps(plans)};\n{RUN}", encoding="utf-8")
    return json.loads(subprocess.run([node, program], check=True, capture_output=True, timeout=600).stdout)


def operation_plan(case):
    """The plan of one operation and its backward."""
    plan, inputs = StepPlan(nn.Layer()), {}
    with reference_only():
        call = trace_operation(case.op, case.op_backward, *case.args, **case.options)
    given = {**call.arguments, **dict(list(call.backward.arguments.items())[:1])}
    for name, x in given.items():
        if isinstance(x, np.ndarray) and x.ndim:
            inputs[name] = plan.buffer(name, x, axes=[""] * x.ndim, layer="", role="input")
    plan.record(call, "forward")
    plan.record(call.backward, "backward")
    return plan, inputs


def test_every_operation_gives_what_the_reference_gives(tmp_path):
    made, missing = {}, set()
    for name, case in OPERATIONS.items():
        try:
            made[name] = operation_plan(case(Draw(0, largest=5)))
        except TypeError as error:
            assert "compile" in str(error), (name, error)
            missing.add(name.partition(",")[0])
    assert missing <= WITHOUT, missing
    programs = [
        {
            "plan": plan.json(inputs, 0),
            "sizes": {},
            "operations": operations_json(plan.functions),
            "batch": {name: plan.values[buffer].astype(float).ravel().tolist() for name, buffer in inputs.items()},
            "weights": {},
        }
        for plan, inputs in made.values()
    ]
    for (name, (plan, _)), arrays in zip(made.items(), computed(tmp_path, programs), strict=True):
        if name == "rotary, yarn":  # the page has no attention factor
            continue
        for buffer, expected, found in zip(plan.buffers, plan.values, arrays, strict=True):
            if expected.size:
                atol = 1e-11 * max(1, np.abs(expected).max())
                label = f"{name}: {buffer['name']}"
                np.testing.assert_allclose(found, expected.astype(float).ravel(), 0, atol, err_msg=label)


def program_of(plan, made, layer, batch, sizes):
    weights = {name: p.data.ravel().tolist() for name, p in layer.named_parameters().items()}
    given = dict(zip(plan["inputs"], batch, strict=True))
    return {
        "plan": plan,
        "sizes": sizes,
        "operations": operations_json(made.functions),
        "batch": {name: x.astype(float).ravel().tolist() for name, x in given.items()},
        "weights": weights,
    }


def compare(made, arrays):
    compared = 0
    for buffer, expected, array in zip(made.buffers, made.values, arrays, strict=True):
        if expected.size and expected.dtype.kind == "f":
            label = f"{buffer['layer']}: {buffer['name']}"
            np.testing.assert_allclose(array, expected.ravel(), 0, 1e-9, err_msg=label)
            compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    "name",
    [
        "BertClassifier",
        "BertPretraining",
        "Classifier",
        "EncoderDecoder",
        "GPT2",
        "LanguageModel",
        "Llama",
        "SparseTransformer",
        "TransformerXL",
    ],
)
def test_a_model_gives_what_numpy_gives(name, tmp_path):
    layer, inputs, _ = CASES[name](LetterSizes(B=2, T=5, S=6, M=4, C=8, H=2, V=11, F=12, K=3, G=1, D=4))
    layer = layer.to(dtype=np.float64)
    inputs = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    plan, made = plan_of(layer, *inputs)
    (arrays,) = computed(tmp_path, [program_of(plan, made, layer, inputs, {})])
    compare(made, arrays)


def test_an_array_of_no_call_is_refused():
    class Doubled(nn.Layer):
        def __init__(self):
            self.inner = nn.Linear(3, 3)

        def loss(self, x):
            y, cache = self.inner.forward(2 * x)
            return y.sum(), cache

        def loss_backward(self, dloss, cache):
            return 2 * self.inner.backward(np.full((2, 3), dloss), cache)

    layer = Doubled().to(dtype=np.float64)
    with pytest.raises(TypeError, match="expected x from a call of the trace"):
        plan_of(layer, np.random.default_rng(0).standard_normal((2, 3)))
