"""`moec calibrate`: measure the constants of a cluster on the ranks of a plan, and write its declaration."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moec.files import check_place, write_whole

if TYPE_CHECKING:
    from moec.checked import MeshSpec
    from moec.runtime.launch.rank import Rank
    from moec.runtime.launch.torchrun import Start


def calibrate_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .moe file with a plan: its mesh is measured.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="CLUSTER.moe", help="Write here.")] = None,
    plan: Annotated[str | None, typer.Option(metavar="NAME", help="Which plan, where the file has several.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often everything is measured.")] = 7,
) -> None:
    """Measure links, memory and arithmetic on the ranks of a plan, and write a cluster for `use "CLUSTER.moe"`.

    Under torchrun: torchrun --nproc-per-node N -m moec calibrate FILE -o CLUSTER.moe
    """
    from moec.compiler import checked_plan
    from moec.mesh import Mesh
    from moec.runtime.launch.job import prepare_fork, run_ranks
    from moec.runtime.launch.rank import device_kind
    from moec.runtime.launch.torchrun import is_started_by_torchrun, run_as_rank

    def read() -> MeshSpec:
        if output is not None:
            check_place(output)
        return checked_plan(file, plan, overrides or [])[0].mesh

    if is_started_by_torchrun():

        def as_rank(start: Start) -> None:
            spec = read()
            mesh = Mesh(spec.dp, spec.tp, spec.edp, spec.ep, spec.etp, spec.nodes, spec.pp)
            _work(start(mesh.world, mesh.describe(), device_kind()), spec, rounds, output)

        run_as_rank(as_rank)
    prepare_fork()
    spec = read()
    run_ranks(lambda rank: _work(rank, spec, rounds, output), spec.cluster.num_devices, kind=device_kind())


def _work(rank: Rank, spec: MeshSpec, rounds: int, output: Path | None) -> None:
    """One rank's part. Rank 0 writes."""
    from moec.calibrate_fit import calibrated, declaration, from_rows
    from moec.runtime.calibrate import measure

    cluster = spec.cluster
    rows = measure(rank, cluster.num_nodes, cluster.devices_per_node, rounds)
    if rank.rank != 0:
        return
    name = _name(output)
    shape = f"{cluster.num_nodes} x {cluster.devices_per_node} ranks on {rank.device.type}"
    notes = [f"Measured by `moec calibrate` with all {shape} at work: rates are one rank's share of what they had."]
    text = declaration(replace(calibrated(cluster, from_rows(rows)), name=name), notes)
    if output is None:
        sys.stdout.write(text)
        return
    write_whole(output, text)


def _name(output: Path | None) -> str:
    """The file's name, where it can be a cluster's."""
    from moec.grammar.tokens import reserved_words

    stem = output.stem if output is not None else ""
    is_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{3,63}", stem) and stem not in reserved_words()  # shorter: units
    return stem if is_name else "measured"
