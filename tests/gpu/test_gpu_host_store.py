"""The store under the copy engine, which refuses a copy that crosses two registrations."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def test_every_record_of_a_store_of_several_pieces_reaches_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from vvllm_pager import host_store

    monkeypatch.setattr(host_store, "_PIECE", 1 << 20)
    store = host_store.HostStore([(7, 4096 * 25 + 256), (3, 1024), (40, 4096 * 10 + 512)])
    for layer in range(3):
        store.region(layer).random_(0, 255)
    store.pin()
    for layer in range(3):
        records = store.region(layer)
        device = torch.empty_like(records, device="cuda")
        for i in range(len(records)):
            device[i].copy_(records[i], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), records)


def test_a_store_at_the_address_of_a_dropped_one_can_be_pinned() -> None:
    from vvllm_pager.host_store import HostStore

    for _ in range(4):
        HostStore([(16, 1 << 20)]).pin()
