"""Bundles that travel before their layer needs them: asked for by a guess, brought by a courier, taken by *fill*.

While a layer is computed the link is idle. *resolve* asks the next layer's gate about this layer's input, and *fill*
puts the best experts that have no slot there into a mailbox in pinned memory. A native thread lets the copy engine
bring their records into lanes, which leaves the multiprocessors to the layer's own kernels, and the next layer's *fill*
takes what it misses from there. Nothing that was guessed enters a slot or the page table, so a wrong guess costs but
the link's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from vllm.logger import init_logger

from vvllm_pager.courier import Addresses, Courier, CourierError, Functions
from vvllm_pager.guess_kernel import ASK, ENABLED, ROW

if TYPE_CHECKING:
    from vvllm_pager.routed_experts import PagedExperts

log = init_logger("vllm.vvllm_pager")

_LARGEST = 32 << 20
"""Bytes of a record, which travel longer than a layer takes on any link; four have room in VRAM."""
MOST_TOKENS = 16
"""Of a batch that is guessed for: each costs a microsecond, and the misses of many fill the link anyway."""


@dataclass(frozen=True)
class Gate:
    """A layer's router, as far as a guess needs it: a module of vLLM's with its weight [E, H]."""

    module: torch.nn.Module

    @classmethod
    def of(cls, module: Any, layer: PagedExperts) -> Gate | None:
        """None where the gate is not a plain matrix."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return None
        if weight.shape != (layer.experts, layer.hidden_size) or not weight.is_contiguous():
            return None
        return cls(module)

    @property
    def weight(self) -> torch.Tensor:
        """[E, H]."""
        return self.module.weight

    @property
    def correction(self) -> torch.Tensor | None:
        """[E], what is added to the sigmoid of the scores before the best are chosen (DeepSeek-V3 and its heirs)."""
        return getattr(self.module, "e_score_correction_bias", None)


class Foresight:
    """One engine's lanes, mailbox and courier.

    Args:
        gates: of each layer; None where there is none to ask.
        layers: the engine's, with their pools.
        device: the GPU.
    """

    def __init__(
        self, gates: Sequence[Gate | None], layers: Sequence[PagedExperts], device: torch.device
    ) -> None:
        self._gates, self._layers = gates, layers
        self._hidden = layers[0].hidden_size
        lane_bytes = max(layer.layout.record_bytes for layer in layers)
        words = {"dtype": torch.int32, "device": device}
        self.lanes = torch.zeros(2 * ASK.value, lane_bytes // 8, dtype=torch.int64, device=device)
        """[2 ASK, words of a lane], those of even layers first."""
        self.arrived = torch.zeros(2 * ASK.value, **words)
        """int32 [2 ASK], the message that a lane's content was asked for by."""
        self.asked = torch.full((2, ROW.value), -1, **words)
        """int32, by the parity of the layer."""
        self.counters = torch.zeros(4, **words)
        self.counters[ENABLED.value] = 1
        self.scores = torch.zeros(max(layer.experts for layer in layers), dtype=torch.float32, device=device)
        """[E] of the next layer."""
        self.box = torch.zeros(ASK.value + 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        """The mailbox, in pinned memory, and behind it the last message that was served."""
        self.courier: Courier | None = None

    def start(self) -> None:
        """Start the courier.

        Raises:
            CourierError: it cannot run here.
        """
        torch.cuda.synchronize(self.lanes.device)
        self.courier = Courier(Functions.of_cuda(), *self.route())

    def route(self) -> tuple[Addresses, list[tuple[int, int, int]]]:
        """What the courier is given: its addresses, and each layer's records."""
        addresses = Addresses(
            box=self.box.data_ptr(),
            lanes=self.lanes.data_ptr(),
            lane_bytes=self.lanes.stride(0) * 8,
            arrived=self.arrived.data_ptr(),
            enabled=self.counters[ENABLED.value :].data_ptr(),
            words=ASK.value,
        )
        return addresses, [
            (layer.pool.store.data_ptr(), layer.layout.record_bytes, layer.experts) for layer in self._layers
        ]

    def scoring(self, layer: int, x: torch.Tensor) -> dict[str, Any]:
        """What *resolve* is given in a layer's first round; nothing where there is nothing to guess.

        Args:
            x: [T, H], the input of the layer's experts.
        """
        gate = self._gate_after(layer)
        if gate is None or not self._guesses(x):
            return {}
        return {
            "x_p": x,
            "gate_p": gate.weight,
            "correction_p": gate.correction,
            "scores_p": self.scores,
            "H": x.shape[1],
        }

    def asking(self, layer: int, x: torch.Tensor, top_k: int, live: bool) -> dict[str, Any]:
        """What *fill* is given in a layer's last round: as `lanes_of`, and what to ask for the next layer.

        Args:
            x: as in `scoring`.
            top_k: how many experts the next layer is taken to need.
            live: whether this step is a request's.
        """
        given = self.lanes_of(layer)
        if self._gate_after(layer) is None or not self._guesses(x):
            return given
        following = self._layers[layer + 1]
        return given | {
            "scores_p": self.scores,
            "next_slot_of_p": following.pool.table.device["slot_of"],
            "top_k": top_k,
            "live": int(live),
            "NEXT_E": following.experts,
            "NEXT_EP": triton.next_power_of_2(following.experts),
        }

    def lanes_of(self, layer: int) -> dict[str, Any]:
        """What *fill* is given: where bundles of this layer may be, and that nothing is to be asked for."""
        return {
            "lanes_p": self.lanes,
            "lane_words": self.lanes.stride(0),
            "arrived_p": self.arrived,
            "asked_p": self.asked,
            "counters_p": self.counters,
            "box_p": self.box,
            "layer": layer,
        }

    def _gate_after(self, layer: int) -> Gate | None:
        return self._gates[layer + 1] if layer + 1 < len(self._gates) else None

    def _guesses(self, x: torch.Tensor) -> bool:
        return len(x) <= MOST_TOKENS and x.is_contiguous() and x.shape[1] == self._hidden


def look_ahead(
    gates: Sequence[Any], layers: Sequence[PagedExperts], device: torch.device
) -> Foresight | None:
    """A running foresight for these layers, or None with the reason in the log: without it all works, but slower.

    Args:
        gates: vLLM's gate module of each layer, None where the model keeps it elsewhere.
    """
    largest = max(layer.layout.record_bytes for layer in layers)
    if largest > _LARGEST:
        log.info("Bundles are not brought ahead: one of %d MiB does not arrive in time", largest >> 20)
        return None
    usable = [Gate.of(gate, layer) for gate, layer in zip(gates, layers, strict=True)]
    if not any(usable[1:]):
        log.info("Bundles are not brought ahead: no gate of this model is a plain matrix that vLLM shows")
        return None
    foresight = Foresight(usable, layers, device)
    try:
        foresight.start()
    except CourierError as error:
        log.warning("Bundles are not brought ahead: %s", error)
        return None
    return foresight
