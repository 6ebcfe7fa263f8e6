"""A compiled model brought to life on one rank: groups, weights, KV memory, and the executor of each phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moec.artifact import Artifact
from moec.cache_files import CacheSettings
from moec.checkpoint.folder import Fingerprint, check_unchanged
from moec.codegen.kernel_choice import Chosen, Product, read_choices
from moec.diagnostics import MoecError, fail
from moec.importer.match import check_declared
from moec.runtime.capturable import obstacle
from moec.runtime.cuda_graphs import CudaCapture
from moec.runtime.executor import Executor, Watcher
from moec.runtime.experts.cache import ExpertCache
from moec.runtime.experts.session import open_cache
from moec.runtime.generate import Place
from moec.runtime.groups import make_groups
from moec.runtime.host_memory import keep_freed
from moec.runtime.kernels.triton_products import architecture_of
from moec.runtime.kv import allocate_kv
from moec.runtime.launch.rank import Rank
from moec.runtime.schedule import Limits
from moec.runtime.step import Step
from moec.runtime.weights import Progress, account, load_rank


@dataclass(frozen=True, eq=False)
class Session:
    """The two phases of a model over the same weights and KV memory."""

    place: Place
    limits: Limits
    prefill_phase: Executor
    decode_phase: Executor
    cache: ExpertCache | None = None

    def prefill(self, step: Step) -> Tensor:
        return self.prefill_phase.run(step)

    def decode(self, step: Step) -> Tensor:
        return self.decode_phase.run(step)

    def close(self) -> None:
        """End the threads that copy experts, and forget graphs: NCCL's communicators end after those that use them."""
        self.decode_phase.forget_graphs()
        if self.cache is not None:
            self.cache.close()

    def record(self, recorder: Watcher) -> None:
        """Have both phases record what they run."""
        self.prefill_phase.record(recorder)
        self.decode_phase.record(recorder)


def open_session(
    artifact: Artifact,
    folder: Path,
    rank: Rank,
    progress: Progress | None = None,
    settings: CacheSettings | None = None,
) -> Session:
    """Join the groups and load this rank's part of the weights in `folder`, its cached experts into their tiers.

    Raises:
        MoecError: E07 for weights that do not fit or cannot be read, E05 for a program that cannot run here, E0640 to
            E0644 for experts that cannot be brought to their tiers.
        PeerLost: a peer went away meanwhile.
    """
    mesh = artifact.prefill.mesh
    stage = rank.rank // mesh.size
    programs = artifact.stages[stage]
    groups = make_groups(mesh, rank)
    rank.status.begin("load")

    def read(done: int, total: int) -> None:
        rank.status.progressed()
        if progress is not None:
            progress(done, total)

    sources = account(artifact.programs, folder)
    tensors = load_rank(programs, sources, rank.rank, rank.device, read)
    kv = allocate_kv(programs[0], rank.device)
    before = sum(len(earlier[0].sparse_layers) for earlier in artifact.stages[:stage])
    cache = open_cache(programs, sources, rank, settings or CacheSettings(), before, read)
    chosen = _read_choices(artifact, rank)
    prefill, decode = (
        Executor(program, tensors, kv, rank=rank.rank, groups=groups, status=rank.status, cache=cache, chosen=chosen)
        for program in programs
    )
    if rank.device.type == "cpu":
        keep_freed()
    elif rank.device.type == "cuda" and not obstacle(programs[1]):
        decode.capture(CudaCapture())
    limits = read_limits(artifact)
    return Session(Place(mesh, rank.rank, groups, rank.device, rank.status), limits, prefill, decode, cache)


def _read_choices(artifact: Artifact, rank: Rank) -> dict[Product, Chosen]:
    """Tiles that were chosen at compile time for this device. Raises E0771 for some that cannot be read."""
    try:
        return read_choices(artifact.document["kernels"], architecture_of(rank.device))
    except ValueError as error:
        raise fail("E0771", f"plan.json cannot be used: {error}", "compile the `.moe` file again") from None


def check_device(artifact: Artifact, kind: str) -> None:
    """Refuse to interpret by the way what was compiled for a GPU, which would take hours. `kind`: cuda or cpu.

    Raises:
        MoecError: E0537.
    """
    target = artifact.document["target"]
    if kind == "cpu" and target != "cpu":
        raise no_gpu(f"the plan was compiled for {target}, and PyTorch sees no GPU")


def no_gpu(why: str) -> MoecError:
    help = "install a PyTorch for your GPU, or `--kernels interpret` runs the same kernels on the CPU, very slowly"
    return fail("E0537", why, help)


def check_weights(artifact: Artifact, folder: Path, is_compiled: bool) -> Fingerprint:
    """Account for every parameter from the shard headers in `folder`, before any rank starts; the folder's digests.

    `is_compiled`: it is the folder the artifact was compiled with, so its digests must be those remembered.

    Raises:
        MoecError: E07, naming what is missing, unused, damaged, changed or of another model.
    """
    sources = account(artifact.programs, folder)
    check_declared(artifact.document.get("declared"), folder)
    remembered = artifact.document["weights"]["fingerprint"]
    if is_compiled and remembered:
        check_unchanged(Fingerprint.from_json(remembered), sources.checkpoint)
    return sources.checkpoint.fingerprint


def read_limits(artifact: Artifact) -> Limits:
    """What the plan of an artifact allows."""
    prefill = artifact.prefill
    return Limits(prefill.context, prefill.tokens, prefill.slots, int(artifact.document["model"]["vocab"]))
