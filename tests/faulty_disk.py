"""A disk that fails for a while: each call below a folder is counted, and some of them raise an error of the system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rollcorr.rollout_log import writer

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EMFILE, errno.EROFS, errno.EINTR)


class Faults:
    """Which calls fail.

    Args:
        number: of the error.
        first: the call with which it begins, counted from 1; 0 never.
        count: number of calls that fail.

    Attributes:
        calls: so far, while `happen` was true.
        happen: whether calls are counted now.
    """

    def __init__(self, number: int = 0, first: int = 0, count: int = 0) -> None:
        self.number, self.calls, self.happen = number, 0, False
        self._failing = range(first, first + count) if first else range(0)

    def check(self) -> None:
        """Count a call."""
        if not self.happen:
            return
        self.calls += 1
        if self.calls in self._failing:
            raise OSError(self.number, os.strerror(self.number))


class _File:
    """An open file. A write that fails has written half."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, content: bytes) -> int:
        try:
            self._faults.check()
        except OSError:
            self._file.write(content[: len(content) // 2])
            raise
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        if name in ("truncate", "flush", "fileno", "seek"):
            self._faults.check()
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def faulty_disk(root: Path, faults: Faults) -> Iterator[Faults]:
    """Make calls on paths below `root` fail while `faults.happen`, including pyarrow's."""

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_check(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, int) or root in Path(path).parents:
                faults.check()
            return call(path, *arguments, **options)

        return with_check

    open_path = Path.open

    def open_checked(path: Path, *arguments: Any, **options: Any) -> Any:
        if root not in path.parents:
            return open_path(path, *arguments, **options)
        faults.check()
        return _File(open_path(path, *arguments, **options), faults)

    class ParquetWriter(writer.pq.ParquetWriter):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.is_open = False  # its `__del__` closes it
            faults.check()
            super().__init__(*arguments, **options)

        def write_table(self, *arguments: Any, **options: Any) -> None:
            faults.check()
            super().write_table(*arguments, **options)

        def close(self) -> None:
            super().close()
            faults.check()

    with (
        mock.patch.object(Path, "open", open_checked),
        mock.patch.object(writer.pq, "ParquetWriter", ParquetWriter),
        mock.patch.multiple(
            os, **{n: checked(getattr(os, n)) for n in ("open", "fsync", "replace", "unlink", "mkdir")}
        ),
    ):
        yield faults
