import copy
import math
import os
import pickle
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from mpmath import mp

from scratchformer import backend, nn
from scratchformer.backend import (
    CPU,
    CUPY_HELP,
    Device,
    DeviceError,
    array_module,
    cast,
    cosine,
    current_device,
    device_name,
    device_of,
    erf,
    free_memory,
    get_device,
    is_floating_type,
    is_recording,
    kept,
    library_of,
    logarithm,
    memory,
    power,
    recording,
    scatter_add,
    sine,
    tf32,
    to_cpu,
    to_device,
    type_of,
    when_gpu,
    widen,
    zeros_like,
)
from scratchformer.commands import doctor
from scratchformer.testing.strict import STRICT


def test_library_of_arrays(device):
    x = device.xp.ones(3)
    assert array_module(x) is device.xp
    assert array_module(None, 2.0, x, x, np.float32(1)) is device.xp
    assert array_module() is array_module(1, None, "x") is np


def test_arrays_of_two_devices():
    """The error names both, says what moves an array and a model, and is both a TypeError and a ValueError."""
    here, there = np.ones(3), STRICT.xp.ones(3)
    for pair, names in [
        ((here, there), "cpu (numpy) and gpu (strict)"),
        ((there, here), "gpu (strict) and cpu (numpy)"),
    ]:
        with pytest.raises(DeviceError) as info:
            array_module(*pair)
        message = str(info.value)
        assert names in message
        assert "scratchformer.backend.to_device(x, device)" in message
        assert "layer.to(device)" in message
        assert isinstance(info.value, TypeError) and isinstance(info.value, ValueError)


def test_a_model_and_its_input_on_two_devices():
    layer = nn.Linear(2, 3)
    with pytest.raises(DeviceError, match="two devices"):
        layer(STRICT.xp.ones((1, 2), dtype=np.float32))
    with pytest.raises(DeviceError, match="two devices"):
        layer.to(STRICT)(np.ones((1, 2), np.float32))


def test_device_names():
    assert device_name(np) == "cpu (numpy)"
    assert device_name(STRICT.xp) == "gpu (strict)"
    assert str(CPU) == "cpu"


def test_the_cpu_is_always_available():
    assert get_device("cpu") is CPU


@pytest.mark.parametrize("name", ["", "cuda", "cpu:1", "gpu:x", "gpu:-1", "auto:0"])
def test_unknown_device_name(name):
    with pytest.raises(DeviceError, match=f"device: expected auto, cpu, gpu or gpu:N, got '{name}'"):
        get_device(name)


def test_without_cupy(monkeypatch):
    """If requested by name, a missing GPU is an error that says what to install; "auto" chooses the CPU."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError) as info:
        get_device("gpu")
    assert str(info.value) == CUPY_HELP
    assert "pip install 'scratchformer[cuda13]'" in CUPY_HELP and "scratchformer doctor" in CUPY_HELP
    assert get_device("auto") is CPU
    assert get_device() is CPU


class NoDriver(Exception):
    pass


def fake_cupy(count):
    """As much of CuPy as choosing a device needs, on a machine with `count` GPUs (None: without a driver)."""

    def get_device_count():
        if count is None:
            raise NoDriver("CUDA driver version is insufficient")
        return count

    class FakeDevice:
        current = 0

        def __init__(self, index):
            self.index = index

        def use(self):
            FakeDevice.current = self.index

        def __enter__(self):
            self.before, FakeDevice.current = FakeDevice.current, self.index

        def __exit__(self, *_exception):
            FakeDevice.current = self.before

    cupy = ModuleType("cupy")
    runtime = SimpleNamespace(
        getDeviceCount=get_device_count, CUDARuntimeError=NoDriver, driverGetVersion=lambda: 13020,
        runtimeGetVersion=lambda: 13000, memGetInfo=lambda: (2**30, 2**31),
        getDeviceProperties=lambda index: {"name": b"H200"},
    )  # fmt: skip
    cupy.cuda, cupy.zeros = SimpleNamespace(runtime=runtime, Device=FakeDevice), np.zeros
    return cupy


def test_cupy_without_a_working_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(None))
    with pytest.raises(DeviceError, match="finds no usable GPU: CUDA driver version is insufficient"):
        get_device("gpu")
    assert get_device("auto") is CPU


def test_gpu_by_number(monkeypatch):
    """What `when_gpu` was given is called when the first GPU is chosen, and not again."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    monkeypatch.setattr(backend, "_loaders", [])  # the twins of CuPy need a real one
    calls = []
    when_gpu(lambda: calls.append("loaded"))
    assert get_device("cpu") is CPU and not calls
    assert (get_device("gpu").name, get_device("gpu").index) == ("gpu:0", 0)
    assert (get_device("gpu:1").name, get_device("gpu:1").index) == ("gpu:1", 1)
    assert get_device("auto").name == "gpu:0"
    with pytest.raises(DeviceError, match=r"device gpu:2: this machine has 2 GPU\(s\), numbered from 0"):
        get_device("gpu:2")
    assert calls == ["loaded"]


