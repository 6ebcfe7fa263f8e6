"""Builds C++ kernels with the system's compiler, once: the library is kept by the content that made it.

1. The name of a kept library is a digest of its text, the compiler, its options and the processor; its last 32 bytes
   are the digest of the rest, so a file that is cut short or damaged is known and built anew.
2. A library is written beside its place and takes its name when it is whole, so processes may build at once.
3. Where nothing can be kept, it is built in a folder that is gone once the library is loaded.

Loading one starts no thread, so it is built and loaded before ranks are forked, and they find it loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from moec.diagnostics import MoecError, fail, printable
from moec.files import cache_folder, write_whole

FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")
#: A build that takes longer than this is given up: torch's kernels can do without it.
PATIENCE_SECONDS = 300
_DIGEST_BYTES = 32


@functools.cache
def load(source: str) -> ctypes.CDLL:
    """The library of a text. Raises E0540 where there is no compiler, E0541 where it fails, E0542 for what it made."""
    compiler = find_compiler()
    try:
        return _load(source, compiler)
    except OSError as error:  # no program at its place, no folder to work in, a compiler that made nothing
        raise _cannot_build(compiler, str(error)) from error


def _load(source: str, compiler: tuple[str, ...]) -> ctypes.CDLL:
    place = library_folder() / f"{_key(source, compiler)}.so"
    if (found := _open_kept(place)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="moec-") as made:
        built = Path(made) / "kernels.so"
        _compile(source, compiler, built)
        content = built.read_bytes()
        content += hashlib.sha256(content).digest()
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(place, content)
        except (MoecError, OSError):
            place = built
        return _open(place)


def library_folder() -> Path:
    """Where libraries are kept."""
    return cache_folder() / "cpp"


def find_compiler() -> tuple[str, ...]:
    """Command of the C++ compiler: CXX, else c++. Raises E0540."""
    try:
        command = shlex.split(os.environ.get("CXX") or "c++")
    except ValueError:  # a quotation without an end
        command = [os.environ["CXX"]]
    found = shutil.which(command[0]) if command else None
    if found is None:
        raise fail(
            "E0540", f"there is no C++ compiler `{' '.join(command)}`", "install one (g++ or clang++), or set CXX to it"
        )
    return found, *command[1:]


def _open_kept(place: Path) -> ctypes.CDLL | None:
    """The library at `place` if it is whole."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return _open(place) if hashlib.sha256(body).digest() == digest else None


def _open(place: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(place))
    except OSError as error:
        raise fail("E0542", f"the C++ kernels cannot be loaded: {error}", f"remove `{library_folder()}`") from error


def _compile(source: str, compiler: tuple[str, ...], built: Path) -> None:
    text = built.with_suffix(".cpp")
    text.write_text(source)
    if said := _run([*compiler, *FLAGS, str(text), "-o", str(built)]):
        first = next((line.strip() for line in said.splitlines() if "error" in line), said.strip().partition("\n")[0])
        raise _cannot_build(compiler, first)


def _cannot_build(compiler: tuple[str, ...], why: str) -> MoecError:
    message = f"`{compiler[0]}` cannot build the C++ kernels: {printable(why)[:200]}"
    return fail("E0541", message, "`--kernels torch` needs none")


def _run(command: list[str]) -> str:
    """What a command said when it failed; nothing where it did not."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", process_group=0
    ) as started:
        try:
            _, said = started.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # the compiler proper is a child of the command
            return f"error: it took longer than {PATIENCE_SECONDS} s"
    return "" if started.returncode == 0 else said or f"error: status {started.returncode}"


def _key(source: str, compiler: tuple[str, ...]) -> str:
    """Digest of everything that the machine code depends on."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace").stdout
    parts = [source, *compiler, version, *FLAGS, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What `-march=native` looks at: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name", "cpu family"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])
