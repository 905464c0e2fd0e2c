"""What the GPU holds, by NVML: all processes, contexts and libraries included."""

from __future__ import annotations

import os
import threading
import time


class Sampler(threading.Thread):
    """Bytes in use beyond those at its start, now and at most since the last `reset`; sampled every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self._device = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        self._used = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(self._device).used)
        self._idle = self._used()
        self._highest = 0
        self.start()

    def now(self) -> int:
        """Bytes."""
        return self._used() - self._idle

    def run(self) -> None:
        """See `threading.Thread`."""
        while True:
            self._highest = max(self._highest, self.now())
            time.sleep(0.01)

    def reset(self) -> int:
        """The most so far, in bytes; begins anew."""
        highest, self._highest = self._highest, self.now()
        return highest
