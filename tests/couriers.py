"""The three functions of CUDA that a courier calls, on plain memory; compiled: its thread knows no Python."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from vvllm_pager.courier import Functions

_SOURCE = """
#include <stdint.h>
#include <string.h>
int fails = 0, put_fails = 0;
void *held = 0;
int copy(uint64_t to, const void *from, size_t n, void *stream) {
    if (fails) return fails;
    memcpy((void *)to, from, n);
    return 0;
}
int put(void *stream, uint64_t at, uint32_t value, unsigned flags) {
    if (put_fails) return put_fails;
    if ((void *)at == held) return 0; /* what is queued does not come to run */
    __atomic_store_n((uint32_t *)at, value, __ATOMIC_RELEASE);
    return 0;
}
int make_current(void *context) { return 0; }
"""


@cache
def library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "fake.c", Path(folder) / "fake.so"
        source.write_text(_SOURCE)
        subprocess.run(
            ["/usr/bin/env", "cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source)], check=True
        )
        return ctypes.CDLL(str(built))


def functions() -> Functions:
    names = ("copy", "put", "make_current")
    copy, write, current = (ctypes.cast(library()[name], ctypes.c_void_p).value or 0 for name in names)
    return Functions(copy, write, current, 0, 0)
