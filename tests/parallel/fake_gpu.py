"""A stand-in for a GPU that records steps: see test_graphs.py, and ../training/test_recorded.py for whole models."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from scratchformer.parallel.graphs import Graphs
from scratchformer.testing.strict import traffic


class FakeGPU:
    """A library of arrays as that of a GPU. What a step does while it is recorded is done when the graph is launched,
    with what is in its arguments then.
    """

    def __init__(self, library=np, free=1000):
        self.events, self.free, self.broken = [], free, False
        self.capturing, self.graph = False, None
        self.traffic = []  # between the strict stand-in and the host, in the last step that was recorded
        cuda = SimpleNamespace(
            MemoryPool=lambda: SimpleNamespace(malloc=None, total_bytes=lambda: 100),
            Stream=self.stream,
            Device=lambda: SimpleNamespace(synchronize=lambda: self.events.append("synchronize")),
            using_allocator=self.block,
            runtime=SimpleNamespace(streamCaptureModeRelaxed=2),
        )
        pool = SimpleNamespace(free_all_blocks=lambda: None)
        makers = {name: getattr(library, name) for name in ("asarray", "ones", "zeros")}
        self.xp = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool, **makers)

    @contextmanager
    def block(self, *_):
        yield

    current = block

    def stream(self):
        gpu = self

        class Stream:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def synchronize(self):
                pass

            def begin_capture(self, _mode):
                gpu.events.append("begin")
                gpu.capturing = True

            def end_capture(self):
                gpu.events.append("end")
                gpu.capturing = False
                if gpu.broken:
                    raise RuntimeError("the capture is invalid")
                return gpu.graph

        return Stream()

    def graphs(self, step, total):
        """`Graphs` of a step on this GPU."""

        def run(*arguments):
            if not self.capturing:
                return step(*arguments)
            before = total.copy()
            with traffic() as self.traffic:
                results = step(*arguments)
            total[...] = before
            for x in results:
                if x is not None:
                    x[...] = np.nan

            def launch():
                self.events.append("launch")
                for there, x in zip(results, step(*arguments), strict=True):
                    if x is not None:
                        there[...] = x

            self.graph = SimpleNamespace(launch=launch)
            return results

        return Graphs(self, run, total)
