"""What every engine is told before it samples, as one value: how tokens are drawn, how long, and which ids end and pad.

An engine's own options, such as its precision or its address, are not here: they belong to that engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from rollcorr.config import SamplingSpec
from rollcorr.config.checks import names_unknown_options

# Every setting at the value that turns it off.
_OFF = SamplingSpec()

# Of each number: its smallest value, and how to fix another one.
_NUMBERS = {
    "max_new_tokens": (1, "give the length of the longest response"),
    "eos_token_id": (0, "give the tokenizer's eos_token_id"),
    "pad_token_id": (0, "give the tokenizer's pad_token_id, or its eos_token_id if it has none"),
}


@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How an engine samples. Each engine also refuses what it cannot do exactly as the settings say.

    Attributes:
        sampling: how tokens are drawn, and which log-probs are reported. Its engine, engine version and policy version
            are filled in by the engine.
        max_new_tokens: the longest response, at least 1.
        eos_token_id: ends a response and belongs to it.
        pad_token_id: fills the rows of a batch.

    Raises:
        TypeError: `sampling` is no `SamplingSpec`, or a number is no integer.
        ValueError: a number is too small, the temperature is 0, or the log-probs are those of a trainer.

    Example:
        >>> GenerationSettings(sampling=SamplingSpec(), max_new_tokens=0, eos_token_id=2, pad_token_id=0)
        Traceback (most recent call last):
        ValueError: max_new_tokens must be at least 1, got 0; give the length of the longest response
    """

    sampling: SamplingSpec
    max_new_tokens: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self) -> None:
        for name, (lowest, fix) in _NUMBERS.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}; {fix}")
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}; {fix}")

        if not isinstance(self.sampling, SamplingSpec):
            raise TypeError(
                f"sampling must be a SamplingSpec, got {self.sampling!r} of type {type(self.sampling).__name__}; "
                "write SamplingSpec(temperature=1.0), for instance"
            )
        if self.sampling.temperature <= 0:
            raise ValueError(
                f"temperature must be > 0 to sample, got {self.sampling.temperature}; greedy decoding has no log-probs"
            )
        if self.sampling.support != "engine":
            raise ValueError(
                f"support={self.sampling.support!r}: an engine reports log-probs over its own support; "
                "set support='engine'"
            )


def settings_in_use(sampling: SamplingSpec, names: Iterable[str]) -> list[str]:
    """Those of the named sampling settings that are not off."""
    return [name for name in names if getattr(sampling, name) != getattr(_OFF, name)]


def refuse_settings(sampling: SamplingSpec, names: Iterable[str], who: str) -> None:
    """Refuse sampling settings that an engine does not follow.

    Args:
        sampling: what is asked for.
        names: settings that must be off.
        who: which engine does not support them, and why, for the error.

    Raises:
        ValueError: a setting is not off; names its value and the one that turns it off.
    """
    for name in settings_in_use(sampling, names):
        value, off = getattr(sampling, name), getattr(_OFF, name)
        raise ValueError(f"{name}={value!r} is not supported by {who}; set {name}={off!r}")
