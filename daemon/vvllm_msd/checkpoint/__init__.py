"""Whether a model directory is whole, found out before an engine is started.

vLLM loads a damaged Mixture-of-Experts checkpoint without a word in many cases: its check is per parameter, and all
experts of a layer are one parameter. So every tensor is accounted for here, expert by expert, from the headers of
the files; no tensor's data is read and nothing in the directory is executed.
"""

from vvllm_msd.checkpoint.validation import Checkpoint, validate

__all__ = ["Checkpoint", "validate"]
