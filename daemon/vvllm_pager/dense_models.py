"""A model without experts refuses `expert_cache`, which would otherwise be ignored: no container, no pager.

vLLM's `LogitsProcessor` stands in for the model: whatever writes text has one. Families build it before or after
their layers (`cohere2_moe.py` before), so what decides is the model's configuration, which is complete by then. A
paged layer that is there already overrules it: a family may name its experts in a way that vLLM does not know.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vvllm_pager.paging import Paging, is_wanted
from vvllm_shared.board import Board
from vvllm_shared.errors import UnsupportedError


class CheckedLogitsProcessor(LogitsProcessor):
    """vLLM's own, after a look at the model that it is built for.

    Raises:
        UnsupportedError: `expert_cache` for a model without experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_dense_model()
        super().__init__(*args, **kwargs)
        # The look was all: from here on this is vLLM's layer in every respect, also for who asks for its type.
        self.__class__ = LogitsProcessor


def _refuse_dense_model() -> None:
    config = get_current_vllm_config()
    model = config.model_config
    if not is_wanted(config) or model is None or model.is_moe or Paging.find(config) is not None:
        return
    error = UnsupportedError(
        f"expert_cache does not work here: {model.architecture} has no experts.",
        "Drop expert_cache from additional_config, or choose a Mixture-of-Experts model.",
    )
    Board.from_env().refuse(error)
    raise error
