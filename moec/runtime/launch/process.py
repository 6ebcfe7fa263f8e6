"""Processes of this host as /proc has them: who they are, whether they live, and who holds a port."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A process: its host, its pid there, and when it started (in ticks), since pids are used again."""

    host: str = ""
    pid: int = 0
    started: int = 0

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started}"

    @staticmethod
    def own() -> Identity:
        return Identity(socket.gethostname(), os.getpid(), start_time(os.getpid()))

    @staticmethod
    def parse(text: str) -> Identity:
        host, pid, started = text.split(" ")
        return Identity(host, int(pid), int(started))


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True  # not ours, or no /proc


def start_time(pid: int) -> int:
    """Ticks from the machine's start to that of a process; 0 when unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def port_holder(port: int) -> str:
    """` by pid N` for the process of this user that listens on a TCP port, or the empty string."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in inodes:
                return f" by pid {descriptor.parts[2]}"
        except OSError:
            continue  # the process is gone, or not ours to look at
    return ""