class Broken:
    """An array of a GPU on which one step fails."""

    def __init__(self, step):
        self.step = step

    def __iadd__(self, _):
        if self.step == "kernel":
            raise RuntimeError("cannot open source file cuda_fp16.h\nmore lines")
        return self

    def sum(self):
        return 4.0

    def __matmul__(self, _):
        raise ImportError("libcublas.so.13: cannot open shared object file")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("memory", r"gpu:0 cannot allocate memory: MemoryError: out of memory; .*pip install"),
        (
            "kernel",
            r"gpu:0 cannot compile and run a kernel: RuntimeError: cannot open source file cuda_fp16\.h; the ext",
        ),
        ("matrices", r"gpu:0 cannot multiply matrices: ImportError: libcublas\.so\.13: cannot open .*cuda13"),
    ],
)
def test_a_gpu_that_does_not_compute_is_not_chosen(monkeypatch, capsys, step, message):
    def zeros(shape, dtype):
        if step == "memory":
            raise MemoryError("out of memory")
        return Broken(step)

    cupy = fake_cupy(1)
    cupy.zeros = zeros
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceError, match=message):
        get_device("gpu")
    assert get_device("auto") is CPU
    assert re.match(f"computing on the CPU, since {message}", capsys.readouterr().err)
    monkeypatch.setattr(doctor, "_driver", lambda: iter(()))
    found = list(doctor._gpu())
    assert dict(found) | {"CUDA": "driver 13020, runtime 13000", "gpu:0": "H200, 1.0 of 2.0 GiB free"} == dict(found)
    assert found[-1][0] == "" and re.match(message, found[-1][1])


def test_asking_for_the_library_of_an_array_does_not_describe_the_array(monkeypatch):
    """CuPy makes a dictionary each time that an array is asked for its `__cuda_array_interface__`."""

    class Array:
        device = SimpleNamespace(id=1)

        @property
        def __cuda_array_interface__(self):
            raise AssertionError("a dictionary for each array")

    Array.__module__ = "cupy"
    cupy = fake_cupy(2)
    cupy.ndarray = Array
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert array_module(Array(), 2.0, Array()) is cupy
    assert device_of(Array()).name == "gpu:1"


def test_a_cast_happens_on_the_device_of_the_array(monkeypatch):
    used = []
    current = Device.current
    monkeypatch.setattr(Device, "current", lambda self: (used.append(self.name), current(self))[1])
    layer = nn.Linear(2, 3).to(STRICT)
    layer.zero_grad()  # so that there are gradients
    used.clear()
    layer.to(dtype=np.float64)
    assert used == 4 * ["strict"]  # data and gradient of w and b


def test_a_requested_gpu_becomes_the_current_one(monkeypatch):
    """It stays current until another one is requested; `current` restores the previous one."""
    monkeypatch.setattr(backend, "_loaders", [])
    cupy = fake_cupy(3)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    first, second = get_device("gpu:2"), get_device("gpu:1")
    assert cupy.cuda.Device.current == 1
    with pytest.raises(ZeroDivisionError), first.current():
        assert cupy.cuda.Device.current == 2
        raise ZeroDivisionError
    assert cupy.cuda.Device.current == 1
    assert first.use() is first and cupy.cuda.Device.current == 2
    with CPU.current(), CPU.use().current():
        assert cupy.cuda.Device.current == 2
    assert second.index == 1


def test_arrays_of_two_gpus():
    class OnGPU(STRICT.xp.ndarray):
        def __init__(self, index):
            super().__init__(np.ones(2))
            self.device = SimpleNamespace(id=index)

    assert array_module(OnGPU(1), OnGPU(1)) is STRICT.xp
    with pytest.raises(DeviceError, match="two devices in one call: gpu:0 and gpu:1; move one"):
        array_module(OnGPU(0), OnGPU(1))


def test_moving_arrays(device):
    x = np.arange(6, dtype=np.float64).reshape(2, 3)
    moved = to_device(x, device, np.float32)
    assert isinstance(moved, device.xp.ndarray) and moved.dtype == np.float32
    back = to_cpu(moved)
    assert isinstance(back, np.ndarray) and np.array_equal(back, x)
    assert to_device(moved, device) is moved
    assert np.array_equal(to_device(moved, CPU), x)
    assert to_cpu(to_device([1, 2], device)).tolist() == [1, 2]
    assert to_cpu(3.5) == 3.5


def test_cpu_arrays_are_not_copied():
    x = np.ones(3)
    assert to_cpu(x) is x
    assert to_device(x, CPU) is x


