"""The daemon's status for people, and as an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vvllm_client.quantities import duration, percent, size
from vvllm_shared.errors import Exit

Status = Mapping[str, object]


def exit_code(status: Status) -> Exit:
    """0 only when ready; a stage that may become ready is busy."""
    match status.get("stage"):
        case "ready":
            return Exit.OK
        case "failed":
            return Exit.INTERNAL
    return Exit.BUSY


def table(status: Status) -> str:
    """One line per aspect, its name in a column. A daemon of another version may leave any field out."""
    rows = [*_rows(status)]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    yield "stage", _stage(status)
    if isinstance(error := status.get("error"), dict):
        yield "error", str(error.get("message", error))
        if hint := error.get("hint"):
            yield "", str(hint)
    yield "model", str(status.get("model") or "-")
    yield "daemon", _daemon(status)
    yield "requests", _count(status, "requests")
    if isinstance(cache := status.get("cache"), dict) and cache:
        yield "slots", _slots(cache)
        paged = size(_number(cache, "bytes_paged"))
        yield "cache", f"{_lookups(_number(cache, 'hits'), _number(cache, 'misses'))} · {paged} paged in"
        yield from _phases(cache)
        token_waves, pair_waves, steps = (
            _count(cache, name) for name in ("token_waves", "pair_waves", "steps")
        )
        yield "waves", f"{token_waves} token, {pair_waves} pair in {steps} steps"
    if isinstance(policy := status.get("policy"), dict):
        yield "policy", _policy(policy)
    if isinstance(versions := status.get("versions"), dict) and versions:
        yield "versions", " · ".join(f"{name} {version}" for name, version in versions.items())


def _stage(status: Status) -> str:
    text = str(status.get("stage", "unknown"))
    if isinstance(progress := status.get("progress"), int | float):
        text += f" {progress:.0%}"
    return f"{text}: {detail}" if (detail := status.get("detail")) else text


def _daemon(status: Status) -> str:
    up = status.get("uptime_s")
    parts = [f"pid {status.get('pid', '-')}", f"engine {status.get('engine_pid') or '-'}"]
    if isinstance(generation := status.get("generation"), int):
        parts.append(f"engine start no. {generation}")
    if isinstance(up, int | float):
        parts.append(f"up {duration(up)}")
    return " · ".join(parts)


def _slots(cache: Status) -> str:
    slots, layers, experts = (_number(cache, name) for name in ("slots", "layers", "experts"))
    text = f"{slots} of {experts} experts in each of {layers} layers"
    if bundle := _number(cache, "bundle_bytes"):
        text += f" · {size(bundle)} each, {size(bundle * slots * layers)} in all"
    return text


def _phases(cache: Status) -> Iterator[tuple[str, str]]:
    """The look-ups of decode and of prefill, each of all layers together."""
    phases = cache.get("by_layer")
    for phase in ("decode", "prefill"):
        layers = phases.get(phase) if isinstance(phases, dict) else None
        if isinstance(layers, list):
            hits, misses = (sum(_item(layer, place) for layer in layers) for place in (0, 1))
            yield phase, _lookups(hits, misses)


def _item(layer: object, place: int) -> int:
    value = layer[place] if isinstance(layer, list) and len(layer) > place else 0
    return value if isinstance(value, int) else 0


def _lookups(hits: int, misses: int) -> str:
    rate = percent(hits / (hits + misses)) if hits + misses else "-"
    return f"{hits:,} hits, {misses:,} misses ({rate} hits)"


def _policy(policy: Status) -> str:
    text = str(policy.get("state", "unknown"))
    if name := policy.get("name"):
        text += f" · {name}"
    if pid := policy.get("pid"):
        text += f" · pid {pid}"
    if reason := policy.get("reason"):
        text += f" · {reason}"
    if applied := _number(policy, "advice_applied"):
        text += f" · advised {applied:,} times"
    if restarts := _number(policy, "restarts"):
        text += f" · restarted {restarts:,} times"
    return text


def _number(fields: Status, name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0


def _count(fields: Status, name: str) -> str:
    return f"{_number(fields, name):,}"
