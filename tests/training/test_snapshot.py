"""Snapshots: what is saved comes back, what is damaged is refused, and a failed save harms nothing."""

import ast
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import scratchformer
from scratchformer.backend import to_cpu
from scratchformer.models import LanguageModel
from scratchformer.nn import GridPositions, Layer, Param
from scratchformer.optim import Adam, AdamW, Group
from scratchformer.rng import Key
from scratchformer.training import (
    SnapshotError,
    average_snapshots,
    best_snapshot,
    kept_snapshots,
    load_model,
    load_snapshot,
    save_snapshot,
    snapshot,
)
from scratchformer.training.snapshot import FORMAT, NotFinite, NotImported, checksum, restore

STATE = {"step": 7, "best": {"step": 5, "loss": 1 / 3}, "corpus": "größer\n", "seed": 0}


@pytest.fixture
def saved(tmp_path, make_model):
    """A model with an optimizer that has stepped, and its snapshot."""
    model = make_model("Classifier", pool="max")
    optimizer = Adam(model.parameters(), 0.01)
    for _ in range(2):
        model.flat.grad[...] = Key(0).generator().standard_normal(model.flat.grad.size)
        optimizer.step()
    path = tmp_path / "last.safetensors"
    save_snapshot(path, model, optimizer, **STATE)
    return model, optimizer, path


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
def test_everything_comes_back(device, tmp_path, make_model, kind):
    model = make_model(kind, device, seed=3)
    optimizer = Adam(model.parameters(), 0.01)
    model.flat.grad[...] = 0.5
    optimizer.step()
    path = tmp_path / "new folder" / "last.safetensors"
    save_snapshot(path, model, optimizer, **STATE)
    assert [p.name for p in path.parent.iterdir()] == ["last.safetensors"]

    found = load_snapshot(path.parent)
    assert found.state == STATE
    assert found.model_class == kind
    assert found.config == model.config
    assert_same(found.optimizer, optimizer.state_dict())
    loaded, state = load_model(path)
    assert state == STATE
    assert_same(loaded.state_dict(), model.state_dict())

    other = make_model(kind, device, seed=4)
    fresh = Adam(other.parameters(), 0.01)
    restore(found, other, fresh)
    np.testing.assert_array_equal(to_cpu(other.flat.data), to_cpu(model.flat.data))
    assert fresh.steps == 1
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_recomputing_blocks_are_saved_under_the_same_names(tmp_path, make_model):
    plain, recomputing = make_model("LanguageModel"), make_model("LanguageModel", recompute=True)
    assert plain.state_dict().keys() == recomputing.state_dict().keys()
    save_snapshot(tmp_path / "x.safetensors", recomputing)
    assert_same(load_model(tmp_path / "x.safetensors")[0].state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 2 * 10**9}, "cannot create this Classifier: depth: expected weights that fit in"),
        ({"vocab_size": 2**40}, "cannot create this Classifier: "),
        ({"width": 3}, "cannot create this Classifier: .*'width'"),
        ({"lora": 3}, "cannot create this Classifier: .*must be a mapping"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_memory_is_filled(saved, change, message):
    path = saved[2]
    tensors, header = read(path)
    described = json.loads(header["model"])
    write(path, tensors, header | {"model": json.dumps(described | {"config": described["config"] | change})})
    with pytest.raises(SnapshotError, match=rf"last\.safetensors: .*{message}"):
        load_model(path)


def write(path, tensors, header):
    """Write a snapshot with a correct checksum."""
    save_file(tensors, path, header | {"sha256": checksum(header, tensors)})


def read(path):
    """The tensors of a snapshot and its header without the checksum."""
    with safe_open(path, framework="numpy") as file:
        header = {name: value for name, value in file.metadata().items() if name != "sha256"}
        return {name: file.get_tensor(name) for name in file.keys()}, header


def test_a_snapshot_with_any_bit_flipped_is_refused_by_name(saved):
    path = saved[2]
    whole, draw = path.read_bytes(), Key(2).generator()
    data = 8 + int.from_bytes(whole[:8], "little")
    bits = [*range(64), *draw.integers(64, 8 * data, 150), *draw.integers(8 * data, 8 * len(whole), 150)]
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(SnapshotError, match=r"^[^\n]*last\.safetensors[^\n]*$"):
            load_snapshot(path)


@pytest.mark.parametrize("part", ["model", "optimizer", "batches"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_not_saved(saved, part, value):
    model, optimizer, path = saved
    before = path.read_bytes()

    class Memory:
        def state_dict(self):
            return {"memory": np.array([0, value if part == "batches" else 1])}

    if part == "model":
        model.body.blocks[1].norm1.gamma.data[2] = value
    elif part == "optimizer":
        optimizer.v[-1] = value
    name = {"model": "model.body.blocks.1.norm1.gamma", "optimizer": "optimizer.v", "batches": "batches.memory"}[part]
    with pytest.raises(NotFinite, match=rf"cannot save .*last\.safetensors: {name} is not finite$"):
        save_snapshot(path, model, optimizer, Memory(), step=9)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_a_model_is_loaded_in_its_own_precision(tmp_path, make_model, dtype):
    model = make_model("LanguageModel", dtype=dtype)
    save_snapshot(tmp_path / "last.safetensors", model)
    loaded, _ = load_model(tmp_path)
    assert loaded.flat.data.dtype == dtype
    assert_same(loaded.state_dict(), model.state_dict())


def test_a_snapshot_of_another_precision_does_not_fit(tmp_path, make_model):
    save_snapshot(tmp_path / "last.safetensors", make_model("LanguageModel", dtype=np.float64))
    with pytest.raises(SnapshotError, match=r"does not fit: body.* is float64 in the snapshot, float32 in the model"):
        restore(load_snapshot(tmp_path), make_model("LanguageModel"))


# Models defined by a user


class Scale(Layer):
    """Two numbers, given as a tuple, which becomes a list in JSON."""

    def __init__(self, shape, start=1.0):
        self.config = dict(shape=shape, start=start)
        self.w = Param(np.full(shape, start, np.float32), "w")

    class Inner(LanguageModel):
        pass


def test_a_users_own_model_comes_back(tmp_path):
    model = Scale((2, 1))
    model.w.data[...] = [[3], [4]]
    save_snapshot(tmp_path / "last.safetensors", model, step=2)
    snapshot = load_snapshot(tmp_path)
    assert snapshot.model_class == f"{__name__}:Scale"
    loaded, state = load_model(tmp_path)
    assert type(loaded) is Scale and state == {"step": 2}
    np.testing.assert_array_equal(loaded.w.data, [[3], [4]])
    fresh = Scale((2, 1))
    restore(snapshot, fresh)
    np.testing.assert_array_equal(fresh.w.data, [[3], [4]])
    with pytest.raises(
        SnapshotError, match=r"snapshot of another model .*'shape': '\[2, 1\] in the snapshot, \[1, 2\]"
    ):
        restore(snapshot, Scale((1, 2)))


class Fourier(Layer):
    """What it draws from its key and is not trained is a frozen Param, so that it is saved; what it inverts is not."""

    def __init__(self, key=Key(0)):
        self.config = {}
        draw = key.generator()
        self.frequencies = Param(draw.standard_normal((2, 2)), "frequencies")
        self.frequencies.frozen = True
        np.linalg.inv(draw.standard_normal((2, 2)))  # of zeros there is no inverse


def test_a_users_own_model_that_draws_from_its_key_comes_back(tmp_path):
    model = Fourier(Key(3))
    save_snapshot(tmp_path / "last.safetensors", model)
    loaded, _ = load_model(tmp_path)
    np.testing.assert_array_equal(loaded.frequencies.data, model.frequencies.data)
    assert loaded.frequencies.frozen


def test_an_optimizer_of_other_parameters_is_not_restored(tmp_path, make_model):
    model = make_model("LanguageModel")
    save_snapshot(tmp_path / "last.safetensors", model, AdamW(model.parameters(), 0.1))
    frozen = [Group("*.query.w", frozen=True)]
    other = AdamW(model.parameters(), 0.1, groups=frozen)
    with pytest.raises(SnapshotError, match="state of another optimizer: its parameters have other names"):
        restore(load_snapshot(tmp_path), model, other)


def test_a_class_within_a_class_and_a_subclass_of_the_projects(tmp_path):
    model = Scale.Inner(16, 8, 2, 1, 8, key=Key(3))
    save_snapshot(tmp_path / "last.safetensors", model)
    assert load_snapshot(tmp_path).model_class == f"{__name__}:Scale.Inner"
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is Scale.Inner
    assert_same(loaded.state_dict(), model.state_dict())


def test_the_projects_models_have_short_names(tmp_path, make_model):
    for kind in "LanguageModel", "Classifier":
        save_snapshot(tmp_path / "last.safetensors", make_model(kind))
        assert load_snapshot(tmp_path).model_class == kind


def test_a_local_class_is_saved_with_a_warning_and_named_when_it_is_loaded(tmp_path):
    class Local(Scale):
        pass

    with pytest.warns(UserWarning, match="only where Local can be imported from the top of a module$"):
        save_snapshot(tmp_path / "last.safetensors", Local((2,)))
    message = r"last\.safetensors: unknown model '.*<locals>\.Local': a class defined inside a function cannot be found"
    with pytest.raises(SnapshotError, match=message):
        load_model(tmp_path / "last.safetensors")
    model = Local((2,))
    model.w.data[...] = 5
    restore(load_snapshot(tmp_path), model)  # the weights are not lost
    np.testing.assert_array_equal(model.w.data, [1, 1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", "'os:system' is neither a class of layers nor an operation"),
        ("no_such_module:Model", "its model Model, of the module no_such_module, is not imported"),
        (f"{__name__}:Missing", "its model Missing, of the module .*test_snapshot, is not imported"),
        ("os:path.join('a')", "unknown model"),
        ("Scale", "unknown model 'Scale'"),
        (3, "expected the name of a class and its arguments, got 3 and "),
    ],
)
def test_a_class_that_cannot_be_imported_is_named(tmp_path, name, message):
    path = tmp_path / "x.safetensors"
    described = json.dumps({"class": name, "config": {"shape": [1]}})
    write(path, {"model.w": np.ones(1)}, {"format": FORMAT, "model": described, "state": "{}"})
    with pytest.raises(SnapshotError, match=message):
        load_model(path)


TRAP = "from scratchformer.models import LanguageModel\nopen({!r}, 'w')\nclass Model(LanguageModel):\n    pass\n"


@pytest.mark.parametrize(
    "name", ["trap:Model", "traps.inner:Model", "traps.__main__:Model", "trap:open", "traps:inner"]
)
@pytest.mark.parametrize("place", ["class", "activation", "deep"])
def test_a_name_in_a_snapshot_imports_no_module(tmp_path, monkeypatch, make_model, name, place):
    """Not even one that could be imported; the message says what to do, and to name the program does it."""
    (tmp_path / "traps").mkdir()
    for module in "trap.py", "traps/__init__.py", "traps/inner.py", "traps/__main__.py":
        (tmp_path / module).write_text(TRAP.format(str(tmp_path / "executed")))
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "x.safetensors"
    save_snapshot(path, make_model("LanguageModel"))
    tensors, header = read(path)
    described = json.loads(header["model"])
    if place == "class":
        described["class"] = name
    else:
        described["config"]["activation"] = {"import": name} if place == "activation" else [{"a": {"import": name}}]
    write(path, tensors, header | {"model": json.dumps(described)})
    before = {*sys.modules}
    with pytest.raises(NotImported, match=r"x\.safetensors: .*is not imported: import it first, or name the file"):
        load_model(path)
    assert not (tmp_path / "executed").exists() and {*sys.modules} == before
    if place == "class" and name.endswith(":Model"):
        loaded, _ = load_model(path, program=tmp_path / "trap.py")
        assert type(loaded).__name__ == "Model" and (tmp_path / "executed").exists()
        with pytest.raises(SnapshotError, match=r"is not in .*empty\.py or what that imports"):
            (tmp_path / "empty.py").write_text("")
            load_model(path, program=tmp_path / "empty.py")


class Says(Layer):
    """What tells when it is looked up or called."""

    touched: ClassVar[list] = []

    @property
    def loud(self):
        Says.touched.append("loud")

    class Metaclass(type):
        def __getattr__(cls, name):
            Says.touched.append(name)
            return LanguageModel

    class Eager(metaclass=Metaclass):
        pass


class Everything:
    """It has every attribute, and can be called, as `unittest.mock.call`."""

    def __getattr__(self, name):
        Says.touched.append(name)
        return self

    def __call__(self, *_args, **_options):
        Says.touched.append("called")


everything = Everything()


@pytest.mark.parametrize("place", ["class", "activation"])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "unittest.mock:call",
            "scratchformer.commands.cli:main",
            "scratchformer.models:LanguageModel.from_pretrained",
        ),
        *("os:system", "builtins:print", "scratchformer.training:save_snapshot", "scratchformer.__main__:main"),
        *(f"{__name__}:{name}" for name in ("Says.loud", "Says.Eager.Model", "everything", "everything.reference")),
    ],
)
def test_only_a_class_of_layers_is_found_and_nothing_is_called(tmp_path, make_model, place, name):
    path = tmp_path / "x.safetensors"
    save_snapshot(path, make_model("LanguageModel"))
    tensors, header = read(path)
    described = json.loads(header["model"])
    if place == "class":
        described |= {"class": name, "config": {"a": 1}}
    else:
        described["config"]["activation"] = [{"import": name}, {"import": name}]
    write(path, tensors, header | {"model": json.dumps(described)})
    Says.touched.clear()
    with pytest.raises(SnapshotError, match=r"x\.safetensors"):
        load_model(path)
    assert not Says.touched and "scratchformer.__main__" not in sys.modules


