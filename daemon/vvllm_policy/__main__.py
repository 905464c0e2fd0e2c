"""`python -m vvllm_policy`: how the daemon starts this process."""

import sys

from vvllm_policy.cli import main

sys.exit(main())
