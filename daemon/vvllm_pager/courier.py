"""The native thread of `courier.c`: compiled when an engine starts, as Triton compiles its own launchers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vvllm_pager.driver import cuda

_SOURCE = Path(__file__).with_name("courier.c")
_WORD = ctypes.c_uint64


class CourierError(Exception):
    """There is no courier on this machine; the text says why."""


@dataclass(frozen=True)
class Functions:
    """Addresses of cuMemcpyHtoDAsync, cuStreamWriteValue32 and cuCtxSetCurrent, and the context and stream to use."""

    copy: int
    write: int
    make_current: int
    context: int
    stream: int

    synchronize: Callable[[], None] = lambda: None
    """Waits for what is queued on the stream."""

    @classmethod
    def of_cuda(cls) -> Functions:
        """CUDA's own, in the calling thread's context, with a stream that nobody else has.

        Raises:
            CourierError: there is no driver, it is too old, or no context is current.
        """
        names = ("cuMemcpyHtoDAsync_v2", "cuStreamWriteValue32_v2", "cuCtxSetCurrent")
        try:
            found = [ctypes.cast(cuda()[name], ctypes.c_void_p).value or 0 for name in names]
        except (AttributeError, OSError) as error:
            raise CourierError(f"the CUDA driver is missing or too old: {error}") from error
        context = ctypes.c_void_p()
        if cuda().cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
            raise CourierError("no CUDA context is current")
        copy, write, make_current = found
        stream = ctypes.c_void_p()
        if cuda().cuStreamCreate(ctypes.byref(stream), 1) or not stream.value:  # CU_STREAM_NON_BLOCKING
            raise CourierError("CUDA gives no stream")
        own = ctypes.c_void_p(stream.value)
        return cls(
            copy,
            write,
            make_current,
            context.value,
            stream.value,
            lambda: cuda().cuStreamSynchronize(own),
        )


@dataclass(frozen=True)
class Addresses:
    """What the courier reads and writes; see `struct route`."""

    box: int
    lanes: int
    lane_bytes: int
    arrived: int
    enabled: int
    words: int


class _Layer(ctypes.Structure):
    _fields_ = (("store", _WORD), ("record_bytes", _WORD), ("experts", _WORD))


class _Route(ctypes.Structure):
    _fields_ = tuple(
        (name, _WORD)
        for name in (
            *("copy", "write", "make_current", "context", "stream", "box", "layers", "layer_count"),
            *("lanes", "lane_bytes", "arrived", "enabled", "words"),
        )
    )


class Courier:
    """A running thread. Memory that it is given must outlive it.

    Args:
        functions: how to copy.
        addresses: where from and to.
        layers: (address of the records, bytes of a record, records) of each layer.

    Raises:
        CourierError: it cannot be compiled or started.
    """

    def __init__(
        self, functions: Functions, addresses: Addresses, layers: Sequence[tuple[int, int, int]]
    ) -> None:
        self._library = _compile()
        self._library.courier_start.restype = ctypes.c_void_p
        self._library.courier_brought.restype = _WORD
        self._library.courier_used.restype = ctypes.c_uint32
        self._layers = (_Layer * len(layers))(*(_Layer(*layer) for layer in layers))
        route = _Route(layers=ctypes.addressof(self._layers), layer_count=len(layers))
        for name, value in (vars(functions) | vars(addresses)).items():
            if name != "synchronize":
                setattr(route, name, value)
        self._synchronize = functions.synchronize
        started = self._library.courier_start(ctypes.byref(route))
        if not started:
            raise CourierError("no thread could be started")
        self._thread = ctypes.c_void_p(started)
        self._stopped = False

    @property
    def brought(self) -> int:
        """Bundles so far."""
        return int(self._library.courier_brought(self._thread))

    @property
    def used(self) -> int:
        """How many of them had been wanted when the last message was posted."""
        return int(self._library.courier_used(self._thread))

    @property
    def error(self) -> int:
        """What CUDA said when the thread gave up; 0 while it runs."""
        return int(self._library.courier_error(self._thread))

    def stop(self) -> None:
        """End the thread, and wait for what it has queued."""
        if not self._stopped:
            self._stopped = True
            self._library.courier_stop(self._thread)
            self._synchronize()


def _compile() -> ctypes.CDLL:
    """With $CC, gcc or clang, as Triton chooses (triton/runtime/build.py), which needs one too."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CourierError("there is no C compiler")
    with tempfile.TemporaryDirectory(prefix="vvllm-courier-") as folder:
        library = str(Path(folder) / "courier.so")
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", library, str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            return ctypes.CDLL(library)
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            raise CourierError(
                f"{compiler} could not compile {_SOURCE.name}: {told.strip()[:500]}"
            ) from error
