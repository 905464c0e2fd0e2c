"""What `speed.py` measured, as rows that compare the engines with each other and with what the link allows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jobs import Decode, Measured, Played, Prefill

MIB = 2**20


@dataclass(frozen=True)
class Engines:
    """The engines of one run."""

    stock: Measured
    paged: Measured
    offload: Measured | None = None
    """vLLM's own `cpu_offload_gb`, at the VRAM of `paged`."""
    slow: Measured | None = None
    """Paged, with *fill* slowed down."""


@dataclass(frozen=True)
class DecodeRow:
    """One trace: milliseconds a step, of the CUDA graph where there is one, else of `LLM.generate`."""

    batch: int
    captured: bool
    hit_rate: float
    """Counted by the pager: distinct experts of a layer's step."""
    misses: float
    """A step, of all layers."""
    missed_mib: float
    link_gbps: float
    """What the bounds take: the copy engine's speed at 256 MiB, or the slowed *fill*'s."""
    stock_ms: float
    paged_ms: float
    spread_ms: float
    """Of the paged engine's repeats."""
    offload_ms: float | None
    serial_ms: float
    """stock + missed bytes / link: paging that hides nothing can do no better."""
    overlapped_ms: float
    """max(stock, missed bytes / link): nothing can."""
    tokens_per_s: float
    """Of the paged engine's `LLM.generate`."""
    stock_tokens_per_s: float
    predictability: float | None = None
    """Of the guesses by which bundles were brought ahead; None where none were."""
    brought_mib: float = 0.0
    """A step."""
    used: float = 0.0
    """The share of the missed bundles that had been brought ahead."""

    @property
    def by_serial(self) -> float:
        return self.paged_ms / self.serial_ms

    @property
    def by_overlapped(self) -> float:
        return self.paged_ms / self.overlapped_ms

    @property
    def share(self) -> float:
        """Of the speed with all experts in VRAM."""
        return self.stock_ms / self.paged_ms


@dataclass(frozen=True)
class PrefillRow:
    """One prompt: milliseconds to its first token."""

    tokens: int
    chunk: int
    stock_ms: float
    paged_ms: float
    offload_ms: float | None
    paged_mib: float
    sweeps: float
    """How often the experts that have no slot were loaded."""
    bound_ms: float
    """max(stock, one sweep for each chunk)."""
    activation_slots: float
    """Slots of one layer, in all layers, that the step's activations cost."""

    @property
    def by_bound(self) -> float:
        return self.paged_ms / self.bound_ms


def decode_rows(engines: Engines, traces: Sequence[Played], *, slow: bool = False) -> list[DecodeRow]:
    """A row for each trace; `slow`: of the slowed engine."""
    paged = engines.slow if slow else engines.paged
    assert paged is not None
    link = paged.fill_gbps if slow else paged.link_gbps["256"]
    # What is guessed is nothing to the other engines.
    alone = [trace.path for trace in traces if trace.guesses is None]
    stock = dict(zip(alone, engines.stock.decode, strict=True))
    offloads = dict(zip(alone, engines.offload.decode, strict=True)) if engines.offload else {}
    return [
        _decode_row(trace, link, paged.bundle_bytes, stock[trace.path], one, offloads.get(trace.path))
        for trace, one in zip(traces, paged.decode, strict=True)
    ]


def _decode_row(
    trace: Played, link: float, bundle: int, stock: Decode, paged: Decode, offload: Decode | None
) -> DecodeRow:
    # Where only stock has a graph, the two are compared by what a user sees of both.
    captured = bool(paged.graph_ms)
    stock_ms = _step_ms(stock, captured)
    missed = paged.misses / paged.steps * bundle
    loading_ms = missed / link / 1e6
    return DecodeRow(
        trace.batch,
        captured,
        paged.hits / max(paged.hits + paged.misses, 1),
        paged.misses / paged.steps,
        missed / MIB,
        link,
        stock_ms,
        _step_ms(paged, captured),
        max(paged.graph_ms) - min(paged.graph_ms) if captured else 0.0,
        None if offload is None else _step_ms(offload, captured),
        stock_ms + loading_ms,
        max(stock_ms, loading_ms),
        1e3 * trace.batch / paged.generate_ms,
        1e3 * trace.batch / stock.generate_ms,
        trace.predictability,
        paged.brought / paged.steps * bundle / MIB,
        paged.used / max(paged.misses, 1),
    )


def _step_ms(decode: Decode, captured: bool) -> float:
    return statistics.median(decode.graph_ms) if captured else decode.generate_ms


def prefill_rows(engines: Engines, layers: int, experts: int, slots: int) -> list[PrefillRow]:
    """A row for each prompt and chunk."""
    paged, bundle = engines.paged, engines.paged.bundle_bytes
    outside = layers * (experts - slots) * bundle
    offloads = engines.offload.prefill if engines.offload else [None] * len(paged.prefill)

    def row(stock: Prefill, one: Prefill, offload: Prefill | None) -> PrefillRow:
        sweep_ms = outside / paged.link_gbps["256"] / 1e6
        stock_ms = statistics.median(stock.ms)
        return PrefillRow(
            one.tokens,
            one.chunk,
            stock_ms,
            statistics.median(one.ms),
            None if offload is None else statistics.median(offload.ms),
            one.paged_bytes / MIB,
            one.paged_bytes / max(outside, 1),
            max(stock_ms, sweep_ms * -(-one.tokens // one.chunk)),
            one.activation_bytes / (layers * bundle),
        )

    return [row(*three) for three in zip(engines.stock.prefill, paged.prefill, offloads, strict=True)]


def decode_table(rows: Sequence[DecodeRow]) -> str:
    """For a terminal or a README."""
    head = "batch   hits  guess  brought MiB   used  missed MiB   stock ms   paged ms       ±"
    head += "  serial ms  /serial  overlap ms  /overlap   share"
    head += "   paged tok/s   stock tok/s   offload ms"
    lines = [
        f"{row.batch:5}{row.hit_rate:7.3f}{_or_dash(row.predictability):>7}{row.brought_mib:13.1f}{row.used:7.2f}"
        f"{row.missed_mib:12.1f}{row.stock_ms:11.3f}{row.paged_ms:11.3f}"
        f"{row.spread_ms:8.3f}{row.serial_ms:11.3f}{row.by_serial:9.3f}{row.overlapped_ms:12.3f}"
        f"{row.by_overlapped:10.3f}{row.share:8.3f}{row.tokens_per_s:14.1f}{row.stock_tokens_per_s:14.1f}"
        f"{_or_dash(row.offload_ms):>13}{'' if row.captured else '  no graph: times of LLM.generate'}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def prefill_table(rows: Sequence[PrefillRow]) -> str:
    """For a terminal or a README."""
    head = "tokens  chunk   stock ms   paged ms   bound ms   /bound  paged MiB  sweeps  chunk's slots   offload ms"
    lines = [
        f"{row.tokens:6}{row.chunk:7}{row.stock_ms:11.1f}{row.paged_ms:11.1f}{row.bound_ms:11.1f}{row.by_bound:9.3f}"
        f"{row.paged_mib:11.0f}{row.sweeps:8.2f}{row.activation_slots:15.1f}{_or_dash(row.offload_ms):>13}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def _or_dash(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"
