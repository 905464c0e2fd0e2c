"""CUDA's driver, where torch's way to it is too slow or does not exist."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


@cache
def cuda() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        OSError: there is none.
    """
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyHtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    return library


def copy_to_device(
    target: torch.Tensor, target_at: int, source: torch.Tensor, source_at: int, nbytes: int
) -> None:
    """Queue a copy on the current stream, in a tenth of the time that torch takes to see what is to be copied.

    Args:
        target: contiguous, on the device. source: contiguous, in pinned memory.
        target_at, source_at: bytes from where they begin.

    Raises:
        RuntimeError: CUDA refuses.
    """
    if not target.is_cuda:  # where tests run without a GPU
        piece = source.view(-1).view(torch.uint8)[source_at : source_at + nbytes]
        target.view(-1).view(torch.uint8)[target_at : target_at + nbytes].copy_(piece)
        return
    stream = torch.cuda.current_stream(target.device).cuda_stream
    to, origin = target.data_ptr() + target_at, source.data_ptr() + source_at
    if code := cuda().cuMemcpyHtoDAsync_v2(to, origin, nbytes, stream):
        raise RuntimeError(f"cuMemcpyHtoDAsync of {nbytes} bytes failed with error {code}")
