"""What the benchmarks' tables say follows from what was measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import plots
import pytest
from jobs import Decode, Measured, Played, Prefill
from rows import Engines, decode_rows, decode_table, prefill_rows, prefill_table

MIB = 2**20
TRACES = [Played("one.npy", 1, 64), Played("many.npy", 32, 64)]


def decode(graph_ms: list[float], generate_ms: float, hits: int = 0, misses: int = 0) -> Decode:
    return Decode(graph_ms, generate_ms, hits, misses, 100, [])


def engine(decodes: list[Decode], prefill: Prefill) -> Measured:
    return Measured("card", "runner", "kernel", 8.0, 9.0, 20.0, decode=decodes, prefill=[prefill])


STOCK = engine(
    [decode([4.0, 4.1, 3.9], 4.5), decode([6.0], 6.5)], Prefill(2048, 1024, [90, 100, 110], 0, 7 * MIB)
)
PAGED = replace(
    engine(
        [decode([6.0, 6.1, 5.9], 6.6, 850, 150), decode([], 50.0, 500, 500)],
        Prefill(2048, 1024, [220, 230, 240], 96 * 2 * 10 * MIB, 40 * MIB),
    ),
    bundle_bytes=10 * MIB,
    link_gbps={"256": 10 * MIB / 1e6},  # a bundle a millisecond
    fill_gbps=5 * MIB / 1e6,
)


def test_bounds_of_decode() -> None:
    one, many = decode_rows(Engines(STOCK, PAGED), TRACES)
    assert (one.hit_rate, one.misses, one.missed_mib) == (0.85, 1.5, 15)
    assert (one.stock_ms, one.paged_ms) == (4.0, 6.0)
    assert one.spread_ms == pytest.approx(0.2)
    assert one.serial_ms == pytest.approx(5.5)
    assert one.overlapped_ms == pytest.approx(4.0)
    assert one.share == pytest.approx(2 / 3)
    assert one.by_serial == pytest.approx(6 / 5.5)
    # Paged had no graph for this batch: compared is what a user sees of both.
    assert not many.captured
    assert (many.stock_ms, many.paged_ms) == (6.5, 50.0)
    assert many.tokens_per_s == pytest.approx(640)
    assert "no graph" in decode_table([one, many]).splitlines()[2]


def test_a_trace_played_with_guesses_is_held_against_stock_without() -> None:
    guessed = replace(TRACES[0], predictability=0.9, guesses="guesses.npy")
    ahead = replace(PAGED.decode[0], graph_ms=[5.0], brought=200, used=120)
    paged = replace(PAGED, decode=[*PAGED.decode, ahead])
    row = decode_rows(Engines(STOCK, paged), [*TRACES, guessed])[2]
    assert (row.stock_ms, row.paged_ms, row.predictability) == (4.0, 5.0, 0.9)
    assert (row.brought_mib, row.used) == (20.0, 0.8)
    assert "0.900" in decode_table([row])


def test_a_slowed_link_moves_the_bounds() -> None:
    one = decode_rows(Engines(STOCK, PAGED, slow=PAGED), TRACES, slow=True)[0]
    assert one.serial_ms == pytest.approx(4 + 3)


def test_bound_of_prefill_is_a_sweep_for_each_chunk() -> None:
    row = prefill_rows(Engines(STOCK, PAGED), layers=1, experts=128, slots=32)[0]
    assert (row.stock_ms, row.paged_ms, row.sweeps) == (100, 230, 2.0)
    assert row.bound_ms == pytest.approx(2 * 96)
    assert row.activation_slots == pytest.approx(4.0)
    assert len(prefill_table([row]).splitlines()) == 2


def test_plots(tmp_path: Path) -> None:
    engines = Engines(STOCK, PAGED, slow=PAGED)
    found = {
        "model": "m",
        "layers": 1,
        "format": "bf16",
        "slots": 32,
        "engines": asdict(engines),
        "decode": [asdict(row) for row in decode_rows(engines, TRACES)],
        "slow_decode": [asdict(row) for row in decode_rows(engines, TRACES, slow=True)],
        "prefill": [asdict(row) for row in prefill_rows(engines, 1, 128, 32)],
    }
    pictures = plots.draw(found, tmp_path / "plots", "run")
    assert [path.name for path in pictures] == ["run-decode.png", "run-slow-decode.png", "run-prefill.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
