"""A directory for a command's large files. Should the command be killed, its next run removes what is left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_LOCK = "lock"


def cache_directory() -> Path:
    """Where this user's programs keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vvllm-ms"


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """A new directory `prefix`* in the cache directory, for the `with` block.

    A lock in it says that its process lives; the kernel drops the lock with the process. Directories of that prefix
    that nobody has locked are removed first. A lock on all of them keeps others from seeing a new one unlocked.
    """
    base = cache_directory()
    base.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with _locked(base / f"{prefix}lock", fcntl.LOCK_EX):
            _remove_leftovers(base, prefix)
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            stack.enter_context(_locked(made / _LOCK, fcntl.LOCK_EX))
            # As long as the lock is held; where another run takes a part of the work, that is not an error.
            stack.callback(shutil.rmtree, made, ignore_errors=True)
        yield made


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _remove_leftovers(base: Path, prefix: str) -> None:
    for directory in base.glob(f"{prefix}*/"):
        try:
            with _locked(directory / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # its process lives, or it has just removed it
            continue
