"""A child that cannot outlive its parent: PR_SET_PDEATHSIG, then a look whether the parent is still there."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends, and end now if it already has.

    The kernel forgets the request on a fork, so every process asks for itself; it follows the parent *thread*
    that forked, so a parent must start such children from a thread that lives as long as itself.

    Args:
        parent: the pid that must still be the parent; None takes the parent as it is now.
    """
    expected = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended between the fork and the call above.
    if os.getppid() != expected:
        os._exit(1)
