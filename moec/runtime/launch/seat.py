"""The seat that torchrun (or Slurm) gave this process, and the store where the ranks of its run meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moec.diagnostics import fail
from moec.runtime.launch.process import port_holder
from moec.runtime.launch.rank import join_timeout

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Seat:
    """The numbers torchrun gave this process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


def read_seat(env: Mapping[str, str]) -> Seat:
    """The seat an environment describes. LOCAL_WORLD_SIZE may be missing (Slurm): then all ranks are on this host.

    Raises:
        MoecError: E0609, a variable is missing or is no number.
    """
    world = env.get("WORLD_SIZE", "")
    wanted = _NUMBERS if world == "1" else _NUMBERS + _ADDRESS
    missing = [name for name in wanted if name not in env]
    wrong = [name for name in (*_NUMBERS, "MASTER_PORT") if not env.get(name, "0").isdecimal()]
    if missing or wrong:
        what = f"{', '.join(missing)} missing" if missing else f"{', '.join(wrong)} is not a number"
        raise fail("E0609", f"this process looks like a rank of torchrun, but of its variables {what}",
                   "start it with torchrun, or unset RANK and WORLD_SIZE")  # fmt: skip
    rank, local = int(env["RANK"]), int(env["LOCAL_RANK"])
    local_world = int(env.get("LOCAL_WORLD_SIZE", world))
    return Seat(rank, int(world), local, local_world, env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", "0")))


def serves_store(seat: Seat) -> bool:
    """Whether this rank serves the store: rank 0 does where torchrun does not."""
    return seat.rank == 0 and not torchrun_serves_store()


def torchrun_serves_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(seat: Seat, may_serve: bool = True) -> Store | None:
    """The store of the run, under a prefix of this attempt; none for a world of one rank.

    Raises:
        MoecError: E0604, rank 0 cannot serve it because the port is taken; E0607, nobody serves it.
    """
    if seat.world == 1:
        return None
    attempt = f"moec/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = TCPStore(
            seat.address,
            seat.port,
            None,
            may_serve and serves_store(seat),
            join_timeout(),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = f"{seat.address}:{seat.port}"
        if "EADDRINUSE" in str(error):
            raise fail("E0604", f"{where} is in use{port_holder(seat.port)}", "choose another MASTER_PORT") from error
        raise fail("E0607", f"rank {seat.rank} finds nobody at {where}", "is rank 0 running there?") from error
    return PrefixStore(attempt, store)
