"""The Triton kernels of device-driven paging, compiled, on a real GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
if not __import__("torch").cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from kernel_checks import *  # noqa: F403  # the tests themselves

pytestmark = pytest.mark.gpu
