"""How many rows each expert gets in a step: what a kernel is chosen for and its cost is counted over.

T tokens choose k of E experts each, all different. Draws are seeded: the same question has the same answer.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
#: Tokens are drawn in parts of this many, to keep the drawing small; of more than `_MOST` not each is.
_CHUNK, _MOST = 4096, 32768


@lru_cache(maxsize=64)
def random_rows(num_experts: int, top: int, tokens: int, skew: float = 0.0, seed: int = 0) -> Rows:
    """Rows [E] of tokens that choose at random; expert e is as likely as 1 / (e + 1)^skew (Zipf; 0 is uniform).

    Without replacement, by the largest `top` of log weights plus Gumbel noise (Vieira, 2014). Of very many tokens as
    many as are drawn stand for all: each expert's rows are then drawn at once, by how often it was chosen.
    """
    rng = np.random.default_rng(seed)
    weights = -skew * np.log(np.arange(1, num_experts + 1, dtype=np.float64))
    counts = np.zeros(num_experts, dtype=np.int64)
    drawn = min(tokens, _MOST)
    for start in range(0, drawn, _CHUNK):
        keys = weights + rng.gumbel(size=(min(_CHUNK, drawn - start), num_experts))
        chosen = np.argpartition(-keys, top - 1, axis=1)[:, :top]
        counts += np.bincount(chosen.ravel(), minlength=num_experts)
    if drawn < tokens:
        more = rng.binomial(tokens - drawn, counts / drawn).astype(np.float64)
        counts = spread(counts + more, tokens * top, tokens)
    return counts


def even_rows(num_experts: int, top: int, tokens: int) -> Rows:
    """T k / E rows for each expert; what is left over goes to the first ones, one row each."""
    share, rest = divmod(tokens * top, num_experts)
    return np.array([share + (e < rest) for e in range(num_experts)], dtype=np.int64)


def power_law_rows(num_experts: int, top: int, tokens: int, alpha: float = 1.01) -> Rows:
    """Rows as in aiconfigurator's tables "power_law": loads by the inverse of the law's distribution, from 1 to 0.8 T.

    There u is drawn from (0, 1); here it is its quantiles, so that no draw is luckier than another. No expert gets more
    rows than there are tokens.
    """
    low, high = (1.0, 0.8 * tokens) if tokens * top > num_experts else (0.01, 2.0)
    u = (np.arange(num_experts) + 0.5) / num_experts
    power = 1.0 - alpha
    loads: NDArray[np.float64] = (u * (high**power - low**power) + low**power) ** (1.0 / power)
    return spread(loads, tokens * top, tokens)


def spread(loads: NDArray[np.float64], rows: int, most: int) -> Rows:
    """`rows` whole rows in proportion to `loads`, at most `most` each; `rows` is at most as many in all."""
    shares = np.minimum(loads / loads.sum() * rows, most)
    counts: Rows = np.floor(shares).astype(np.int64)
    order = np.argsort(counts - shares, kind="stable")  # the largest remainder first
    while (left := rows - int(counts.sum())) > 0:
        counts[order[counts[order] < most][:left]] += 1
    return counts
