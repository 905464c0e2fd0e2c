"""The vLLM plugin that pages experts between host RAM and slots in VRAM.

This module imports nothing heavy: vLLM only logs a plugin that fails to *import*, and would go on with its own
layers. What can fail, fails in `register`, which vLLM calls without a net.
"""


def register() -> None:
    """Replace vLLM's expert containers by ours (entry point of `vllm.general_plugins`)."""
    from vvllm_pager.plugin import register_layers

    register_layers()
