"""Runs a Program on one rank: renders its phase module, loads it from the text, and calls it once a step."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from moec.cache_sizes import cached_params
from moec.codegen.phase import render_phase
from moec.diagnostics import fail
from moec.ir.params import Param
from moec.ir.program import Program
from moec.layout import Placed
from moec.runtime.context import DROPPED, Context
from moec.runtime.cuda_graphs import Capture, Graphs
from moec.runtime.device_flags import raise_faults
from moec.runtime.groups import Group
from moec.runtime.kernels.table import kernels_for
from moec.runtime.launch.status import Status
from moec.runtime.step import Step
from moec.runtime.weights_reader import TORCH_DTYPES

if TYPE_CHECKING:
    from moec.codegen.kernel_choice import Chosen, Product
    from moec.runtime.experts.cache import ExpertCache


class Watcher(Protocol):
    """What records kernel calls: it wraps a phase's kernels."""

    def watch(self, kernels: SimpleNamespace, program: Program) -> SimpleNamespace: ...


@dataclass(frozen=True, eq=False)
class Weights:
    """This rank's parameters, as a phase module asks for them."""

    tensors: Mapping[tuple[str, int | None], Mapping[str, Tensor]]

    def of(self, body: str, layer: int | None = None) -> Mapping[str, Tensor]:
        """Parameters of a body by name, of one layer where the body is run for layers."""
        return self.tensors[body, layer]


class Executor:
    """One phase of one model on one rank.

    Raises `MoecError` where the program cannot be rendered (E0505), wants a kernel that is not there (E0509) or is
    given weights other than it declares (E0510).
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        kv: Mapping[int, Mapping[str, Tensor]],
        *,
        rank: int = 0,
        groups: Mapping[str, Group] | None = None,
        status: Status | None = None,
        cache: ExpertCache | None = None,
        chosen: Mapping[Product, Chosen] | None = None,
    ) -> None:
        """`tensors`: this rank's parts by full name (`layers.3.attention.q`), as `weights.load_rank` gives them.

        `kv`: layer -> state name -> memory [slots, context, ...], which steps append to. `cache`: has the experts that
        the program wants from slots, which are not among `tensors`. `chosen`: tiles of Triton kernels.
        """
        self.program = program
        device = next((tensor.device.type for tensor in tensors.values()), "cpu")
        self._kernels = kernels_for(program, device)
        self._forward = load_phase(render_phase(program), program.phase)
        self._weights, self._cache = collect_weights(program, tensors, rank, cache), cache
        self._kv, self._groups, self._rank = kv, groups or {}, rank
        self._status = status or Status(rank)
        self._memo: dict[Hashable, Any] = {}
        self._has_run, self._chosen = False, chosen or {}
        self._graphs: Graphs | None = None

    def record(self, recorder: Watcher) -> None:
        """Have kernel calls from now on recorded; so each is made one by one."""
        self.forget_graphs()
        self._kernels = recorder.watch(self._kernels, self.program)

    def capture(self, capture: Capture) -> None:
        """Run steps of fixed shape as graphs of kernels from now on. The program must have no `obstacle`."""
        self._graphs = Graphs(self.program, self._compute, capture)

    def forget_graphs(self) -> None:
        """Run kernel by kernel from now on."""
        self._graphs = None

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Logits fp32 [L, V] of the rows the step selects. Every rank of the mesh must run its own step."""
        self._status.phase = self.program.phase
        if self._graphs is not None:
            logits = self._graphs.run(step)
            if logits is not None:
                raise_faults(self._context(step))
                return logits
        return self._compute(step)

    def _compute(self, step: Step) -> Tensor:
        """Kernel by kernel."""
        context = self._context(step)
        if self._has_run or step.tokens.device.type == "cpu":
            return self._forward(self._kernels, self._weights, context).float()
        self._has_run = True
        with self._status.within("compile", "step"):  # the first step loads the device's libraries
            return self._forward(self._kernels, self._weights, context).float()

    def _context(self, step: Step) -> Context:
        return Context(
            step=step,
            mesh=self.program.mesh,
            rank=self._rank,
            placements=self.program.placements,
            groups=self._groups,
            states=self._kv,
            status=self._status,
            memo=self._memo,
            phase=self.program.phase,
            cache=self._cache,
            chosen=self._chosen,
        )

    @property
    def dropped(self) -> dict[int, int]:
        """Layer -> rows of this rank that did not fit a padded exchange and went round their experts, over all steps.

        A row counts once for each rank that had no room for it.
        """
        counted: Mapping[int, Tensor] = self._memo.get(DROPPED, {})
        return {layer: found for layer, rows in counted.items() if (found := int(rows))}


def load_phase(source: str, phase: str) -> Callable[..., Tensor]:
    """The `forward` of a rendered module. Its text is known to tracebacks and debuggers under a name of its own."""
    path = f"<moec {phase} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    namespace: dict[str, Callable[..., Tensor]] = {}
    # The only exec in moec. Its text comes from `render_phase`, just now and in this process: a shipped template filled
    # with numbers and checked identifiers, then parsed and held to a list of allowed imports and names.
    exec(compile(source, path, "exec"), namespace)  # noqa: S102
    return namespace["forward"]


def collect_weights(
    program: Program, tensors: Mapping[str, Tensor], rank: int, cache: ExpertCache | None = None
) -> Weights:
    """The parameters of every body and layer. Raises E0510 for one that is absent or of another shape or dtype."""
    found: dict[tuple[str, int | None], Mapping[str, Tensor]] = {}
    for run in program.runs:
        for layer in run.layers or (None,):
            prefix = "" if layer is None else f"layers.{layer}."
            params = program.bodies[run.body].params
            slots: Mapping[str, Tensor] = {}
            if layer is not None and cached_params(program, program.bodies[run.body]):
                slots = _slots(program, cache, layer)
            own = [name for name in params if name not in slots]
            for name in own:
                _check_fit(prefix + name, tensors, local_shape(program, params[name], rank), params[name].dtype, rank)
            held = {name: tensors[prefix + name] for name in own}
            found[run.body, layer] = {**held, **slots}
    return Weights(found)


def _slots(program: Program, cache: ExpertCache | None, layer: int) -> Mapping[str, Tensor]:
    if cache is None:
        raise _misfit(f"{program.phase} wants the experts of layer {layer} in slots, and there is no cache")
    return cache.views(layer)


def local_shape(program: Program, param: Param, rank: int) -> tuple[int, ...]:
    """Shape of this rank's part of a parameter, with the number of experts that this rank holds."""
    shape, place = param.local_shape(program.mesh, program.placements), param.layout.on("ep")
    held = program.placements[place.table].counts if isinstance(place, Placed) else ()
    return tuple(dim if isinstance(dim, int) else held[program.mesh.coordinate(rank, "ep")] for dim in shape)


def _check_fit(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: str, rank: int) -> None:
    if name not in tensors:
        raise _misfit(f"`{name}` was not loaded on rank {rank}")
    found = tensors[name]
    if tuple(found.shape) != shape or found.dtype != TORCH_DTYPES[dtype]:
        given = f"{list(found.shape)} {str(found.dtype).removeprefix('torch.')}"
        raise _misfit(f"`{name}` on rank {rank} is {given}, the program declares {list(shape)} {dtype}")


def _misfit(message: str) -> Exception:
    return fail("E0510", message, "this is a bug in moec: please report it with the program")
