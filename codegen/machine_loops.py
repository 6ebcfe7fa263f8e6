"""Loops of machine code that hold matrix instructions, and how many instructions pass through each.

What costs issue slots is the shortest way through a loop that executes every matrix instruction in it: what the warps
run each time, without the branches that only wait. Read from a list of instructions of any machine; the method is that
of published comparisons of MoE kernels by "issue slots per wgmma", so the numbers compare.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: Kinds of loads from global memory: by tensor descriptor, asynchronous copies to shared memory, through registers.
LOADS = ("tma", "cp_async", "global")


@dataclass(frozen=True)
class MatrixOp:
    """A matrix instruction, `HGMMA 64x256x16`. `shape` is (m, n, k), None where the machine code does not tell it."""

    name: str
    shape: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        return self.name if self.shape is None else f"{self.name} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Instruction:
    """`target`: address that a jump goes to; `falls`: whether the next instruction may follow it."""

    address: int
    name: str
    target: int | None = None
    falls: bool = True
    matrix: MatrixOp | None = None
    load: str | None = None


@dataclass(frozen=True)
class MatrixLoop:
    """An innermost loop with matrix instructions. `slots` and `num_ops` count its hot path.

    `loads` are those on the path, by kind of `LOADS`. `tile_slots` are the instructions of the loop around it on the
    shortest way that runs this loop once: finding a tile, filling the pipeline, the epilogue; None where no loop is
    around it. `peeled` matrix instructions run on that way too.
    """

    op: MatrixOp
    num_ops: int
    slots: int
    loads: tuple[tuple[str, int], ...] = ()
    tile_slots: int | None = None
    peeled: int = 0

    @property
    def slots_per_op(self) -> float:
        """Instructions issued by a warp for each of its matrix instructions."""
        return self.slots / self.num_ops


@dataclass(frozen=True)
class ReadingLoop:
    """A loop that loads and multiplies no matrices: `slots` instructions on its shortest way by all `loads` loads."""

    slots: int
    loads: int


@dataclass(frozen=True)
class _Loop:
    """Addresses [start, end] of a backward jump, and the positions of the instructions on its hot path."""

    start: int
    end: int
    path: tuple[int, ...] = field(repr=False)
    num_ops: int


def matrix_loops(code: Sequence[Instruction]) -> tuple[MatrixLoop, ...]:
    """Every innermost loop with matrix instructions, in the order of the code."""
    index = {one.address: i for i, one in enumerate(code)}
    jumps = _jumps_back(code, index)
    found: list[_Loop] = []
    for start, end in jumps:  # the shortest first: a wait that jumps back into a loop spans more than the loop
        if any(start <= loop.end and loop.start <= end for loop in found):
            continue
        if (loop := _hot_loop(code, index, start, end)) is not None:
            found.append(loop)
    inside = {i for loop in found for i in range(index[loop.start], index[loop.end] + 1)}
    in_order = sorted(found, key=lambda loop: loop.start)
    return tuple(_matrix_loop(code, loop, _around(code, index, loop, jumps, inside)) for loop in in_order)


def reading_loop(code: Sequence[Instruction]) -> ReadingLoop | None:
    """The innermost loop with most loads and no matrix instructions, None where there is no such loop."""
    index = {one.address: i for i, one in enumerate(code)}
    found: list[tuple[int, int, ReadingLoop]] = []
    for start, end in _jumps_back(code, index):
        if any(start <= last and first <= end for first, last, _ in found):
            continue
        body = range(index[start], index[end] + 1)
        loads = [i for i in body if code[i].load is not None]
        if not loads or any(code[i].matrix is not None for i in body):
            continue
        if (path := _through(code, index, (start, end), loads)) is not None:
            found.append((start, end, ReadingLoop(len(path), len(loads))))
    return max((loop for _, _, loop in found), key=lambda loop: loop.loads, default=None)


def _jumps_back(code: Sequence[Instruction], index: Mapping[int, int]) -> list[tuple[int, int]]:
    """(target, address) of all jumps back, the shortest first."""
    jumps = [(one.target, one.address) for one in code if one.target is not None and one.target <= one.address]
    return sorted((jump for jump in jumps if jump[0] in index), key=lambda jump: (jump[1] - jump[0], *jump))


def _hot_loop(code: Sequence[Instruction], index: dict[int, int], start: int, end: int) -> _Loop | None:
    ops = [i for i in range(index[start], index[end] + 1) if code[i].matrix is not None]
    if not ops:
        return None
    path = _through(code, index, (start, end), ops)
    return None if path is None else _Loop(start, end, tuple(path), sum(code[i].matrix is not None for i in path))


def _through(
    code: Sequence[Instruction], index: dict[int, int], bounds: tuple[int, int], stops: Sequence[int]
) -> list[int] | None:
    """Positions on the shortest way from the first to the last address of `bounds` by all `stops` that it can reach."""
    first, last = (index[address] for address in bounds)
    follow = _successors(code, index, first, last)
    path = _shortest(follow, first, stops[0]) if stops else [first]
    if path is None:
        return None
    for stop in stops[1:]:
        path += (_shortest(follow, path[-1], stop) or [path[-1]])[1:]
    leg = _shortest(follow, path[-1], last)
    return None if leg is None else path + leg[1:]


def _successors(
    code: Sequence[Instruction], index: dict[int, int], first: int, last: int
) -> Callable[[int], Iterable[int]]:
    def follow(i: int) -> Iterable[int]:
        one = code[i]
        to = [index[one.target]] if one.target in index else []
        to += [i + 1] if one.falls else []
        return [j for j in to if first <= j <= last]

    return follow


def _shortest(follow: Callable[[int], Iterable[int]], source: int, sink: int) -> list[int] | None:
    before: dict[int, int] = {source: source}
    queue = deque([source])
    while queue and sink not in before:
        here = queue.popleft()
        for there in follow(here):
            if there not in before:
                before[there] = here
                queue.append(there)
    if sink not in before:
        return None
    path = [sink]
    while path[-1] != source:
        path.append(before[path[-1]])
    return path[::-1]


def _matrix_loop(code: Sequence[Instruction], loop: _Loop, around: tuple[int | None, int]) -> MatrixLoop:
    body = [code[i] for i in loop.path]
    op = next(one.matrix for one in body if one.matrix is not None)
    counts = Counter(one.load for one in body if one.load is not None)
    loads = tuple((kind, counts[kind]) for kind in LOADS if counts[kind])
    return MatrixLoop(op, loop.num_ops, len(body), loads, *around)


def _around(
    code: Sequence[Instruction],
    index: dict[int, int],
    loop: _Loop,
    spans: Sequence[tuple[int, int]],
    inside: set[int],
) -> tuple[int | None, int]:
    """Instructions of the nearest loop around `loop` on its shortest way, and matrix instructions before the loop.

    `spans` are all backward jumps, the shortest first; `inside` are positions in innermost loops.
    """
    for start, end in spans:
        if not (start <= loop.start and loop.end < end):
            continue
        before = _through(code, index, (start, loop.start), [])
        follow = _successors(code, index, index[start], index[end])
        after = _shortest(follow, index[loop.end], index[end])
        if before is None or after is None:
            continue
        ahead = [i for i in range(index[start], index[loop.start]) if code[i].matrix is not None and i not in inside]
        return len(before) + len(after) - 2, len(ahead)
    return None, 0
