"""Totals of one training step over all ranks: statistics of corrections and losses, and the trainer's own metrics.

Values stay on their devices until the step ends. Then they are packed into one float64 vector, whose layout lists its
entries. It is gathered and copied to the host in one transfer.

With a context group the vectors are gathered over it first, and the results over the data-parallel group. So every
rank reads the vectors of all ranks in the same order.

Ranks may measure different values in a step: a rank without sequences has no statistics, and a number may be known to
one rank only. So each vector begins with the hash of its layout. Layouts are exchanged, as objects, only when one of
them is new, usually only in the first step of a run.

The collective of `correct` has different marks, so a rank that is still in `correct` is detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollcorr.core.host_statistics import HostStatistics
from rollcorr.core.lag_statistics import known_metrics
from rollcorr.core.mergeable_statistics import (
    STATISTICS_DTYPE,
    Statistics,
    extremes_of,
    merge_statistics,
    moments_of,
)
from rollcorr.core.metric_registry import finalize, metric
from rollcorr.correction.process_groups import (
    BLOCK,
    HEADER,
    explained_failure,
    filled_blocks,
    gather,
    gather_marked,
    number_of,
    out_of_step,
    reads_host_memory,
)
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.weight_sync_rules import FIRST

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Source of a part. A correction counted elsewhere is sent by a different rank that also has it; values have a
# distribution.
Source = Literal["correction", "counted elsewhere", "lags", "loss", "first loss", "values", "number"]

LOSS_PREFIX = "actor/"

_DISTRIBUTION_ROWS: Mapping[str, tuple[str, ...]] = {
    "sums": ("nonfinite",),
    "moments": ("value",),
    "extremes": ("value",),
    "histograms": (),
    "tops": (),
}


class LayoutEntry(NamedTuple):
    """A part of a rank's vector: its source, its name, its rows by kind, and its length."""

    source: Source
    name: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    size: int


Layout = tuple[LayoutEntry, ...]


class StepTotals:
    """The sums of the current step."""

    def __init__(self) -> None:
        self._statistics: dict[tuple[Source, str], list[Statistics]] = {}
        self._numbers: dict[str, Tensor | float] = {}

    @property
    def has_loss(self) -> bool:
        """Whether a loss was counted."""
        return ("loss", "") in self._statistics

    def forget_values(self) -> None:
        """Drop the trainer's own metrics: after a failed call of `step` they are passed again."""
        self._numbers.clear()
        self._statistics = {key: found for key, found in self._statistics.items() if key[0] != "values"}

    def add_statistics(self, source: Source, statistics: Statistics) -> None:
        """Add the statistics of a correction or a loss.

        Raises:
            ValueError: they were counted in this step already, or their rows differ from the step's rows, because of a
                different configuration or detail.
        """
        parts = self._statistics.setdefault((source, ""), [])
        if any(part is statistics for part in parts):
            raise ValueError(
                "this correction was counted in this step already: `correct` counts it, and its parts have the "
                "statistics of the whole"
            )
        if parts and parts[0].names != statistics.names:
            rows, before = (
                {name for names in part.names.values() for name in names} for part in (statistics, parts[0])
            )
            raise ValueError(
                f"the micro-batches of a step must be measured alike; these rows are in some of them only: "
                f"{sorted(rows ^ before)}. Give every call of a step the same options"
            )
        parts.append(statistics)

    def add_value(self, name: str, value: object) -> None:
        """Add a number, or a tensor or list of numbers; compute mean, standard deviation and extremes of the latter.

        Raises:
            TypeError: the value is neither.
            ValueError: the name is reserved for the library, or was given in this step already.
        """
        if _is_reserved(name):
            raise ValueError(
                f"{name!r} is a name of the library's own, and would be judged as such; call it train/{name}"
            )
        if name in self._numbers or ("values", name) in self._statistics:
            raise ValueError(f"{name!r} was given twice in this step; choose another name")

        if isinstance(value, (bool, int, float)):
            self._numbers[name] = float(value)
            return
        try:
            numbers = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be a number, or a tensor or list of numbers; got {value!r}") from error
        numbers = numbers.detach()
        if numbers.dim() == 0:
            self._numbers[name] = numbers
        else:
            self._statistics["values", name] = [_distribution_statistics(numbers)]

    def pack(self) -> tuple[Layout, Tensor]:
        """Return the layout and the vector of all parts, on the device of the data."""
        parts: list[tuple[list[LayoutEntry], Tensor]] = []
        counted = [(key, found) for key, found in self._statistics.items() if key[0] != "counted elsewhere"]
        for (source, name), found in counted:
            merged = found[0] if len(found) == 1 else merge_statistics(found)
            packed = merged.pack()
            parts.append(([LayoutEntry(source, name, tuple(merged.names.items()), packed.numel())], packed))

        # Pack plain numbers into one tensor: one operation per number would dominate the cost.
        plain = {name: value for name, value in self._numbers.items() if not isinstance(value, Tensor)}
        if plain:
            packed = torch.tensor(list(plain.values()), dtype=STATISTICS_DTYPE, device="cpu")
            parts.append(([LayoutEntry("number", name, (), 1) for name in plain], packed))
        parts += [
            ([LayoutEntry("number", name, (), 1)], value.reshape(1).to(STATISTICS_DTYPE))
            for name, value in self._numbers.items()
            if isinstance(value, Tensor)
        ]

        # Copy all host parts to the device at once.
        device = next((part.device for _, part in parts if part.device.type != "cpu"), torch.device("cpu"))
        on_device = [part for part in parts if part[1].device == device]
        elsewhere = [part for part in parts if part[1].device != device]
        tensors = [part for _, part in on_device]
        if elsewhere:
            tensors.append(torch.cat([part.cpu() for _, part in elsewhere]).to(device))
        vector = torch.cat(tensors) if tensors else torch.zeros(0, dtype=STATISTICS_DTYPE, device=device)
        return tuple(entry for entries, _ in (*on_device, *elsewhere) for entry in entries), vector


