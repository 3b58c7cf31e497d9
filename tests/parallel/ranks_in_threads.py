"""Ranks that are threads of one process, with the few functions of an MPI communicator that training uses."""

import pickle
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from scratchformer.parallel.ranks import Ranks


class Request:
    def __init__(self, finish=lambda: None):
        self.finish = finish

    def Wait(self):
        self.finish()

    @staticmethod
    def Waitall(requests):
        for request in requests:
            request.finish()


class Comm:
    def __init__(self, rank, size, slots, barrier, messages):
        self.rank, self.size, self.slots, self.barrier, self.messages = rank, size, slots, barrier, messages
        self.sent = 0  # bytes in arrays

    def allgather(self, value):
        self.slots[self.rank] = pickle.dumps(value)
        self.barrier.wait(30)
        found = list(map(pickle.loads, self.slots))
        self.barrier.wait(30)
        return found

    def bcast(self, value):
        return self.allgather(value)[0]

    def Bcast(self, array):
        array[...] = self.bcast(array)

    def Allreduce(self, array, out):
        out[...] = sum(self.allgather(array))

    def queue(self, *key):
        """The messages from one rank to another. (Of two threads that make it at once, one must not lose its own.)"""
        return self.messages.setdefault(key, queue.Queue())

    def Isend(self, array, dest, tag=0):
        self.sent += array.nbytes
        self.queue(self.rank, dest, tag).put(array.copy())
        return Request()

    def Irecv(self, array, source, tag=0):
        return Request(lambda: array.__setitem__(..., self.queue(source, self.rank, tag).get(timeout=600)))


def run_ranks(size, function):
    """[function(ranks) in each of `size` ranks]; the error of the first one that failed is raised."""
    slots, barrier, messages = [None] * size, threading.Barrier(size), {}

    def run(rank):
        ranks = Ranks(Comm(rank, size, slots, barrier, messages))
        try:
            return function(ranks)
        except BaseException:
            if not ranks.ending:  # the others know nothing of it
                barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(size)]]
