"""What the daemon, the engine and the policy process say to each other.

Every message is a frozen Struct whose `type` is its name in lower case; unknown fields are refused, and each
number, string and list has its bounds. `vvllm_shared.wire` turns them into frames and back. Only decoding
checks types and bounds; the checks of `__post_init__` also meet the sender.

Daemon to policy: `Hello`, `Refused`. Policy to daemon: `Ready`, `Heartbeat`, `Advise`. Engine to policy:
`DecodeTrace`, `PrefillTrace`, `ResidencySnapshot`. A message that carries `boot_id` counts only while that
daemon's run lasts; one that also carries `epoch` only until the daemon's next `Hello`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from vvllm_shared import limits

PROTOCOL = 1
"""Version of everything in this module; two processes that differ in it do not talk."""

HEARTBEAT_SECONDS = 0.5
"""How often the policy process shows that its loop turns."""

ALL_LAYERS = -1
"""`Advise.layer` when the advice is for every layer."""

_NUMBER = 2**63 - 1
_REAL = 1e9

Name = Annotated[str, Meta(min_length=1, max_length=limits.TEXT_CHARS)]
Reason = Annotated[str, Meta(max_length=limits.TEXT_CHARS)]
BootId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_-]+\Z")]
Number = Annotated[int, Meta(ge=0, le=_NUMBER)]
Real = Annotated[float, Meta(ge=-_REAL, le=_REAL)]  # bounds refuse NaN and the infinities too
Decay = Annotated[float, Meta(gt=0.0, le=1.0)]
Layers = Annotated[int, Meta(ge=1, le=limits.LAYERS)]
Experts = Annotated[int, Meta(ge=1, le=limits.EXPERTS)]
Slots = Annotated[int, Meta(ge=1, le=limits.SLOTS)]
TopK = Annotated[int, Meta(ge=1, le=limits.TOP_K)]
Count = Annotated[int, Meta(ge=1, le=limits.FRAME_BYTES)]
Table = Annotated[bytes, Meta(max_length=limits.FRAME_BYTES)]


class Message(Struct, frozen=True, tag=str.lower, tag_field="type", forbid_unknown_fields=True):
    """What all messages share."""


class LayerShape(Struct, frozen=True, forbid_unknown_fields=True):
    """One paged layer, as the engine built it."""

    name: Name
    experts: Experts
    slots: Slots
    top_k: TopK
    bundle_bytes: Number
    """All tensors of one expert together: what a miss moves."""


class Hello(Message, frozen=True):
    """Daemon to policy: a session begins, and everything that was said before it is void."""

    protocol: Annotated[int, Meta(ge=PROTOCOL, le=PROTOCOL)]
    boot_id: BootId
    epoch: Number
    fingerprint: Name
    layers: Annotated[list[LayerShape], Meta(min_length=1, max_length=limits.LAYERS)]


class Refused(Message, frozen=True):
    """Daemon to policy: no session for you. Its shape never changes, so that any version can read it."""

    reason: Reason


class Ready(Message, frozen=True):
    """Policy to daemon: first on each connect, and again until a `Hello` comes."""

    protocol: Annotated[int, Meta(ge=PROTOCOL, le=PROTOCOL)]
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    policy: Name


class Heartbeat(Message, frozen=True):
    """Policy to daemon, every `HEARTBEAT_SECONDS`; `seq` is shared with `Advise`."""

    boot_id: BootId
    epoch: Number
    seq: Number


class Advise(Message, frozen=True):
    """Policy to daemon: which experts to give up first. Replaces all earlier advice for its layer.

    The pager's victim is the expert with the lowest
    `bias[e] + heat_weight * heat[e] + age_weight * last_used[e]` among those that no running forward needs.
    `last_used` counts forwards; with each forward `heat[e] = heat[e] * heat_decay + (1 if it used e else 0)`.
    """

    boot_id: BootId
    epoch: Number
    seq: Number
    layer: Annotated[int, Meta(ge=ALL_LAYERS, le=limits.LAYERS - 1)]
    """Index into `Hello.layers`, or `ALL_LAYERS`."""
    heat_weight: Real
    age_weight: Real
    heat_decay: Decay
    bias: Annotated[list[Real], Meta(min_length=1, max_length=limits.EXPERTS)] | None = None
    """One number for each expert of the layer; None is all zeros, and the only choice for `ALL_LAYERS`."""

    def __post_init__(self) -> None:
        if self.layer == ALL_LAYERS and self.bias is not None:
            msg = "advice for all layers carries no bias"
            raise ValueError(msg)


class DecodeTrace(Message, frozen=True):
    """Engine to policy: what the router chose in `steps` consecutive forwards, `step` the first of them."""

    boot_id: BootId
    seq: Number
    step: Number
    steps: Count
    layers: Layers
    tokens: Count
    top_k: TopK
    ids: Table
    """int16 little endian `[steps, layers, tokens, top_k]`; -1 is padding."""

    def __post_init__(self) -> None:
        _check_size("ids", self.ids, 2 * self.steps * self.layers * self.tokens * self.top_k)


class PrefillTrace(Message, frozen=True):
    """Engine to policy: how often the router chose each expert in one forward with many tokens."""

    boot_id: BootId
    seq: Number
    step: Number
    tokens: Count
    layers: Layers
    experts: Experts
    counts: Table
    """int32 little endian `[layers, experts]`."""

    def __post_init__(self) -> None:
        _check_size("counts", self.counts, 4 * self.layers * self.experts)


class ResidencySnapshot(Message, frozen=True):
    """Engine to policy: which expert each slot held after forward `step`."""

    boot_id: BootId
    seq: Number
    step: Number
    layers: Layers
    slots: Slots
    expert_in: Table
    """int16 little endian `[layers, slots]`; -1 is an empty slot."""

    def __post_init__(self) -> None:
        _check_size("expert_in", self.expert_in, 2 * self.layers * self.slots)


ToPolicy = Hello | Refused
"""What the daemon says."""
ToDaemon = Ready | Heartbeat | Advise
"""What the policy process says."""
Trace = DecodeTrace | PrefillTrace | ResidencySnapshot
"""What the engine says."""


def _check_size(field: str, table: bytes, expected: int) -> None:
    """Raise ValueError unless `table` has the bytes that its shape needs."""
    if len(table) != expected:
        msg = f"`{field}` has {len(table)} bytes, its shape needs {expected}"
        raise ValueError(msg)
