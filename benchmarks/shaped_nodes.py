"""Network namespaces of one machine, as the nodes of a cluster: made, entered, configured and read.

A namespace has no name here. It lives by the descriptors that are open on it and the processes inside it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
_SYSCTLS = {
    "net/ipv6/conf/all/disable_ipv6": "1",  # neighbour discovery would be counted
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
}


class ClusterError(Exception):
    """The cluster cannot be set up here, or a rank failed. The first line says it all."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node's link has carried since it was set up, headers included."""

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


def unavailable() -> str | None:
    """Why no shaped cluster can run on this machine, in one line; None where it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"`{missing[0]}` is not installed: install the package iproute2"
    try:
        os.close(new_namespace())
    except OSError as error:
        return f"this root may not make network namespaces ({error.strerror}): is it in a container?"
    return None


def traffic(device: str = "eth0") -> Traffic:
    """What a network device of the calling thread's namespace has carried: in a rank, the link of its node."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == device:
            received, sent = (int(numbers.split()[i]) for i in (0, 8))
            return Traffic(sent, received)
    raise ClusterError(f"there is no network device {device} here")


def configure(namespace: int, ip_lines: Sequence[str], tc_lines: Sequence[str]) -> None:
    """Settings, then `ip` and `tc` commands, inside a namespace."""
    with entered(namespace):
        for name, value in _SYSCTLS.items():
            setting = Path("/proc/sys", name)
            if setting.exists():  # a kernel without IPv6 has nothing to switch off
                setting.write_text(value)
        for tool, lines in (("ip", ip_lines), ("tc", tc_lines)):
            done = subprocess.run([tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
            if done.returncode:
                raise ClusterError(f"`{tool}` failed: {' '.join((done.stderr or done.stdout).split())}")


def new_namespace() -> int:
    """A descriptor of a fresh network namespace, which exists as long as it is open somewhere or a process is in it."""
    with _returning():
        _call("unshare", _CLONE_NEWNET)
        return os.open(_OWN_NAMESPACE, os.O_RDONLY)


@contextmanager
def entered(namespace: int) -> Iterator[None]:
    """Have this thread be in a namespace for a while."""
    with _returning():
        set_namespace(namespace)
        yield


@contextmanager
def _returning() -> Iterator[None]:
    home = os.open(_OWN_NAMESPACE, os.O_RDONLY)
    try:
        yield
    finally:
        set_namespace(home)
        os.close(home)


def set_namespace(namespace: int) -> None:
    _call("setns", namespace, _CLONE_NEWNET)


def _call(function: str, *args: int) -> None:
    """Call the C library: `os.setns` and `os.unshare` came with Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