class RankExchange:
    """The exchange between the ranks of a training step.

    Args:
        group: the data-parallel ranks; defaults to this process.
        context_group: the ranks with other tokens of the same sequences; optional.

    Attributes:
        rank: index of this rank among the data-parallel ranks.
        context_ranks: the number of ranks with the same sequences.
        transfers: the number of transfers to the host.
    """

    def __init__(self, group: ProcessGroup | None, context_group: ProcessGroup | None = None) -> None:
        self.rank = 0 if group is None else group.rank()
        self.context_ranks = 1 if context_group is None else context_group.size()
        self.transfers = 0
        self._groups = [group for group in (context_group, group) if group is not None]
        self._layouts: dict[int, Layout] = {}
        self._room = BLOCK

    def counts_for(self, group: ProcessGroup | None) -> bool:
        """Return whether this rank sends a part that the ranks of a group share: the first rank of this exchange."""
        if group is None or not self._groups:
            return True
        ranks_of = torch.distributed.get_process_group_ranks
        members = {rank for own in self._groups for rank in ranks_of(own)}
        return next(rank for rank in ranks_of(group) if rank in members) == torch.distributed.get_rank()

    def read(self, layout: Layout, vector: Tensor) -> list[tuple[Layout, Tensor]]:
        """Return the layouts and vectors of all ranks, on the host: one transfer, or two if a vector does not fit.

        Raises:
            RuntimeError: a rank is still in `correct`, or an exchange failed.
        """
        if not self._groups:
            return [(layout, self._to_host(vector))]

        number = number_of(layout)
        marks, parts = self._gather_vectors(number, vector)
        late = next((rank for rank, mark in enumerate(marks) if mark < 0), None)
        if late is not None:
            raise RuntimeError(out_of_step(late, "Monitor.step", "correct"))
        if any(other not in self._layouts for other in marks):
            # Every rank has the same marks, so every rank enters this collective.
            self._layouts |= {number_of(found): found for found in self.of_all_ranks(layout)}
            room = max(filled_blocks(sum(entry.size for entry in found)) for found in self._layouts.values())
            if room > self._room:
                self._room = room
                marks, parts = self._gather_vectors(number, vector)
        layouts = [self._layouts[other] for other in marks]
        sizes = [sum(entry.size for entry in found) for found in layouts]
        return [(found, part[HEADER : HEADER + size]) for found, part, size in zip(layouts, parts, sizes, strict=True)]

    def _gather_vectors(self, number: int, vector: Tensor) -> tuple[list[int], Tensor]:
        """Gather the hash of each rank's layout, and the marked vectors, (P, room)."""
        # If the backends support host memory, copy to the host first and gather there.
        on_host = all(reads_host_memory(group) for group in self._groups)
        if on_host:
            vector = self._to_host(vector)
        first, *further = self._groups
        parts = gather_marked(vector, number, first, room=self._room)
        for group in further:
            parts = gather(parts, group).flatten(0, 1)
        if not on_host:
            parts = self._to_host(parts)
        return [int(other) for other in parts[:, 0].tolist()], parts

    def of_all_ranks(self, own: object) -> list[Any]:
        """Return an object of every rank, in the order of the vectors. It is a collective: every rank must call it."""
        found = [own]
        for group in self._groups:
            parts: list[Any] = [None] * group.size()
            with explained_failure(group):
                torch.distributed.all_gather_object(parts, found, group=group)
            found = [one for part in parts for one in part]
        return found

    def _to_host(self, vector: Tensor) -> Tensor:
        self.transfers += 1
        return vector.to("cpu")


