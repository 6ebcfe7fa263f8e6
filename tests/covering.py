"""Cases that hold every pair of values of any two factors: what a test runs where the full product takes minutes."""

from __future__ import annotations

import itertools


def covering(factors: dict[str, tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Rows with one value of each factor, chosen greedily and always alike, so that every pair of values occurs."""
    columns = list(factors.values())
    pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(columns)), 2)
        for a in range(len(columns[i]))
        for b in range(len(columns[j]))
    }
    chosen = []
    while pairs:
        row = dict(zip(*[iter(min(pairs))] * 2, strict=False))
        for i in [i for i in range(len(columns)) if i not in row]:
            row[i] = max(range(len(columns[i])), key=lambda v, i=i, row=dict(row): (_gain(pairs, row | {i: v}), -v))
        chosen.append(tuple(columns[i][row[i]] for i in range(len(columns))))
        pairs -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(columns)), 2)}
    return chosen


def _gain(pairs: set[tuple[int, int, int, int]], row: dict[int, int]) -> int:
    return sum((i, row[i], j, row[j]) in pairs for i, j in itertools.combinations(sorted(row), 2))
