from __future__ import annotations

import numpy as np

from .numba_vectors import (
    LANES,
    ROWS,
    add_product,
    exp2,
    filled,
    larger,
    largest,
    load,
    product,
    store,
    total,
    vectorised,
)

TILE = 64
LOG2E = np.log2(np.e)


@vectorised
def up(n, to):
    return (n + to - 1) // to * to


@vectorised
def pack(x, b, h, t, to, r, factor):
    D = x.shape[3]
    for d in range(0, D // LANES * LANES, LANES):
        store(to, (r, d), load(x, (b, h, t, d)) * factor)


@vectorised
def unpack(a, r, x, b, h, t, factor):
    D = x.shape[3]
    for d in range(0, D // LANES * LANES, LANES):
        store(x, (b, h, t, d), load(a, (r, d)) * factor)


@vectorised
def pack_columns(x, b, h, to):
    for s in range(x.shape[2]):
        for d in range(x.shape[3]):
            to[d, s] = x[b, h, s, d]


@vectorised
def fill(z, r, start, stop, value):
    for s in range(start, stop):
        z[r, s] = value


@vectorised
def row_largest(z, r, left, right):
    m = filled(z, -np.inf)
    for s in range(left, right, LANES):
        m = larger(m, load(z, (r, s)))
    return largest(m)


@vectorised
def row_exp(z, r, left, right, m):
    l = filled(z, 0)
    for s in range(left, right, LANES):
        e = exp2(load(z, (r, s)) - m)
        store(z, (r, s), e)
        l = l + e
    return total(l)


@vectorised
def row_dz(e, dz, r, left, right, m, delta):
    for s in range(left, right, LANES):
        p = exp2(load(e, (r, s)) - m)
        store(e, (r, s), p)
        store(dz, (r, s), p * (load(dz, (r, s)) - delta))


@vectorised
def forward(q, k, v, begin, end, scale, y, top, inverse):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    wide, long = up(D, LANES), up(S, LANES) + LANES
    keys = np.zeros((D, long), np.float32)
    values = np.zeros((S, wide), np.float32)
    queries = np.zeros((ROWS, wide), np.float32)
    z = np.zeros((ROWS, long), np.float32)
    sums = np.zeros((ROWS, wide), np.float32)
    for b in range(B):
        bb = b % begin.shape[0]
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                pack_columns(k, b, g, keys)
                for s in range(S):
                    pack(v, b, g, s, values, s, np.float32(1))
            for t in range(0, T, ROWS):
                rows = min(ROWS, T - t)
                lo, hi = S, 0
                for r in range(rows):
                    pack(q, b, h, t + r, queries, r, scale)
                    if begin[bb, t + r] < end[bb, t + r]:
                        lo, hi = min(lo, begin[bb, t + r]), max(hi, end[bb, t + r])
                left, right = lo // LANES * LANES, up(hi, LANES)
                for j in range(left, right, LANES):
                    product(z, 0, j, queries, 0, keys, j, 0, D)
                for r in range(rows):
                    x0, x1 = begin[bb, t + r], end[bb, t + r]
                    fill(z, r, left, x0, -np.inf)
                    fill(z, r, x1, right, -np.inf)
                    m = row_largest(z, r, left, right)
                    l = row_exp(z, r, left, right, m)
                    top[b, h, t + r] = m
                    inverse[b, h, t + r] = 1 / l if x0 < x1 else 0
                for d in range(0, wide, LANES):
                    product(sums, 0, d, z, 0, values, d, lo, hi)
                for r in range(rows):
                    unpack(sums, r, y, b, h, t + r, inverse[b, h, t + r])


@vectorised
def backward(dy, q, k, v, y, begin, end, scale, top, inverse, dq, dk, dv):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    wide, long = up(D, LANES), up(S, TILE) + LANES
    keysT = np.zeros((D, long), np.float32)
    valuesT = np.zeros((D, long), np.float32)
    keys = np.zeros((up(S, TILE), wide), np.float32)
    queries = np.zeros((TILE, wide), np.float32)
    output = np.zeros((TILE, wide), np.float32)
    delta = np.zeros(TILE, np.float32)
    e = np.zeros((TILE, TILE + LANES), np.float32)
    dz = np.zeros((TILE, TILE + LANES), np.float32)
    eT, dzT = e.T, dz.T
    sum_dq = np.zeros((TILE, wide), np.float32)
    sum_dk = np.zeros((long, wide), np.float32)
    sum_dv = np.zeros((long, wide), np.float32)
    ln2 = np.float32(1 / LOG2E)
    for b in range(B):
        bb = b % begin.shape[0]
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                pack_columns(k, b, g, keysT)
                pack_columns(v, b, g, valuesT)
                for s in range(S):
                    pack(k, b, g, s, keys, s, np.float32(1))
                for s in range(long):
                    fill(sum_dk, s, 0, wide, 0)
                    fill(sum_dv, s, 0, wide, 0)
            for t in range(0, T, TILE):
                height = min(TILE, T - t)
                lo, hi = S, 0
                for r in range(height):
                    pack(q, b, h, t + r, queries, r, scale)
                    pack(dy, b, h, t + r, output, r, inverse[b, h, t + r])
                    fill(sum_dq, r, 0, wide, 0)
                    dl = filled(sum_dq, 0)
                    for d in range(0, wide, LANES):
                        dl = dl + load(output, (r, d)) * load(y, (b, h, t + r, d))
                    delta[r] = total(dl)
                    if begin[bb, t + r] < end[bb, t + r]:
                        lo, hi = min(lo, begin[bb, t + r]), max(hi, end[bb, t + r])
                for s in range(lo // TILE * TILE, hi, TILE):
                    k_tile = keys[s : s + TILE]
                    width = min(TILE, S - s)
                    for i in range(0, height, ROWS):
                        rows = min(ROWS, height - i)
                        left, right = TILE, 0
                        for r in range(i, i + rows):
                            x0, x1 = max(begin[bb, t + r] - s, 0), min(end[bb, t + r] - s, TILE)
                            if x0 < x1:
                                left, right = min(left, x0), max(right, x1)
                        a, z = left // LANES * LANES, up(right, LANES)
                        for j in range(a, z, LANES):
                            product(e, i, j, queries, i, keysT, s + j, 0, D)
                            product(dz, i, j, output, i, valuesT, s + j, 0, D)
                        for r in range(i, i + rows):
                            x0, x1 = max(begin[bb, t + r] - s, 0), min(end[bb, t + r] - s, TILE)
                            if x1 <= x0:
                                x0 = x1 = TILE
                            row_dz(e, dz, r, a, z, top[b, h, t + r], delta[r])
                            fill(e, r, 0, x0, 0)
                            fill(dz, r, 0, x0, 0)
                            fill(e, r, x1, TILE, 0)
                            fill(dz, r, x1, TILE, 0)
                        for d in range(0, wide, LANES):
                            add_product(sum_dq, i, d, dz, i, k_tile, d, left, right)
                    for j in range(0, width, ROWS):
                        t0, t1 = height, 0
                        for r in range(height):
                            if (
                                begin[bb, t + r] < s + j + ROWS
                                and end[bb, t + r] > s + j
                                and begin[bb, t + r] < end[bb, t + r]
                            ):
                                t0, t1 = min(t0, r), max(t1, r + 1)
                        for d in range(0, wide, LANES):
                            add_product(sum_dv, s + j, d, eT, j, output, d, t0, t1)
                            add_product(sum_dk, s + j, d, dzT, j, queries, d, t0, t1)
                for r in range(height):
                    unpack(sum_dq, r, dq, b, h, t + r, scale * ln2)
            if (h + 1) * G % H == 0:
                for s in range(S):
                    unpack(sum_dk, s, dk, b, g, s, ln2)
                    unpack(sum_dv, s, dv, b, g, s, np.float32(1))
