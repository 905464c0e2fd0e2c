"""The Triton kernels of device-driven paging, compiled, on a real GPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

# The tests themselves.
from cut_checks import *  # noqa: F403
from foresight_checks import *  # noqa: F403
from kernel_checks import *  # noqa: F403
from launch_checks import *  # noqa: F403
from layer_checks import *  # noqa: F403

pytestmark = pytest.mark.gpu
