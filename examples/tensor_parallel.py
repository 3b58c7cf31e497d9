"""A feed-forward layer whose matrices are divided among several processes (tensor parallelism), for study.

    pip install -e '.[distributed]'
    mpiexec -n 2 python examples/tensor_parallel.py

Each rank has some of the hidden units: their columns of the first matrix and their rows of the second. The program runs
forward and backward on random numbers, and compares the results with those of a single process. What this would mean
for a whole model is in docs/model_parallelism.md.
"""

import numpy as np

from scratchformer import ops


def feedforward(x, w1, b1, w2, b2, comm):
    """y = max(0, x w1 + b1) w2 + b2, with F hidden units in each rank.

    x: (N, C), the same in all ranks, as are b2 (C,) and the result y (N, C). Rank r has its own w1 (C, F), b1 (F,) and
    w2 (F, C); with r as an index they are w1_rcf, b1_rf and w2_rfc. The hidden units of different ranks do not need
    each other. Only the second product adds them up, so its sum over ranks is all that is sent:

        u_rnf = Σ_c x_nc w1_rcf + b1_rf
        h_rnf = max(0, u_rnf)
        y_nc = Σ_r Σ_f h_rnf w2_rfc + b2_c

    The bias b2 is added after the sum: in every rank's part, it would count R times.

    Backward. dy is the same in all ranks, and each computes the gradients of its own units from it:

        dh_rnf = Σ_c dy_nc w2_rfc        dw2_rfc = Σ_n h_rnf dy_nc        db2_c = Σ_n dy_nc
        du_rnf = dh_rnf where u_rnf > 0, 0 elsewhere
        dw1_rcf = Σ_n x_nc du_rnf        db1_rf = Σ_n du_rnf

    All ranks read x, so its gradient is the sum over ranks. This is the only thing that backward sends:

        dx_nc = Σ_r Σ_f du_rnf w1_rcf

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    u, first = ops.linear(x, w1, b1)
    h, active = ops.relu(u)
    part, second = ops.linear(h, w2)
    return total(part, comm) + b2, (first, active, second)


def feedforward_backward(dy, cache, comm):
    """(dx, dw1, db1, dw2, db2); dx and db2 are the same in all ranks."""
    first, active, second = cache
    dh, dw2 = ops.linear_backward(dy, second)
    dx, dw1, db1 = ops.linear_backward(ops.relu_backward(dh, active), first)
    return total(dx, comm), dw1, db1, dw2, dy.sum(axis=0)


def total(part, comm):
    """The sum of the arrays of all ranks, in all ranks."""
    sums = np.empty_like(part)
    comm.Allreduce(part, sums)
    return sums


def main():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    draw, N, C, F = np.random.default_rng(0), 64, 96, 600  # all ranks draw the same numbers
    x, w1, b1, w2, b2, dy = (draw.standard_normal(s) for s in ((N, C), (C, F), F, (F, C), C, (N, C)))
    mine = slice(comm.rank * F // comm.size, (comm.rank + 1) * F // comm.size)
    results = run(x, w1[:, mine], b1[mine], w2[mine], b2, dy, comm)
    y, dx, dw1, db1, dw2, db2 = run(x, w1, b1, w2, b2, dy, MPI.COMM_SELF)
    expected = y, dx, dw1[:, mine], db1[mine], dw2[mine], db2
    worst = max(abs(a - b).max() / abs(b).max() for a, b in zip(results, expected, strict=True))
    units = f"units {mine.start} to {mine.stop - 1}"
    print(f"rank {comm.rank}: {units}, {2 * x.nbytes:,} bytes summed; largest relative difference {worst:.1e}")


def run(x, w1, b1, w2, b2, dy, comm):
    y, cache = feedforward(x, w1, b1, w2, b2, comm)
    return y, *feedforward_backward(dy, cache, comm)


if __name__ == "__main__":
    main()
