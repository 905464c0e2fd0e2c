"""`additional_config["expert_cache"]`: what a user says about paging, checked before it costs anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from vvllm_shared import limits
from vvllm_shared.errors import ConfigError

KEY = "expert_cache"
"""The one key of vLLM's `additional_config` that is ours. Where it is absent, so are we."""


@dataclass(frozen=True)
class CacheSettings:
    """Exactly one of the two sizes is given."""

    slots: int | None = None
    """Experts per layer that VRAM holds at a time."""
    cache_gb: float | None = None
    """GiB of VRAM for experts, all layers together."""
    pair_waves_above: int = 64
    """Batches of more tokens than this, where they need more than the slots, run as pair waves (each expert is
    loaded once; see `vvllm_shared.residency.waves`), smaller ones as token waves (bit-exact). For the CPU: on a GPU,
    where every batch that is too large runs in exact rounds, whoever gives it is refused."""
    poison: bool = False
    """For verification: free slots hold NaN, so that a read of a slot that was never loaded shows."""

    @classmethod
    def parse(cls, given: object) -> CacheSettings:
        """Check what the user gave.

        Raises:
            ConfigError: unknown key, wrong type, both sizes or none, a size out of bounds.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"expert_cache is {given!r}.", 'Give a dictionary, for example {"slots": 32}.')
        known = {f.name for f in fields(cls)}
        for key in given:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                hint = f'Did you mean "{close[0]}"?' if close else f"Known: {', '.join(sorted(known))}."
                raise ConfigError(f'expert_cache: unknown option "{key}".', hint)
        settings = cls(**given)
        settings._check_types()
        if (settings.slots is None) == (settings.cache_gb is None):
            both = "both slots and cache_gb" if settings.slots is not None else "neither slots nor cache_gb"
            raise ConfigError(
                f"expert_cache: {both} given.",
                'Give one size: {"slots": 32} (experts per layer) or {"cache_gb": 4.0} (GiB of VRAM in all).',
            )
        return settings

    def _check_types(self) -> None:
        whole = {
            "slots": (self.slots, 1, limits.SLOTS),
            "pair_waves_above": (self.pair_waves_above, 0, 1 << 20),
        }
        for name, (value, low, high) in whole.items():
            absent = value is None and name == "slots"
            if not absent and (type(value) is not int or not low <= value <= high):
                raise ConfigError(
                    f"expert_cache: {name} is {value!r}.", f"Give a whole number {low} … {high}."
                )
        size = self.cache_gb
        if size is not None and (type(size) not in (int, float) or not 0 < size <= limits.CACHE_GB):
            raise ConfigError(f"expert_cache: cache_gb is {size!r}.", "Give GiB of VRAM, for example 4.0.")
        if type(self.poison) is not bool:
            raise ConfigError(f"expert_cache: poison is {self.poison!r}.", "Give true or false.")
