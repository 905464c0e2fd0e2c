"""What the daemon may ask of the worker (vLLM's `worker_extension_cls`; called through `collective_rpc`)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.triton_utils import HAS_TRITON

from vvllm_pager.compiles import report_compiles
from vvllm_pager.paging import Paging, describe
from vvllm_pager.routed_experts import PagedExperts
from vvllm_pager.trace import TraceSender
from vvllm_shared.board import Phase
from vvllm_shared.residency import Weights


class PagerWorker:
    """Mixed into vLLM's worker, which runs these between steps, idle or busy."""

    model_runner: Any

    def _paging(self) -> Paging | None:
        for module in self.model_runner.get_model().modules():
            if isinstance(module, PagedExperts) and module.paging is not None:
                return module.paging
        return None

    def pager_report(self) -> dict[str, Any]:
        """Which layers are paged, in what sizes; and which containers are not."""
        paging = self._paging()
        containers = [m for m in self.model_runner.get_model().modules() if isinstance(m, RoutedExperts)]
        return {
            "layers": describe(paging) if paging else [],
            "unpaged": [m.layer_name for m in containers if getattr(m, "paging", None) is None],
            "store_bytes": paging.store.nbytes if paging and paging.store else 0,
        }

    def pager_serve(self, traces: str | None, boot_id: str) -> None:
        """The engine is warm: progress and compiles count from now on, and traces go to this endpoint.

        Args:
            traces: ZeroMQ endpoint of the policy process's PULL socket, or None for no traces.
            boot_id: the daemon's, put into each trace.
        """
        paging = self._paging()
        assert paging is not None  # noqa: S101  # the daemon has read the report
        if traces is not None and paging.host_trace is None:
            experts = max(layer.experts for layer in paging.layers)
            paging.trace_to(TraceSender(traces, boot_id, experts, paging.board))
        if paging.device.type == "cuda" and HAS_TRITON:
            from triton import knobs
            from triton.runtime import jit

            report_compiles(paging.board, knobs.runtime, jit)
        paging.board.set("phase", Phase.SERVING)

    def pager_apply(self, advice: list[dict[str, Any]]) -> int:
        """Apply the policy's advice between steps.

        Args:
            advice: `layer` (index, or -1 for all), `heat_weight`, `age_weight`, `heat_decay`, `bias` (list [E];
                None is zeros). The daemon has checked it. It replaces all earlier advice for its layers.

        Returns:
            How many layers took it.
        """
        paging = self._paging()
        if paging is None:
            return 0
        applied = 0
        for one in advice:
            layers = paging.layers if one["layer"] < 0 else [paging.layers[one["layer"]]]
            weights = Weights(one["heat_weight"], one["age_weight"], one["heat_decay"])
            for layer in layers:
                layer.pool.table.advise(weights, one["bias"])
            applied += len(layers)
        paging.board.add("advice_applied", applied)
        return applied
