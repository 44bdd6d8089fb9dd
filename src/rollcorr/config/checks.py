"""Field checks for the configurations: an invalid type raises TypeError, an invalid value ValueError.

Every error names the option, its value, the limit and the fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

_OptionalLimit = float | None
_Options = TypeVar("_Options")


class InertOptionWarning(UserWarning):
    """Warning for an option that has no effect in combination with the other options."""


def did_you_mean(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return the start of an error about an unknown name ("Did you mean 'rollout_is'? "); empty if no name is near.

    Args:
        name: the unknown name.
        known: the valid names.
        elsewhere: names that are valid in other places, and how to write each there.
    """
    written = elsewhere or {}
    asked, names = name.lower().replace("-", "_"), list(dict.fromkeys([*known, *written]))

    # Names that start with the unknown one: "clip_ratio" may be either side. Then the same option of other sections.
    near = [asked] if asked in names else [other for other in names if asked and other.startswith(asked)]
    near = near or [other for other in names if other.endswith(f".{asked.rpartition('.')[2]}")]
    near = near or difflib.get_close_matches(asked, names, n=1, cutoff=0.65)
    near = near or [other for other in names if asked in re.split(r"[._]", other)]
    return f"Did you mean {' or '.join(written.get(other, repr(other)) for other in near[:3])}? " if near else ""


def unknown_name(problem: str, name: object, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return the error text for an unknown option, keyword or name: the nearest name, the problem, all valid names.

    Args:
        problem: the problem, with the name in it.
        name: the unknown name.
        known: the valid names.
        elsewhere: as in `did_you_mean`.
    """
    names = list(known)
    return f"{did_you_mean(str(name), names, elsewhere)}{problem}; valid are {', '.join(names) or 'none'}"


def names_unknown_options(cls: type[_Options]) -> type[_Options]:
    """Decorate a dataclass: an unknown option raises `TypeError` with the nearest one."""
    plain = cls.__init__
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]

    @functools.wraps(plain)
    def checked(self: Any, *values: Any, **options: Any) -> None:  # noqa: ANN401
        for name in options:
            if name not in known:
                raise TypeError(
                    unknown_name(f"there is no option {name!r} of {cls.__name__}", name, known)
                    + getattr(cls, "_unknown_hint", "")
                )
        plain(self, *values, **options)

    cls.__init__ = checked  # type: ignore[misc, assignment]
    return cls


def in_one_line(error: object, *, characters: int = 1500) -> str:
    """Return an error's text as one line of limited length: errors about untrusted files may quote any part of them."""
    text = " ".join(str(error).split())
    if len(text) <= characters:
        return text
    return f"{text[: characters // 2]} … {text[-(characters // 2) :]}"


def warn_inert(config: object, inert: Iterable[tuple[str, str]]) -> None:
    """Warn about each (option, reason) without effect. Call it from a dataclass's `__post_init__`."""
    for option, reason in inert:
        # Frames: here, __post_init__, the generated __init__, the wrapper in `names_unknown_options`, its caller.
        warnings.warn(f"{option}={getattr(config, option)!r} {reason}", InertOptionWarning, stacklevel=5)


@functools.lru_cache(maxsize=64)
def warn_once(message: str, stacklevel: int = 4) -> None:
    """Emit a warning once per process; `stacklevel` as for `warnings.warn`, counted from here."""
    warnings.warn(message, stacklevel=stacklevel)


def check_choice(option: str, value: object, choices: Iterable[str], *, optional: bool = False) -> None:
    """Check that a value is one of the names in `choices` (or None, when optional).

    Raises:
        TypeError: the value is not a string.
        ValueError: the value is not in `choices`; the message suggests the nearest choice.
    """
    if optional and value is None:
        return
    names = list(choices)
    listed = ", ".join(repr(name) for name in names) + (" or None" if optional else "")
    if not isinstance(value, str):
        raise TypeError(f"{option} must be one of {listed}; got {value!r} of type {type(value).__name__}")
    if value not in names:
        raise ValueError(f"{did_you_mean(value, names)}{option} must be one of {listed}; got {value!r}")


def check_bool(option: str, value: object) -> None:
    """Check that a value is True or False, and not 0, 1 or a string.

    Raises:
        TypeError: the value is of any other type.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{option} must be True or False; got {value!r} of type {type(value).__name__}")


def check_number(
    option: str,
    value: object,
    *,
    at_least: _OptionalLimit = None,
    above: _OptionalLimit = None,
    at_most: _OptionalLimit = None,
) -> float:
    """Return a finite number inside the given limits as a float.

    Raises:
        TypeError: the value is not a number (a bool is not one).
        ValueError: the value is NaN, infinite, or outside the limits.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{option} must be a number; got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest double
        raise ValueError(f"{option} must be finite; got an integer of more than 300 digits") from None

    # NaN satisfies no limit, and an option without limits must still be finite.
    limits = ((">=", at_least, operator.ge), (">", above, operator.gt), ("<=", at_most, operator.le))
    given = [(word, limit, holds) for word, limit, holds in limits if limit is not None]
    if not (math.isfinite(number) and all(holds(number, limit) for _, limit, holds in given)):
        words = ("finite", *(f"{word} {limit:g}" for word, limit, _ in given))
        raise ValueError(f"{option} must be {' and '.join(words)}; got {value!r}")
    return number


def check_integer(option: str, value: object, *, at_least: int) -> int:
    """Return an integer of at least `at_least` as an int.

    Raises:
        TypeError: the value is not an integer (a bool is not one).
        ValueError: the value is below the limit.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{option} must be an integer; got {value!r} of type {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{option} must be >= {at_least}; got {value!r}")
    return int(value)
