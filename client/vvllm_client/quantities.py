"""Numbers for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes, in the binary unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def duration(seconds: float) -> str:
    """Whole seconds as days, hours, minutes, seconds: the two largest that matter."""
    parts: list[str] = []
    left = int(seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or parts or unit == "s":
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def percent(share: float | None) -> str:
    """A share of one, with the digit that tells 99.9% from all."""
    return "-" if share is None else f"{share:.1%}"