def merged_metrics(ranks: Sequence[tuple[Layout, Tensor]], context_ranks: int = 1) -> dict[str, float]:
    """Compute the metrics of a step over all ranks: corrections, then losses, then the trainer's own, in their order.

    Args:
        ranks: the layout and the vector of each rank, on the host; the ranks of a context group are consecutive.
        context_ranks: the size of a context group.

    Raises:
        ValueError: the rows of two ranks differ.
    """
    statistics: dict[tuple[str, str], list[tuple[int, Statistics]]] = {}
    numbers: dict[str, list[float]] = {}
    for rank, (layout, vector) in enumerate(ranks):
        start, values = 0, vector.tolist()
        for entry in layout:
            end = start + entry.size
            if entry.source == "number":
                numbers.setdefault(entry.name, []).append(values[start])
            else:
                found = Statistics.from_vector(dict(entry.rows), vector[start:end])
                statistics.setdefault((entry.source, entry.name), []).append((rank // context_ranks, found))
            start = end

    # The ranks of a context group have the same sequences, so count their values once.
    metrics: dict[str, float] = {}
    for (source, name), found_parts in sorted(statistics.items(), key=lambda item: item[0][0]):
        may_repeat = context_ranks > 1 and source == "values"
        parts = _drop_repeated_parts(found_parts) if may_repeat else [part for _, part in found_parts]
        host = (merge_statistics(parts) if len(parts) > 1 else parts[0]).read()
        if source == "correction":
            metrics |= finalize(host)
        elif source == "lags":
            metrics |= known_metrics(host)
        elif source in ("loss", "first loss"):
            prefix = LOSS_PREFIX if source == "loss" else FIRST
            metrics |= {prefix + row: moments.mean for row, moments in host.moments.items()}
        else:
            metrics |= _distribution_metrics(name, host)
    return metrics | {name: sum(values) / len(values) for name, values in numbers.items()}


def _drop_repeated_parts(parts: Sequence[tuple[int, Statistics]]) -> list[Statistics]:
    """Select the parts of a tensor to count, as the ranks of a context group may have the same sequences.

    If the ranks of each context group pass equal values, these are per sequence, and only the first rank is counted.
    Equal parts have the same mean, standard deviation and extremes as one of them, so a coincidence among values per
    token changes only `nonfinite_count`.

    Args:
        parts: the index of the context group, and a part.
    """
    first = dict(reversed(parts))
    alike = all(part.pack().equal(first[context].pack()) for context, part in parts)
    return [first[context] for context in sorted(first)] if alike else [part for _, part in parts]


@lru_cache(maxsize=1024)
def _is_reserved(name: str) -> bool:
    """Return whether the health check would read a metric of this name as a metric of the correction."""
    if name == "step" or next(iter(bare_metrics({name: 0.0}))) != name:
        return True
    try:
        metric(name)
    except KeyError:
        return False
    return True


def _distribution_statistics(values: Tensor) -> Statistics:
    """Compute the number of non-finite values, and the moments and extremes of the finite ones."""
    flat = values.reshape(-1).to(STATISTICS_DTYPE)
    if flat.device.type == "cpu":
        # On the host use numpy, in a third of the time: the overhead of a torch op exceeds the arithmetic.
        array = flat.numpy()
        seen = array[np.isfinite(array)]
        mean = seen.sum() / max(len(seen), 1)
        deviations = seen - mean
        extremes = seen.min(initial=np.inf), seen.max(initial=-np.inf)
        row = (len(array) - len(seen), len(seen), mean, deviations @ deviations, *extremes)
        return Statistics.from_vector(_DISTRIBUTION_ROWS, torch.tensor(row, dtype=flat.dtype, device="cpu"))
    finite = flat.isfinite()
    parts = [(~finite).sum().reshape(1).to(flat.dtype), moments_of(flat, finite), extremes_of(flat, finite)]
    return Statistics.from_vector(_DISTRIBUTION_ROWS, torch.cat(parts))


def _distribution_metrics(name: str, host: HostStatistics) -> Mapping[str, float]:
    moments, extremes = host.moments["value"], host.extremes["value"]
    nothing = float("nan")
    metrics = {
        f"{name}/mean": moments.mean if moments.count else nothing,
        f"{name}/std": moments.std if moments.count else nothing,
        f"{name}/min": extremes.min if moments.count else nothing,
        f"{name}/max": extremes.max if moments.count else nothing,
    }
    missing = host.sums["nonfinite"]
    return metrics | ({f"{name}/nonfinite_count": missing} if missing else {})
