"""Functions that an option names: by module, or by file."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from typing import Any


def load_function(where: str, *, option: str) -> Callable[..., Any]:
    """Import a function by `package.module:name` or `path/to/file.py:name`. This runs the module's code.

    Args:
        where: reference to the function.
        option: what the error calls it.

    Raises:
        ValueError: the file, module or name does not exist, or is not callable.
    """
    place, _, name = where.rpartition(":")
    try:
        names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
        found = names[name]
    except (ImportError, OSError, ValueError, KeyError) as error:
        cause = f"{place} defines no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{option}={where!r} cannot be loaded: {cause}; it must be package.module:name or file.py:name"
        ) from error
    if not callable(found):
        raise ValueError(f"{option}={where!r} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
