"""Whether a change of a model is noticed."""

import numpy as np
import pytest

from scratchformer import nn
from scratchformer.models import LanguageModel
from scratchformer.nn.layer import Structure
from scratchformer.optim import Adam


def model():
    return LanguageModel(11, 8, 2, 2, 6)


CHANGES = {
    "a layer": lambda m: setattr(m.body.blocks[1], "norm1", nn.LayerNorm(8)),
    "a block": lambda m: m.body.blocks.__setitem__(0, m.body.blocks[1]),
    "another block": lambda m: m.body.blocks.append(m.body.blocks[1]),
    "no block": lambda m: m.body.blocks.pop(),
    "a setting": lambda m: setattr(m.body.blocks[0].dropout, "p", 0.25),
    "a new attribute": lambda m: setattr(m.output, "scale", 2.0),
    "an argument": lambda m: m.config.update(d_model=16),
    "a frozen layer": lambda m: setattr(m, "output", nn.Frozen(m.output)),
}


WRAPPED = {
    "frozen": (nn.Frozen, lambda wrapper: wrapper.layer.blocks.pop()),
    "a layer of a frozen one": (nn.Frozen, lambda wrapper: setattr(wrapper.layer, "final_norm", nn.LayerNorm(8))),
    "recompute": (nn.Recompute, lambda wrapper: setattr(wrapper.layer, "final_norm", nn.LayerNorm(8))),
}


@pytest.mark.parametrize(("wrap", "change"), WRAPPED.values(), ids=WRAPPED)
def test_a_change_of_a_wrapped_layer_is_noticed(wrap, change):
    changed = model()
    changed.body = wrap(changed.body)
    structure = Structure(changed)
    assert structure.is_unchanged()
    change(changed.body)
    assert not structure.is_unchanged()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change):
    changed = model()
    structure = Structure(changed)
    assert structure.is_unchanged()
    changed(np.zeros((1, 3), int))
    changed.zero_grad()
    for p in changed.parameters():
        p.data += 1
    assert structure.is_unchanged()
    change(changed)
    assert not structure.is_unchanged()


def test_what_an_optimizer_refuses_is_refused_in_every_step():
    changed = model()
    adam = Adam(changed.parameters(), 0.1)
    adam.step()
    changed.body.blocks[1].norm1 = nn.LayerNorm(8)
    for _ in range(2):
        with pytest.raises(ValueError, match="added after the optimizer was made"):
            adam.step()
