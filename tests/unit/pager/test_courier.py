"""The native thread serves whole messages, in order, and nothing else."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from couriers import functions, library
from vvllm_pager.courier import Addresses, Courier, CourierError

LAYERS, EXPERTS, RECORD, PLACES = 3, 5, 64, 2


class Served:
    """A courier on plain memory: lanes, numbers, and the box."""

    def __init__(self) -> None:
        self.stores = [
            np.full((EXPERTS, RECORD), 10 * layer, np.uint8) + np.arange(EXPERTS, dtype=np.uint8)[:, None]
            for layer in range(LAYERS)
        ]
        self.lanes = np.zeros((2, PLACES, RECORD), np.uint8)
        self.arrived = np.zeros((2, PLACES), np.uint32)
        self.enabled = np.array([1, 0], np.uint32)
        self.box = np.zeros(PLACES + 2, np.uint64)
        addresses = Addresses(
            self.box.ctypes.data,
            self.lanes.ctypes.data,
            RECORD,
            self.arrived.ctypes.data,
            self.enabled.ctypes.data,
            PLACES,
        )
        records = [(store.ctypes.data, RECORD, EXPERTS) for store in self.stores]
        self.courier = Courier(functions(), addresses, records)

    def post(self, number: int, wanted: list[tuple[int, int]], used: int = 0) -> None:
        """`wanted`: (layer, expert) by place, expert -1 for none."""
        for place, (layer, expert) in enumerate(wanted):
            self.box[place] = number << 32 | layer << 16 | expert + 1
        self.box[PLACES] = number << 32 | used

    def wait(self, layer: int, place: int, number: int) -> None:
        end = time.monotonic() + 10
        while self.arrived[layer % 2, place] != number:
            assert time.monotonic() < end, "not served"
            time.sleep(0.0002)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.courier.stop()


def test_each_message_is_brought_into_the_lanes_of_its_layers_parity(served: Served) -> None:
    for number in range(1, 200):
        layer, experts = number % LAYERS, (number % EXPERTS, (number + 2) % EXPERTS)
        served.post(number, [(layer, expert) for expert in experts], used=number)
        for place, expert in enumerate(experts):
            served.wait(layer, place, number)
            assert (served.lanes[layer % 2, place] == 10 * layer + expert).all()
    served.courier.stop()  # waits for the thread; what it counted can still be read
    assert (served.courier.brought, served.courier.used) == (2 * 199, 199)


def test_it_wakes_from_its_sleep(served: Served) -> None:
    for number in (1, 2):
        time.sleep(0.2)
        served.post(number, [(0, 3), (0, -1)])
        served.wait(0, 0, number)
    served.courier.stop()
    assert served.courier.brought == 2


def test_a_message_of_which_half_has_arrived_waits_for_the_rest(served: Served) -> None:
    served.post(1, [(0, 1), (0, 2)])
    served.wait(0, 1, 1)
    served.box[0] = 2 << 32 | 4
    time.sleep(0.05)
    assert served.arrived.tolist() == [[1, 1], [0, 0]]
    served.post(2, [(0, 3), (0, -1)])
    served.wait(0, 0, 2)
    assert (served.lanes[0, 0] == 3).all()
    assert served.arrived[0, 1] == 1


@pytest.mark.parametrize("wrong", [(LAYERS, 0), (0, EXPERTS), (0xFFFF, 0xFFFE)])
def test_what_does_not_exist_is_not_read(served: Served, wrong: tuple[int, int]) -> None:
    served.post(1, [wrong, (1, 2)])
    served.wait(1, 1, 1)
    served.courier.stop()
    assert (served.courier.brought, served.courier.error) == (1, 0)


def test_guesses_that_are_not_used_are_switched_off_and_tried_again(served: Served) -> None:
    def post(number: int, used: int) -> None:
        served.post(number, [(0, 1), (0, 2)], used)
        served.wait(0, 1, number)

    for number in range(1, 258):
        post(number, used=number // 2 + 2)  # a quarter of what was brought, and more
    assert served.enabled[0] == 1  # that the last one was served proves that those before were judged
    for number in range(258, 514):
        post(number, used=131)
    end = time.monotonic() + 5
    while served.enabled[0] == 1:
        assert time.monotonic() < end
        time.sleep(0.001)
    end = time.monotonic() + 10
    while served.enabled[0] == 0:
        assert time.monotonic() < end, "guessed no more"
        time.sleep(0.01)


@contextmanager
def library_says(name: str, kind: type, value: int) -> Iterator[None]:
    kind.in_dll(library(), name).value = value  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kind.in_dll(library(), name).value = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["fails", "put_fails"])
def test_it_ends_with_the_first_error_of_cuda_and_nobody_asks_any_more(served: Served, what: str) -> None:
    with library_says(what, ctypes.c_int, 801):
        served.post(1, [(0, 1), (0, 2)])
        end = time.monotonic() + 10
        while not served.courier.error:
            assert time.monotonic() < end
            time.sleep(0.001)
        served.courier.stop()
    assert (served.courier.error, served.courier.brought) == (801, 0)
    assert not served.arrived.any()
    # Where not even a copy goes through, nothing can be told to the device either.
    assert served.enabled[0] == (1 if what == "fails" else 0)


def test_what_would_only_be_late_is_not_brought(served: Served) -> None:
    with library_says("held", ctypes.c_void_p, served.box[PLACES + 1 :].ctypes.data):
        for number in (1, 2):
            served.post(number, [(0, number), (0, -1)])
            served.wait(0, 0, number)
        served.post(3, [(0, 3), (0, -1)])
        time.sleep(0.1)
        assert (served.lanes[0, 0] == 2).all()
        served.box[PLACES + 1] = 2  # the copies are done
    served.post(4, [(0, 4), (0, -1)])
    served.wait(0, 0, 4)
    assert (served.lanes[0, 0] == 4).all()


def test_what_somebody_else_switched_off_stays_off(served: Served) -> None:
    """A benchmark's run without guesses lasts longer than the pause between two tries."""
    served.enabled[:] = 0, 70
    end = time.monotonic() + 10
    while served.enabled[1]:  # it has looked
        assert time.monotonic() < end, "never"
        time.sleep(0.01)
    served.courier.stop()
    assert served.enabled[0] == 0


def test_who_waits_in_vain_now_and_then_is_not_counted_for_ever(served: Served) -> None:
    def forgiven(within: float) -> None:
        end = time.monotonic() + within
        while served.enabled[1]:
            assert time.monotonic() < end, "still counted"
            time.sleep(0.001)

    served.enabled[1] = 40
    forgiven(5)  # by a pause; the next one is two seconds away
    served.enabled[1] = 40
    for number in range(1, 257):  # a window of the courier's
        assert served.enabled[1] == 40
        served.post(number, [(0, 1), (0, 2)], used=2 * number)
        served.wait(0, 1, number)
    forgiven(0.8)
    assert served.enabled[0] == 1


def test_who_waited_in_vain_may_ask_again_after_a_while(served: Served) -> None:
    served.enabled[1] = 70
    end = time.monotonic() + 10
    while served.enabled[1]:
        assert time.monotonic() < end, "never"
        time.sleep(0.01)


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc"])
def test_a_compiler_that_fails_is_named(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions()
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(CourierError, match=f"{compiler} could not compile"):
        Served()


def test_without_a_compiler_there_is_no_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    functions()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CourierError, match="no C compiler"):
        Served()