def test_scatter_add_adds_an_index_twice(device):
    target, index = device.xp.zeros(3), to_device(np.array([0, 2, 0]), device)
    scatter_add(target, index, to_device(np.array([1.0, 2.0, 4.0]), device))
    assert to_cpu(target).tolist() == [5, 0, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_erf(dtype, device):
    y = erf(to_device(np.array([0.0, 0.5, -1.0, 6.0]), device, dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(to_cpu(y), [0, 0.5204998778130465, -0.8427007929497149, 1], rtol=1e-6)


def test_importing_the_package_imports_no_optional_library():
    """Neither CuPy nor matplotlib nor Hypothesis nor PyTorch."""
    code = (
        "import sys, scratchformer, scratchformer.training, scratchformer.testing; "
        "print({'cupy', 'matplotlib', 'hypothesis', 'torch', 'tokenizers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("x", [None, object(), [[1], [2, 3]], (i for i in range(2)), {"x": 1}], ids=type)
def test_only_arrays_are_moved(x):
    with pytest.raises(TypeError, match=f"^x: expected an array or numbers, got {x and type(x).__name__}$"):
        to_device(x, CPU)
    with pytest.raises(DeviceError, match=r"^device: expected a Device, such as CPU or .*, got str$"):
        to_device([1.0], "cpu")


def test_what_is_no_name_and_texts_in_place_of_numbers():
    with pytest.raises(DeviceError, match=r"^name: expected auto, cpu, gpu or gpu:N, got 1.5$"):
        get_device(1.5)
    for texts in (np.array(["1"]), ["1"], np.array([b"1"])):
        with pytest.raises(TypeError, match=r"^x: expected an array or numbers, got "):
            to_device(texts, CPU)


def test_a_copy_of_a_device_is_the_device():
    for device in CPU, STRICT:
        assert copy.deepcopy(device) is device
    assert pickle.loads(pickle.dumps(CPU)) is CPU


def test_the_device_where_a_library_makes_new_arrays():
    assert current_device(np) is CPU
    assert (current_device(STRICT.xp).name, current_device(STRICT.xp).xp) == ("strict", STRICT.xp)
    cupy = fake_cupy(2)
    cupy.cuda.runtime.getDevice = lambda: 1
    assert current_device(cupy) == Device("gpu:1", cupy, 1)


def test_a_system_that_does_not_report_its_memory(monkeypatch):
    assert 2**28 < memory() < math.inf
    for error in AttributeError, ValueError, OSError:

        def sysconf(name, error=error):
            raise error(name)

        monkeypatch.setattr(os, "sysconf", sysconf, raising=False)
        assert memory.__wrapped__() == math.inf


def test_the_memory_of_a_gpu_and_the_precision_of_its_products(monkeypatch):
    cupy, settings = fake_cupy(2), []
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 5)
    products = SimpleNamespace(COMPUTE_TYPE_TF32="tf32", COMPUTE_TYPE_DEFAULT="default")
    products.get_compute_type = lambda dtype: settings[-1][1] if settings else "first"
    products.set_compute_type = lambda *setting: settings.append((*setting, cupy.cuda.Device.current))
    for name in "cupy", "cupy._core":
        monkeypatch.setitem(sys.modules, name, cupy)
    cupy._routines_linalg = products
    gpu = Device("gpu:1", cupy, 1)
    assert free_memory(gpu) == 2**30 + 5 and free_memory(CPU) == free_memory(STRICT) == math.inf
    for device in CPU, STRICT, gpu:
        with tf32(device, True), tf32(device, False):
            pass
    assert settings == [(np.float32, kind, 1) for kind in ("tf32", "default", "tf32", "first")]


def test_tables_are_kept_and_those_of_a_recorded_step_live_as_long_as_it():
    made = []

    @kept(1)
    def table(size, device):
        made.append(size)
        return [size]

    assert table(3, CPU) is table(3, CPU) and made == [3]
    with recording() as used:
        assert is_recording()
        first = table(4, CPU)
        table(5, CPU)
        assert table(4, CPU) is first and made == [3, 4, 5]
    assert not is_recording() and [*used.values()] == [[4], [5]]
    table(4, CPU)
    assert made == [3, 4, 5, 4]
    other = Device("other", ModuleType("other"))
    with recording() as used:
        assert table(6, other) is not table(6, other)  # inside jax.jit, a table that is kept would have no values
    assert made[4:] == [6, 6] and not used
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    assert not is_recording()


class Foreign:
    """An array of a library that follows the Array API standard, with types of its own and without NumPy's methods."""

    def __init__(self, x, **functions):
        self.x, self.functions = x, functions
        self.dtype, self.shape = f"foreign.{x.dtype.name}", x.shape

    def __array__(self, dtype=None, copy=None):
        return self.x

    def __array_namespace__(self):
        names = dict(float32="foreign.float32", zeros=lambda shape, dtype: (shape, dtype))
        names |= dict(asarray=lambda x, copy=None: Foreign(np.array(np.asarray(x), copy=copy)))
        names |= dict(astype=lambda x, dtype: Foreign(x.x.astype(type_of(dtype))), __name__="foreign")
        return SimpleNamespace(**(names | self.functions))


def test_arrays_of_a_library_with_types_of_its_own():
    x = Foreign(np.array([0.5, -1.0], np.float16))
    assert cast(x, x.dtype) is x and cast(x, "foreign.float64").dtype == "foreign.float64"
    assert widen(x).dtype == "foreign.float32" and widen(widen(x)).dtype == "foreign.float32"
    twin = backend.copy(x)
    assert twin is not x and twin.x is not x.x and np.array_equal(twin.x, x.x)
    assert zeros_like(x, (2, 3)) == ((2, 3), "foreign.float16")
    assert np.array_equal(to_cpu(x), x.x) and type_of(x.dtype) == np.float16


def test_types_by_name():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert type_of("torch.bfloat16") == bfloat16 and type_of("torch.float64") == np.float64
    assert is_floating_type(np.dtype(bfloat16)) and not is_floating_type(np.dtype(np.complex64))
    x = np.ones(2, bfloat16)
    assert widen(x).dtype == np.float32 and widen(x.astype(np.float64)).dtype == np.float64
    y = np.ones(2)
    assert widen(y) is y and cast(y, np.float64) is y and backend.copy(y) is not y
    zeros = zeros_like(y, (2, 3))
    assert zeros.shape == (2, 3) and zeros.dtype == np.float64 and not zeros.any()


def test_the_error_function_of_each_library(monkeypatch):
    """It is a method of the array, a function of the library, one of its package for special functions, or SciPy's."""
    x = np.array([0.5, -1.0])
    assert erf(SimpleNamespace(erf=lambda: "its method")) == "its method"
    assert erf(Foreign(x, erf=lambda x: "its function")) == "its function"
    assert np.array_equal(erf(Foreign(x)).x, erf(x))
    for library, module in ("cupy", "cupyx.scipy.special"), ("jax.numpy", "jax.scipy.special"):
        beside = ModuleType(module)
        beside.erf = lambda x, module=module: module
        monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
        monkeypatch.setitem(sys.modules, module.rpartition(".")[0], ModuleType(module.rpartition(".")[0]))
        monkeypatch.setitem(sys.modules, module, beside)
        assert erf(Foreign(x, __name__=library)) == module


def test_numbers_and_lists_belong_to_no_library():
    assert library_of(np.float32(1)) is library_of(2.0) is library_of([1.0]) is None
    assert library_of(np.ones(1)) is np


def test_arrays_of_libraries_that_need_a_package(monkeypatch):
    kind = type("Tensor", (), {"__module__": "torch"})
    monkeypatch.setitem(sys.modules, "array_api_compat", None)
    with pytest.raises(
        ImportError, match=r"^arrays of PyTorch and Dask need the package array-api-compat: pip install"
    ):
        library_of(kind())
    beside = ModuleType("array_api_compat")
    beside.array_namespace, beside.is_array_api_obj = lambda x: STRICT.xp, lambda x: hasattr(x, "shape")
    monkeypatch.setitem(sys.modules, "array_api_compat", beside)
    assert library_of(kind()) is None
    kind.shape = ()
    assert library_of(kind()) is STRICT.xp


def test_scatter_add_without_a_function_for_it():
    """It is a product with a one-hot matrix, and gives a new array."""
    jax = pytest.importorskip("jax.numpy")
    target = jax.asarray(np.ones((3, 2), np.float32))
    found = scatter_add(target, jax.asarray([0, 2, 0]), jax.asarray([[1.0, 2], [3, 4], [5, 6]]))
    assert np.asarray(found).tolist() == [[7, 9], [1, 1], [4, 5]] and found.dtype == np.float32
    assert np.asarray(target).tolist() == [[1, 1]] * 3


def test_functions_for_tables_are_near_the_exact_ones():
    x = np.linspace(-1000, 1000, 10_001)
    np.testing.assert_allclose(sine(x), np.sin(x), rtol=0, atol=2e-16)
    np.testing.assert_allclose(cosine(x), np.cos(x), rtol=0, atol=2e-16)
    assert power(10_000, -0.25) == 0.1 and power(0.5, 1000) == 0.5**1000
    with mp.workprec(200):
        assert all(logarithm(x) == float(mp.log(x)) for x in (1, 1 + 2.0**-52, 2, 4.0, np.float32(0.3), 1e300, 5e-324))
