"""Lazy import of pyarrow, an optional dependency of the library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:

    class _Lazy:
        """Lazy module, imported at the first attribute access."""

        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> object:
            try:
                module = importlib.import_module(self._module)
            except ImportError as error:
                raise ImportError("the rollout log needs pyarrow: pip install 'rollcorr[log]'") from error
            return getattr(module, name)

    pa, pc, pq = _Lazy("pyarrow"), _Lazy("pyarrow.compute"), _Lazy("pyarrow.parquet")

__all__ = ["pa", "pc", "pq"]
