"""Device-driven residency: *resolve*, *fill* and the kernel, round by round, without a word to the host.

Everything is queued on the compute stream with shapes that depend on the batch's size alone, so vLLM captures it
in its decode graphs as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton

from vvllm_pager import forward
from vvllm_pager.blocks import Blocks, aligned, on_slots
from vvllm_pager.fill_kernel import fill
from vvllm_pager.kernel import Compute, SlotKernel, launching, stock_launch
from vvllm_pager.resolve_kernel import resolve
from vvllm_pager.ring import Ring
from vvllm_pager.rounds import Launch, Rounds
from vvllm_pager.slot_pool import TILE_BYTES

if TYPE_CHECKING:
    from vvllm_pager.foresight import Foresight
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts

_FILLERS, _FILLER_WARPS = 32, 8
"""Programs of *fill*: with as few as these an H200 reads host memory at its full speed (more gave nothing), they start
soonest where nothing is missing, and a small card keeps multiprocessors for other work."""

_ONE_WARP = 256
"""Experts or pairs that one warp of *resolve* handles sooner than several, which would wait for each other."""


class Scratch:
    """Device memory that the layers of an engine use one after the other.

    Args:
        experts, slots: of the largest layer.
    """

    def __init__(self, experts: int, slots: int, device: torch.device) -> None:
        def words(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.order, self.aligned = words(experts), words(2 * experts)
        self.victims, self.miss_experts, self.miss_slots = words(slots), words(slots), words(slots)
        self.misses = words(1)
        self.ring = Ring(device)
        self.early = starts_early(device)
        self.foresight: Foresight | None = None
        """Once all layers are loaded, where there is any."""


def starts_early(device: torch.device) -> bool:
    """Whether the kernels start while the one before them ends: programmatic dependent launch, from capability 9 on.

    On an H200 it takes 1.2 of the 4.5 us that *resolve* and *fill* add to a layer that misses nothing.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class DeviceResolver:
    """Runs the steps of one layer whose batches are small.

    Args:
        layer: loaded, with its pool.
        kernel: the layer's, on slots.
        paging, scratch: the engine's.
    """

    def __init__(self, layer: PagedExperts, kernel: SlotKernel, paging: Paging, scratch: Scratch) -> None:
        self._layer = layer
        self._kernel = kernel
        self._paging = paging
        self._scratch = scratch

    def run(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """As `HostResolver.run`."""
        layer, kernel = self._layer, self._kernel
        count = self._count(topk_ids.numel())
        rounds = Rounds(self._launches(x, topk_ids, count), count)
        try:
            with stock_launch(layer, x, topk_ids.shape[1]), launching(kernel, rounds):
                return compute(x, topk_weights, topk_ids)
        except BaseException:
            layer.pool.table.forget_contents()  # as in the host's steps
            raise

    def _launches(self, x: torch.Tensor, ids: torch.Tensor, count: int) -> Iterator[Launch]:
        """Each round's launch, once its *resolve* and *fill* are queued."""
        layer, (tokens, top_k) = self._layer, ids.shape
        size = self._kernel.block_size(tokens, top_k, layer.experts)
        # Experts with more rows than a block: which row is in which block shows, and is stock's to say.
        by_expert = aligned(size, ids, layer.experts) if 0 < size < tokens else None
        # Warm-up runs leave no statistics; what a graph captures is replayed for requests.
        live = torch.cuda.is_current_stream_capturing() or not forward.is_warm_up(self._paging.graphs)
        padding, phase = forward.padding_rows(tokens), forward.phase(self._paging.tokens_each)
        for number in range(count):
            own = 0 if by_expert else size
            slots, blocks = self._resolve(ids, padding, number, count, own, live, phase, x)
            if by_expert is not None:
                blocks = on_slots(by_expert, ids, slots, layer.experts)
            self._fill(self._ahead(x, top_k, live) if number == count - 1 else self._ahead())
            yield Launch(slots, blocks)

    def warm_up(self, top_k: int, most: int) -> None:
        """Compile the kernels for every size of batch up to `most` tokens, on rows that are nobody's.

        As most routers call them: with ids of 32 bits and a mask of padding.
        """
        seen = set()
        for tokens in range(1, most + 1):
            pairs = tokens * top_k
            size = self._kernel.block_size(tokens, top_k, self._layer.experts)
            size = size if size >= tokens else 0
            variant = (triton.next_power_of_2(pairs), self._count(pairs), size)
            if variant not in seen:
                seen.add(variant)
                ids = self._scratch.misses.new_full((tokens, top_k), -1)
                padding = torch.ones(tokens, dtype=torch.bool, device=ids.device)
                x = torch.zeros(
                    tokens, self._layer.hidden_size, dtype=self._layer.params_dtype, device=ids.device
                )
                for guessed in (x, None):
                    self._resolve(ids, padding, 0, self._count(pairs), size, False, 0, guessed)
                self._fill(self._ahead())
                self._fill(self._ahead(x, top_k))

    def _count(self, pairs: int) -> int:
        """Rounds of a batch, whatever is routed where."""
        return -(-min(pairs, self._layer.experts) // self._layer.slots)

    def _resolve(
        self,
        ids: torch.Tensor,
        padding: torch.Tensor | None,
        number: int,
        rounds: int,
        block: int,
        live: bool,
        phase: int,
        x: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Blocks | None]:
        layer, scratch, table = self._layer, self._scratch, self._layer.pool.table.device
        scoring: dict[str, Any] = {}
        if scratch.foresight is not None and x is not None and number == 0:
            scoring = scratch.foresight.scoring(layer.index, x)
        pairs, top_k = ids.numel(), ids.shape[1]
        slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
        blocks = Blocks.empty(block, pairs, layer.experts, ids.device) if block else None
        out = (blocks.pairs, blocks.owners, blocks.filled) if blocks else (slots, slots, slots)
        resolve[(1 + (len(scoring["gate_p"]) if scoring else 0),)](
            ids,
            slots if padding is None else padding.view(torch.uint8),
            table["last_used"].view(torch.int64),
            *(
                table[name]
                for name in ("heat", "bias", "weights", "clock", "counted", "slot_of", "expert_in")
            ),
            *(scratch.order, scratch.victims, scratch.aligned),
            *(scratch.miss_experts, scratch.miss_slots, scratch.misses),
            slots,
            *out,
            *(scratch.ring.words, scratch.ring.head),
            *(pairs, top_k, number, int(live), layer.index, phase),
            E=layer.experts,
            S=layer.slots,
            EP=triton.next_power_of_2(layer.experts),
            SP=triton.next_power_of_2(layer.slots),
            NP=triton.next_power_of_2(pairs),
            ROUNDS=rounds,
            MASKED=padding is not None,
            BLOCK=block,
            ENTRIES=scratch.ring.entries,
            RING_IDS=scratch.ring.ids,
            EARLY=scratch.early,
            **scoring,
            launch_pdl=scratch.early,
            num_warps=1 if max(layer.experts, pairs) <= _ONE_WARP else 8,
        )
        return slots, blocks

    def _ahead(self, x: torch.Tensor | None = None, top_k: int = 0, live: bool = False) -> dict[str, Any]:
        """What *fill* is told of bundles that travel ahead; with x, of those that are to be asked for too."""
        foresight, index = self._scratch.foresight, self._layer.index
        if foresight is None:
            return {}
        return foresight.lanes_of(index) if x is None else foresight.asking(index, x, top_k, live)

    def _fill(self, ahead: dict[str, Any] | None = None) -> None:
        pool, scratch = self._layer.pool, self._scratch
        fill[(_FILLERS,)](
            pool.store_words,
            pool.store_words.shape[1],
            pool.tiles,
            len(pool.tiles),
            *(scratch.miss_experts, scratch.miss_slots, scratch.misses),
            TILE=TILE_BYTES // 8,
            EARLY=scratch.early,
            **(ahead or {}),
            launch_pdl=scratch.early,
            num_warps=_FILLER_WARPS,
        )
