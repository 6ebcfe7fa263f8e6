"""The Python side of `moec run`: a compiled model with its weights, that gives logits and generates.

Each call starts the ranks anew (forked on the CPU), so call from the main thread of a process in which torch has
started no threads of its own: `torch.set_num_threads(1)` before other work sees to it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from moec.artifact import Artifact
from moec.artifact import load as load_artifact
from moec.cache_files import CacheSettings, find_cache
from moec.ir.fp8_notes import notes as fp8_notes
from moec.runtime.capturable import notes as graph_notes
from moec.runtime.cpp_library import notes
from moec.runtime.experts.notes import OneNote
from moec.runtime.generate import Request, collect_logits, generate
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank, device_kind
from moec.runtime.run_counts import gather_dropped, may_drop, tell_dropped
from moec.runtime.sampling import Sampling
from moec.runtime.schedule import check_prompts
from moec.runtime.session import check_device, check_weights, open_session, read_limits
from moec.runtime.text import read_eos
from moec.weights_path import find_weights

LOG = logging.getLogger("moec")


@dataclass(frozen=True)
class Model:
    """A compiled model, the folder of its weights, and where its expert cache has its files."""

    artifact: Artifact
    folder: Path
    cache: CacheSettings = field(default_factory=CacheSettings)

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """fp32 [tokens, vocab] of each prompt: the scores of the token after each of its tokens."""
        return self._run(Request(prompts, 0, keep_logits=True))[1]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> list[list[int]]:
        """New token ids of each prompt, the end token included. Temperature 0 takes the most likely token."""
        eos = frozenset[int]() if ignore_eos else read_eos(self.folder)
        return self._run(Request(prompts, max_new_tokens, eos, Sampling(temperature, seed)))[0]

    def _run(self, request: Request) -> tuple[list[list[int]], list[Tensor]]:
        check_prompts(request.prompts, request.max_new_tokens, read_limits(self.artifact))
        with tempfile.TemporaryDirectory(prefix="moec-") as made, OneNote() as warn:
            settings = replace(self.cache, warn=warn)
            kept = Path(made) / "logits.safetensors"

            def main(rank: Rank) -> object:
                session = open_session(self.artifact, self.folder, rank, settings=settings)
                result = generate(session, request, session.limits, session.place)
                if request.keep_logits:
                    rows = collect_logits(request, result, session.limits, session.place)
                    if rank.rank == 0:
                        save_file({str(i): row.cpu().contiguous() for i, row in enumerate(rows)}, kept)
                dropped = gather_dropped(session) if may_drop(self.artifact.programs) else {}
                session.close()
                if rank.rank == 0:
                    tell_dropped(dropped)
                return result.tokens if rank.rank == 0 else None

            kind = device_kind()
            check_device(self.artifact, kind)
            for note in (*notes(self.artifact.programs, kind), *fp8_notes(self.artifact.programs)):
                LOG.warning("%s; torch's kernels serve", note)
            for note in graph_notes(self.artifact.programs, kind):
                LOG.warning("%s", note)
            (tokens, *_) = run_ranks(main, self.artifact.num_ranks, kind=kind)
            saved = load_file(kept) if request.keep_logits else {}
        assert isinstance(tokens, list)
        return tokens, [saved[str(i)] for i in range(len(saved))]


def load(folder: Path, weights: Path | None = None) -> Model:
    """A compiled folder with its weights. Raises E0771, E0772 for the folder, E0760, E0761, E07 for the weights."""
    artifact = load_artifact(folder)
    found = find_weights(artifact.document["weights"]["path"], artifact.bases(folder), weights)
    assert found is not None
    check_weights(artifact, found, is_compiled=weights is None)
    return Model(artifact, found, find_cache(artifact.document, artifact.bases(folder)))
