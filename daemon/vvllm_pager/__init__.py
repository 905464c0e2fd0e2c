"""The vLLM plugin that pages experts between host RAM and slots in VRAM.

This module imports nothing heavy: vLLM only logs a plugin that fails to *import*, and would go on with its own
layers. What can fail, fails in `register`, which vLLM calls without a net.
"""


def register() -> None:
    """Replace vLLM's expert containers by ours (entry point of `vllm.general_plugins`)."""
    try:
        from vvllm_pager.plugin import register_layers
    except ImportError as error:
        from vvllm_shared import PINNED_VLLM
        from vvllm_shared.errors import UnsupportedError

        raise UnsupportedError(
            f"vvllm-ms does not fit the installed vLLM: {error}.",
            f"Install vllm=={PINNED_VLLM}, uninstall vvllm-ms, or set VLLM_PLUGINS to the plugins that you want.",
        ) from error
    register_layers()
