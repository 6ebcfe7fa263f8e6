"""compile(source) -> Artifact: the whole compiler as a straight list of steps.

    .moe text --parse, check--> plan --lower--> one Program per phase --passes--> Programs --render--> artifact

The page a newcomer reads first. Each step is one call; the passes stand below in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from moec.artifact import Artifact, name_of
from moec.checked import Plan
from moec.checkpoint.folder import has_weights, open_checkpoint
from moec.codegen.cpp import kernels_of, render_cpp
from moec.codegen.kernel_tune import Measure
from moec.codegen.phase import render_phase
from moec.compiler_kernels import compile_kernels
from moec.diagnostics import CompileError, Diagnostic, SourceFile, did_you_mean
from moec.grammar.parser import read_source
from moec.ir.program import Program, op_of
from moec.ir.proof.program import prove
from moec.lowering import lower
from moec.passes import PASSES
from moec.passes.base import Pass
from moec.passes.cache_experts import CacheExperts
from moec.passes.choose_exchange import ChooseExchange
from moec.passes.choose_kernels import ChooseKernels
from moec.passes.chunk_tokens import ChunkTokens
from moec.passes.fuse_experts import FuseExperts
from moec.passes.fuse_gate_up import FuseGateUp
from moec.passes.infer_shapes import InferShapes
from moec.passes.insert_exchange import InsertExchange
from moec.passes.join_shared import JoinShared
from moec.passes.merge_linears import MergeLinears
from moec.passes.pair_experts import PairExperts
from moec.passes.place_experts import PlaceExperts
from moec.passes.place_prefetch import PlacePrefetch
from moec.passes.plan_memory import PlanMemory
from moec.passes.plan_overlap import PlanOverlap
from moec.passes.runner import Observer, run_passes
from moec.passes.schedule import Schedule
from moec.passes.shard_attention import ShardAttention
from moec.passes.shard_experts import ShardExperts
from moec.passes.split_stages import SplitStages
from moec.passes.split_tokens import SplitTokens
from moec.plan.cache import CacheTables, cache_document, with_learned
from moec.plan.document import plan_document
from moec.plan.exchange import ExchangeTables
from moec.plan.shared import SharedTables
from moec.plan.trace import PlanTrace, open_trace
from moec.semantics.checker import check
from moec.weights_path import find_weights

PHASES = ("prefill", "decode")


def pipeline(kernels: str = "torch", stage: int = 0) -> tuple[Pass, ...]:
    """The passes of one phase. `kernels`: which kernels to prefer: `torch`, `cpp` or `triton`."""
    return (
        SplitStages(stage=stage),  # first: the others then see one stage's layers only
        PlaceExperts(),  # from the declaration alone; later passes read the tables
        InferShapes(),
        ShardAttention(),  # first of the three that shard: the others start from its split batch
        SplitTokens(),
        ShardExperts(),  # needs the experts view that split-tokens moved the tokens to
        ChooseExchange(),  # asks insert-exchange for each
        PlanOverlap(),  # asks the four below for each number of chunks
        ChunkTokens(),  # while a layer's experts are one operation
        InsertExchange(),
        FuseGateUp(),  # after the exchange, which makes the experts' own products
        MergeLinears(),  # leaves gate and up to the one above
        CacheExperts(),  # once an expert's products are two
        JoinShared(prefer=kernels),  # before the next asks how many rows the experts have
        FuseExperts(prefer=kernels),  # what is left of the experts' products
        PairExperts(prefer=kernels),  # behind the one that leaves rows where they are
        PlacePrefetch(),  # needs the waits that cache-experts placed
        Schedule(),  # once every operation is there
        PlanMemory(),  # last to see sizes: nothing below changes a shape
        ChooseKernels(prefer=kernels),
    )


def compile(
    path: Path,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    target: str = "cpu",
    kernels: str = "torch",
    observers: Iterable[Observer] = (),
    weights: Path | None = None,
    trace: Path | None = None,
    measure: Measure | None = None,
) -> Artifact:
    """Compile a `.moe` file. `overrides` are `--set` texts; `target` is cpu or a GPU to compile kernels for.

    `trace`: routing of real tokens, over which costs are counted in place of random routing. `measure`: times GPU
    kernels, whose tiles are chosen by that in place of the cost model.

    Raises CompileError where the program is wrong, MoecError where a checkpoint or a trace does not match.
    """
    chosen, source = checked_plan(path, plan, overrides)
    traced = routing_of(chosen, trace)
    prefer = "triton" if target != "cpu" else kernels
    exchanges, caches, shared = ExchangeTables(chosen), CacheTables(), SharedTables()
    watching: list[Observer] = [*observers, exchanges, caches, shared]
    stages = [
        {phase: compile_phase(chosen, phase, source.name, prefer, watching, None, stage, traced) for phase in PHASES}
        for stage in range(chosen.mesh.pp)
    ]
    programs = [program for stage in stages for program in stage.values()]
    folder = find_weights(chosen.model.weights, path.parent, weights, must_exist=False)
    fingerprint = open_checkpoint(folder).fingerprint if folder is not None and has_weights(folder) else None
    made = compile_kernels(programs, target, measure)
    cache = cache_document(chosen, stages, caches.found, target, path.parent)
    found = exchanges.found, shared.found
    document = plan_document(chosen, stages, *found, target, made.entries, fingerprint, traced, cache)
    modules = {f"{name_of(program)}.py": render_phase(program) for program in programs}
    modules |= {f"kernels/{name_of(p)}.cpp": render_cpp(k) for p in programs if (k := kernels_of(p)) is not None}
    pairs = tuple((stage["prefill"], stage["decode"]) for stage in stages)
    return Artifact(pairs, document, modules | made.sources, path.parent, made.binaries)


def checked_plan(path: Path, plan: str | None = None, overrides: Sequence[str] = ()) -> tuple[Plan, SourceFile]:
    """The plan of a file, checked. Raises CompileError with everything found wrong."""
    source = read_source(path)
    return check(source, overrides=list(overrides)).plan(plan), source


def routing_of(plan: Plan, trace: Path | None) -> PlanTrace | None:
    """What costs are counted over: a trace, held against the plan's model (E0780, E0781), or random routing."""
    return None if trace is None else with_learned(open_trace(trace, plan.model), plan)


def compile_phase(
    plan: Plan,
    phase: str,
    source: str,
    kernels: str = "torch",
    observers: Iterable[Observer] = (),
    stop_after: str | None = None,
    stage: int = 0,
    trace: PlanTrace | None = None,
) -> Program:
    """Lower one phase of one pipeline stage and run the passes over it, as far as `stop_after`."""
    if stop_after is not None and stop_after not in [cls.name for cls in PASSES]:
        help = did_you_mean(stop_after, [cls.name for cls in PASSES]) or "`moec passes` lists them"
        raise CompileError(Diagnostic("E0402", f"there is no pass `{stop_after}`", help=help))
    program = lower(plan, plan.prefill if phase == "prefill" else plan.decode, source)
    program.routing = trace.routing[phase] if trace is not None else None
    run_passes(program, pipeline(kernels, stage), observers, stop_after)
    return program


def prove_plan(plan: Plan, source: str) -> int:
    """Compile every phase of every stage and prove its exchanges; how many layers' kinds exchange anything.

    Raises CompileError E0405 where an exchange loses, repeats or misplaces a row.
    """
    proved = 0
    for stage in range(plan.mesh.pp):
        for phase in PHASES:
            program = compile_phase(plan, phase, source, stage=stage)
            prove(program)
            proved += len({body.name for body, node in program.nodes() if op_of(node).name == "route"})
    return proved
