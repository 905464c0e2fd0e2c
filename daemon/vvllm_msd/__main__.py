"""`python -m vvllm_msd`."""

import sys

from vvllm_msd.cli import main

# With a spec, multiprocessing would take us for `-m package` and not import this module in the processes that it
# spawns; but they need what vvllm_msd.cli does on import.
__spec__ = None

if __name__ == "__main__":
    sys.exit(main())