def test_a_class_of_the_program_itself(tmp_path):
    """A program that defines or imports it finds it; otherwise it is named, like a module that cannot be imported."""
    (tmp_path / "own.py").write_text(
        "import sys, numpy as np\n"
        "from scratchformer.nn import Layer, Param\n"
        "class Own(Layer):\n"
        "    def __init__(self, n):\n"
        "        self.config = {'n': n}\n"
        "        self.w = Param(np.ones(n, np.float32), 'w')\n"
        "if __name__ == '__main__':\n"
        "    from scratchformer.training import load_model, save_snapshot\n"
        "    save_snapshot(sys.argv[1], Own(3))\n"
        "    assert type(load_model(sys.argv[1])[0]) is Own\n"
    )
    load = "from scratchformer.training import load_model; import sys; print(type(load_model('here')[0]).__name__)"
    run = partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path)
    saved = run([sys.executable, "own.py", "here"])
    assert saved.returncode == 0, saved.stderr
    assert "only where Own can be imported from the top of a module" in saved.stderr
    assert run([sys.executable, "-c", "from own import Own; " + load]).stdout == "Own\n"
    lost = run([sys.executable, "-c", load])
    assert "its model Own, of the module __main__, is not imported" in lost.stderr.splitlines()[-1]
    model = Scale((1,))
    type(model).__module__, before = "own", __name__
    try:
        with pytest.warns(UserWarning, match="only where Scale can be imported"):
            save_snapshot(tmp_path / "x.safetensors", model)
    finally:
        Scale.__module__ = before


