"""Ranks: the processes of one training run, on one machine or on several, started by `mpiexec -n 4 python ...`.

Each rank has all parameters and computes the gradients of its part of a batch: a range of its shares (see `replicas`).
Their sum is made in three steps. Let P be the number of parameters and R that of ranks:

1. The flat gradient has R slices. Every rank sends slice r of its partial sums to rank r: about P/R numbers to each of
   R − 1 ranks.
2. Rank r adds what it has of slice r, in the order of the tree.
3. Every rank sends its slice of the sum to all others: again P/R numbers to each of R − 1 ranks. Or it steps its slice
   of the parameters, and sends that: in half precision, if the ranks compute in it.

So a rank sends about 2 P (R − 1)/R numbers in a step, however many ranks there are. (It sends more if its shares are
not a whole branch of the tree: two partial sums, say, instead of one.) Every addition is one of the tree's, so the bits
of the sum are those of a single process.

A rank that is killed is noticed by the launcher, which ends all others. A process that is stopped, or whose machine is
gone, is noticed by its `Heartbeat`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from ..backend import Array, cores
from ..optim.optimizer import pieces
from ..shell.process import in_words
from ..shell.text import shown
from ..version import __version__

if TYPE_CHECKING:
    from .replicas import Branch, TreeSum

T = TypeVar("T")

NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # a launcher of MPI programs sets one of them
BEAT, PATIENCE = 1.0, 20.0  # seconds


class Elsewhere(SystemExit):
    """Another rank has an error, and says so."""


class Ranks:
    """The processes of a run: `size` of them, and this one's number, its `rank`. By default there is only one.

    As a context manager: if the block raises an error in one rank, all ranks end.
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size
        self.ending = False  # whether all ranks know that they are to end

    @classmethod
    def find(cls) -> Self:
        """The ranks that a launcher started with this process. MPI is loaded only if there is a launcher.

        Raises ImportError if mpi4py is not installed.
        """
        if not any(name in os.environ for name in NUMBERS):
            return cls()
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(f"mpiexec needs: pip install 'scratchformer[distributed]' ({error})") from error
        comm = MPI.COMM_WORLD
        return cls(comm if comm.size > 1 else None)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone prints and writes files."""
        return self.rank == 0

    def __enter__(self) -> Self:
        output = sys.stdout if self.first else open(os.devnull, "w", encoding="utf-8")
        if self.size > 1:
            self.heartbeat = Heartbeat(self.comm.Dup())
            self.heartbeat.start()
        if not self.first:  # last, so that an error above is seen
            sys.stdout, os.environ["TQDM_DISABLE"] = output, "1"
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if self.size == 1:
            return
        if error is None:
            self.comm.Barrier()  # until rank 0 has reported
        elif not (self.ending or isinstance(error, Elsewhere)):
            if not self.first:
                time.sleep(BEAT)  # if rank 0 has the same error, it ends all
            end_all(self.comm, f"rank {self.rank} on {socket.gethostname()}: {in_words(error)}")
        self.heartbeat.end()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in every rank."""
        return [value] if self.size == 1 else self.comm.allgather(value)

    def from_first(self, function: Callable[[], T]) -> T:
        """Let rank 0 call `function`; all ranks return the result. If it raises an error in rank 0, the others end."""
        if self.size == 1:
            return function()
        result: Any = None
        failed: BaseException | None = None
        if self.first:
            try:
                result = function()
            except BaseException as error:
                failed = error
        status = failed.code if isinstance(failed, SystemExit) and isinstance(failed.code, int) else 1  # 0: --help
        ended, status, result = self.comm.bcast((failed is not None, status, None if failed else result))
        self.ending = self.ending or ended
        if failed is not None:
            raise failed
        if ended:
            raise Elsewhere(status)
        return result

    def send_first(self, array: Array) -> None:
        """Copy an array of rank 0 into those of the others."""
        if self.size > 1:
            self.comm.Bcast(array)

    def send_parts(self, array: Array, parts: list[slice]) -> None:
        """Give every other rank its part of an array of rank 0. Their own `array` is as long as the part."""
        others = range(1, self.size) if self.first else range(0)
        requests = [self.comm.Isend(array[parts[r]], r) for r in others] or [self.comm.Irecv(array, 0)]
        type(requests[0]).Waitall(requests)

    def collect_parts(self, part: Array, parts: list[slice]) -> Array:
        """In rank 0, the array whose parts the ranks have; in the others, their own part."""
        if not self.first:
            self.comm.Isend(part, 0).Wait()
            return part
        whole = np.empty(parts[-1].stop, part.dtype)
        whole[parts[0]] = part
        requests = [self.comm.Irecv(whole[parts[r]], r) for r in range(1, self.size)]
        type(requests[0]).Waitall(requests)
        return whole

    def expect_same(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError in rank 0, and end the others, unless all ranks have the same values."""
        everyone = self.gather((socket.gethostname(), dict(facts)))

        def compare() -> None:
            _, first = everyone[0]
            for rank, (host, facts) in enumerate(everyone):
                for name in first | facts:
                    if facts.get(name) != first.get(name):
                        got = f"{shown(facts.get(name))}, rank 0 has {shown(first.get(name))}"
                        raise ValueError(f"rank {rank} on {host} has another {name}: {got}")

        self.from_first(compare)

    def expect_same_program(self, argv: list[str]) -> None:
        """Raise ValueError in rank 0, and end the others, unless all have the same versions and command line."""
        # NumPy draws the batches, and may draw other ones in another version.
        versions = {"version": __version__, "version of NumPy": np.__version__}
        self.expect_same(versions | {f"argument {n}": argument for n, argument in enumerate(argv, 1)})

    def expect_same_bits(self, what: str, array: Array) -> None:
        """Raise ValueError in rank 0, and end the others, unless an array has the same bits in all ranks."""
        if self.size > 1:
            self.expect_same({f"checksum of {what}": f"{zlib.crc32(array.view(np.uint8)):08x}"})

    def cores(self) -> int:
        """The number of this rank's cores; cores that several ranks on one machine may use are divided among them."""
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}  # where the system says it
        here = socket.gethostname(), cpus
        everyone = self.gather(here)
        sharing = sum(host == here[0] and bool(each & cpus) for host, each in everyone)
        return max(1, cores() // sharing)

    def places(self) -> str:
        """Which rank runs on which machine, with how many cores."""
        everyone = self.gather((socket.gethostname(), self.cores()))
        return "\n".join(f"rank {rank} on {host}, with {count} core(s)" for rank, (host, count) in enumerate(everyone))

    def part(self, count: int) -> range:
        """The numbers of this rank's part of `count` items in order."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def sum(
        self, sums: TreeSum, branches: Sequence[list[Branch]], out: Array, slices: list[slice], map: Callable = map
    ) -> None:
        """Put this rank's slice of the sum of all ranks' terms into `out` (P,), which may change elsewhere too.

        sums: has got the terms of this rank. branches: those that every rank has, in order.
        map: as for `Optimizer.step`.
        """
        mine, others = slices[self.rank], [r for r in range(self.size) if r != self.rank]
        parts, requests = {branch: part.array[mine] for branch, part in sums.waiting.items()}, []
        room = sums.room(out, mine.stop - mine.start)
        summed = next(chain(parts.values(), room))
        for r in others:
            for tag, branch in enumerate(branches[r]):
                parts[branch] = next(room)
                requests.append(self.comm.Irecv(parts[branch], r, tag))
        for r in others:
            for tag, branch in enumerate(branches[self.rank]):
                requests.append(self.comm.Isend(sums.waiting[branch].array[slices[r]], r, tag))
        type(requests[0]).Waitall(requests)

        def add(piece: slice) -> None:
            total = type(sums)(sums.count, [])
            for (round, place), array in parts.items():
                total.add(place, array[piece], False, round)
            summed[piece] = total.total.array

        list(map(add, pieces(summed)))
        if summed.ctypes.data != out[mine].ctypes.data:
            out[mine] = summed  # only now, since what was received may be in `out`
        for part in sums.waiting.values():
            sums.release(part)

    def join(self, flat: Array, slices: list[slice]) -> None:
        """Every rank has its own of the slices of a flat array (P,); give each all of them."""
        flat, requests = flat.view(f"u{flat.itemsize}"), []  # MPI knows no type of 16 bits for real numbers
        for r in range(self.size):
            if r != self.rank:
                requests.append(self.comm.Irecv(flat[slices[r]], r))
                requests.append(self.comm.Isend(flat[slices[self.rank]], r))
        type(requests[0]).Waitall(requests)


class Heartbeat(threading.Thread):
    """A thread that sends rank 0 a message every BEAT seconds, and in rank 0 one to each of the others.

    A rank from which none has come for PATIENCE seconds hangs: all ranks are ended, with a message that names it.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(daemon=True)
        self.comm, self.stop = comm, threading.Event()
        self.hosts = comm.allgather(socket.gethostname())
        self.others = range(1, comm.size) if comm.rank == 0 else range(1)

    def run(self) -> None:
        now = time.monotonic()
        heard = dict.fromkeys(self.others, now)
        sent: list = []
        while not self.stop.wait(BEAT):
            before, now = now, time.monotonic()
            if now - before > PATIENCE / 2:  # this process was stopped itself, perhaps with all others
                heard = dict.fromkeys(self.others, now)
            sent = [request for request in sent if not request.Test()]
            sent += [self.comm.Isend(bytearray(1), other) for other in self.others]
            for other in self.others:
                while self.comm.Iprobe(other):
                    self.comm.Recv(bytearray(1), other)
                    heard[other] = now
            for other, last in heard.items():
                # If rank 0 hangs, the others notice it a little later than rank 0 would notice one of them.
                if now - last > PATIENCE + (0 if self.comm.rank == 0 else 2 * BEAT):
                    silent = f"rank {other} ({self.hosts[other]}) has not answered for {PATIENCE:.0f} s"
                    end_all(self.comm, silent)

    def end(self) -> None:
        self.stop.set()
        self.join()


def end_all(comm: Any, reason: str) -> None:
    """End all ranks, this one included."""
    os.write(2, f"\nerror: {reason}; all ranks end\n".encode())  # on a line of its own, after a progress bar
    threading.Timer(3 * BEAT, os._exit, [1]).start()  # if the launcher cannot end it: its connection may be cut
    comm.Abort(1)
