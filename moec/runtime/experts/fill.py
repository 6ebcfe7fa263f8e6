"""Writing an expert file: once, whole or not at all, by one process at a time.

1. A file of the wanted name that is whole is taken as it is.
2. Otherwise `.NAME.partial` is locked. Whoever finds it locked waits and takes what its holder made. The kernel lifts
   the lock of a process that dies, so what one left is found unlocked: it is taken over, or removed as another's.
3. All of its space is claimed before the first expert is read, so that a full disk is told at once.
4. Blobs, then the head with their digests, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from moec.diagnostics import Diagnostic, MoecError, fail
from moec.runtime.experts.file import Contents, ExpertFile, FileFault, Key, seal

#: Writes the blob of an expert into a tensor (uint8 [blob bytes], host memory), from the checkpoint.
ReadExpert = Callable[[Key, Tensor], None]
#: Bytes written so far, and of all.
Progress = Callable[[int, int], None]
#: Takes what the user is to know although the run goes on.
Warn = Callable[[Diagnostic], None]

_LOCK_POLL_SECONDS = 0.05
#: After a second of waiting for another process, the user is told.
_TELL_AFTER_POLLS = 20
#: No space, or none for this user.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: File systems that cannot claim space in advance say one of these.
_CANNOT_CLAIM = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def open_expert_file(
    folder: Path, contents: Contents, read: ReadExpert, warn: Warn, progress: Progress | None = None
) -> ExpertFile:
    """The file of `contents` in `folder`, written from `read` unless it is there.

    A file that is damaged is written again, and then told of (E0642). `progress` is called while another process writes
    the file, too; that this one waits is told as well (E0648).

    Raises:
        MoecError: E0640, there is no such folder; E0641, the file cannot be written (the disk is full, or it may not
            be); what `read` raises. Nothing is left behind.
    """
    if not folder.is_dir():
        message = f"the folder for experts `{folder}` {'is no folder' if folder.exists() else 'does not exist'}"
        raise fail("E0640", message, "create it, or name another one at `nvme`")
    path, damage = folder / contents.file_name, ""
    try:
        return ExpertFile(path, contents)
    except FileNotFoundError:
        pass
    except FileFault as fault:
        damage = str(fault)
    try:
        file = _written(path, contents, read, warn, progress or (lambda done, total: None))
    except OSError as error:
        raise _cannot_write(path, contents.file_bytes, error) from error
    if damage:
        warn(Diagnostic("E0642", f"the expert file `{path}` {damage}", help="it was written again"))
    return file


def _written(path: Path, contents: Contents, read: ReadExpert, warn: Warn, tick: Progress) -> ExpertFile:
    partial = path.with_name(f".{path.name}.partial")
    _sweep(path.parent, partial)
    waits = Diagnostic("E0648", f"another process writes the expert file `{path}`", help="this one waits for it")
    with _only_writer(partial, lambda: tick(0, contents.file_bytes), lambda: warn(waits)) as descriptor:
        try:
            return ExpertFile(path, contents)  # made by the process that held the lock
        except (FileNotFoundError, FileFault):
            pass
        _claim_space(descriptor, contents.file_bytes)
        _write_blobs(descriptor, contents, read, tick)
        os.fsync(descriptor)
        os.replace(partial, path)
        _sync_folder(path.parent)
    try:
        return ExpertFile(path, contents)
    except FileFault as fault:
        raise OSError(errno.EIO, f"once written, it {fault}") from fault


def _write_blobs(descriptor: int, contents: Contents, read: ReadExpert, tick: Progress) -> None:
    digests: list[bytes] = []
    largest = max((len(place) for place in contents.places.values()), default=0)
    buffer = torch.empty(largest, dtype=torch.uint8)
    for key, place in contents.places.items():
        blob = buffer[: len(place)]
        read(key, blob)
        view = blob.numpy().data
        digests.append(xxh3_128_digest(view))
        _write(descriptor, view, place.start)
        tick(place.stop, contents.file_bytes)
    _write(descriptor, memoryview(seal(contents, digests)), 0)


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def _claim_space(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, 0)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_CLAIM:
            raise


@contextmanager
def _only_writer(partial: Path, tick: Callable[[], None], tell: Callable[[], None]) -> Iterator[int]:
    """Hold the lock of `partial`, made if need be, and give its descriptor. It is gone afterwards.

    Calls `tick` while another process has it, and `tell` once that has taken long.
    """
    num_polls = 0
    while (descriptor := _lock(partial)) is None:
        tick()
        num_polls += 1
        if num_polls == _TELL_AFTER_POLLS:
            tell()
        time.sleep(_LOCK_POLL_SECONDS)
    try:
        yield descriptor
    finally:
        if _is_at(partial, descriptor):
            partial.unlink()
        os.close(descriptor)


def _lock(partial: Path) -> int | None:
    """The descriptor of `partial` once it is locked; None while another process has it."""
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(partial, descriptor):  # else its holder has renamed or removed it in between
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sweep(folder: Path, mine: Path) -> None:
    """Remove what processes left that died while they wrote: partial files that nobody has locked."""
    for left in folder.glob(".experts-*.moec.partial"):
        if left != mine:
            with suppress(OSError):  # not ours to remove
                _remove_unlocked(left)


def _remove_unlocked(partial: Path) -> None:
    if (descriptor := _lock(partial)) is not None:
        try:
            partial.unlink()
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Have the name outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, needed: int, error: OSError) -> MoecError:
    if error.errno not in _FULL:
        message = f"the expert file `{path}` cannot be written: {error.strerror or error}"
        return fail("E0641", message, "make its folder writable, or name another one at `nvme`")
    try:
        disk = os.statvfs(path.parent)
        free = f"{disk.f_bavail * disk.f_frsize} are free"
    except OSError:
        free = "fewer are free"
    message = f"no space for the expert file `{path}`: {needed} bytes are needed, {free}"
    return fail("E0641", message, "free space, or name another folder at `nvme`")