def test_a_missing_file_or_folder_is_named(tmp_path):
    with pytest.raises(SnapshotError, match=r"no snapshot at .*nothing\.safetensors"):
        load_snapshot(tmp_path / "nothing.safetensors")
    with pytest.raises(SnapshotError, match=r"no snapshot at .*last\.safetensors"):
        load_snapshot(tmp_path)


@pytest.mark.parametrize("problem", ["weights", "moments"])
def test_a_snapshot_that_does_not_fit_changes_neither_model_nor_optimizer(saved, make_model, problem):
    found = load_snapshot(saved[2])
    part = found.model if problem == "weights" else found.optimizer
    part[next(name for name in part if name != "steps")] = np.zeros(3, np.float32)
    model = make_model("Classifier", pool="max", seed=1)
    optimizer = Adam(model.parameters(), 0.01)
    weights, moments = model.state_dict(), optimizer.state_dict()
    with pytest.raises(SnapshotError, match="does not fit"):
        restore(found, model, optimizer)
    assert_same(model.state_dict(), weights)
    assert_same(optimizer.state_dict(), moments)


@pytest.mark.parametrize("failing", ["save_file", "os.fsync", "os.replace"])
def test_a_save_that_fails_leaves_the_old_snapshot_and_nothing_half_written(saved, monkeypatch, failing):
    model, optimizer, path = saved
    before = path.read_bytes()

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((snapshot, failing) if failing == "save_file" else (os, failing[3:])), fail)
    with pytest.raises(SnapshotError, match=r"cannot save .*No space left on device; the last good snapshot is kept"):
        save_snapshot(path, model, optimizer, step=8)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_nothing_in_the_package_can_run_code_from_a_file():
    """No pickle, and nothing that uses it: numpy.load and numpy.save, shelve, torch.

    Only a student's own answers are executed, the package's own modules with a mistake in them, and what the compiler
    prints.
    """
    package = Path(scratchformer.__file__).parent
    own_code = {package / "course" / "grading.py", package / "catalogue" / "mistake.py"}
    own_code |= {package / "compiler" / f"{name}.py" for name in ("numba_target", "python_target")}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                found = {name.partition(".")[0] for name in modules}
                assert not found & {"pickle", "cPickle", "_pickle", "dill", "joblib", "shelve", "marshal"}, path
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("np", "numpy")
            ):
                assert node.attr not in ("load", "save", "savez"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec") or path in own_code, path


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_the_umasks(tmp_path, make_model, umask, mode):
    path = tmp_path / "last.safetensors"
    path.with_name("last.safetensors.unfinished").mkdir()  # left by a run that was killed
    before = os.umask(umask)
    try:
        save_snapshot(path, make_model("LanguageModel"))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_the_best_snapshot_of_a_folder_is_found_if_there_is_one(tmp_path):
    assert best_snapshot(tmp_path) == tmp_path
    (tmp_path / "best.safetensors").symlink_to("nothing")
    with pytest.raises(SnapshotError, match=r"no snapshot at .*best\.safetensors"):
        load_model(best_snapshot(tmp_path))
    (tmp_path / "best.safetensors").unlink()
    (tmp_path / "best.safetensors").touch()
    assert best_snapshot(str(tmp_path)) == tmp_path / "best.safetensors"
    assert best_snapshot(tmp_path / "last.safetensors") == tmp_path / "last.safetensors"


def test_the_mean_of_snapshots(tmp_path, make_model):
    model = make_model("LanguageModel")
    states = []
    for seed in range(3):
        other = make_model("LanguageModel", seed=seed)
        save_snapshot(tmp_path / f"step-{seed}.safetensors", other, step=seed)
        states.append(other.state_dict())
    paths = kept_snapshots(tmp_path)
    assert [path.name for path in paths] == [f"step-{seed}.safetensors" for seed in range(3)]
    average_snapshots(paths, model)
    for name, array in model.state_dict().items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, np.mean([state[name] for state in states], axis=0), rtol=1e-6, atol=1e-7)


def test_a_model_with_a_users_layer_among_its_options_cannot_be_saved(tmp_path):
    model = LanguageModel(16, 8, 2, 1, 8, positions=GridPositions(8, 8, 4, 0.1))
    with pytest.raises(SnapshotError, match="a LanguageModel with these arguments: an argument is a GridPositions"):
        save_snapshot(tmp_path / "model.safetensors", model)
    assert not list(tmp_path.iterdir())
