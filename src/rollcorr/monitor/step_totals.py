"""What one training step adds up: statistics of corrections and losses, and the trainer's own numbers.

Everything stays where it is until the step ends. Then it is one float64 vector, with a layout that says what is where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.mergeable_statistics import (
    STATISTICS_DTYPE,
    HostStatistics,
    Statistics,
    extremes_of,
    merge_statistics,
    moments_of,
)
from rollcorr.core.metric_registry import finalize, metric
from rollcorr.diagnostics.health.evidence import bare_metrics

Source = Literal["correction", "shared correction", "loss", "values", "number"]
"""Where a part comes from. A shared correction is of all ranks already; values have a distribution."""

LOSS_PREFIX = "actor/"


class LayoutEntry(NamedTuple):
    """A part of a rank's vector: where it comes from, what it is called, its rows by kind, and how long it is."""

    source: Source
    name: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    size: int


Layout = tuple[LayoutEntry, ...]


class StepTotals:
    """The sums of a step that is not over."""

    def __init__(self) -> None:
        self._statistics: dict[tuple[Source, str], list[Statistics]] = {}
        self._numbers: dict[str, Tensor | float] = {}

    def add_statistics(self, source: Source, statistics: Statistics) -> None:
        """Add what a correction or a loss has measured.

        Raises:
            ValueError: it has other rows than what this step has already: another configuration, or other details.
        """
        parts = self._statistics.setdefault((source, ""), [])
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
        """Add a number, or a tensor or list of them, which then has a mean, a spread and extremes.

        Raises:
            TypeError: it is neither.
            ValueError: the name belongs to the library, or was given in this step already.
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
            self._statistics["values", name] = [_distribution(numbers)]

    def pack(self) -> tuple[Layout, Tensor]:
        """Everything as one vector, on the device of the data, and what is where in it."""
        entries: list[tuple[LayoutEntry, Tensor]] = []
        for (source, name), parts in self._statistics.items():
            merged = parts[0] if len(parts) == 1 else merge_statistics(parts)
            packed = merged.pack()
            rows = tuple((kind, tuple(names)) for kind, names in merged.names.items())
            entries.append((LayoutEntry(source, name, rows, packed.numel()), packed))
        for name, value in self._numbers.items():
            if isinstance(value, Tensor):
                entries.append((LayoutEntry("number", name, (), 1), value.reshape(1).to(STATISTICS_DTYPE)))
        on_host = {name: value for name, value in self._numbers.items() if not isinstance(value, Tensor)}
        if on_host:
            numbers = torch.tensor(list(on_host.values()), dtype=STATISTICS_DTYPE, device="cpu")
            entries += [
                (LayoutEntry("number", name, (), 1), number)
                for name, number in zip(on_host, numbers.split(1), strict=True)
            ]

        # What is on the host joins the rest in one copy.
        device = next((part.device for _, part in entries if part.device.type != "cpu"), torch.device("cpu"))
        there = [(entry, part) for entry, part in entries if part.device == device]
        elsewhere = [(entry, part) for entry, part in entries if part.device != device]
        tensors = [part for _, part in there]
        if elsewhere:
            tensors.append(torch.cat([part.cpu() for _, part in elsewhere]).to(device))
        vector = torch.cat(tensors) if tensors else torch.zeros(0, dtype=STATISTICS_DTYPE, device=device)
        return tuple(entry for entry, _ in [*there, *elsewhere]), vector


def merged_metrics(ranks: Sequence[tuple[Layout, Tensor]], own: int) -> dict[str, float]:
    """The metrics of a step over all ranks: corrections, then losses, then the trainer's own, in the order given.

    Args:
        ranks: the layout and the vector of each, on the host.
        own: which of them is this one.

    Raises:
        ValueError: two ranks have measured differently.
    """
    statistics: dict[tuple[str, str], list[Statistics]] = {}
    numbers: dict[str, list[float]] = {}
    for rank, (layout, vector) in enumerate(ranks):
        for entry, part in zip(layout, vector.split([entry.size for entry in layout]), strict=True):
            if entry.source == "number":
                numbers.setdefault(entry.name, []).append(float(part))
            elif entry.source == "shared correction":
                # Every rank has these of all ranks: once is enough.
                if rank == own:
                    key = ("correction", entry.name)
                    statistics.setdefault(key, []).append(Statistics.from_vector(dict(entry.rows), part))
            else:
                key = (entry.source, entry.name)
                statistics.setdefault(key, []).append(Statistics.from_vector(dict(entry.rows), part))

    read = {key: (merge_statistics(parts) if len(parts) > 1 else parts[0]).read() for key, parts in statistics.items()}
    metrics: dict[str, float] = {}
    if ("correction", "") in read:
        metrics |= finalize(read["correction", ""])
    if ("loss", "") in read:
        metrics |= {LOSS_PREFIX + name: moments.mean for name, moments in read["loss", ""].moments.items()}
    for (source, name), host in read.items():
        if source == "values":
            metrics |= _distribution_metrics(name, host)
    return metrics | {name: sum(values) / len(values) for name, values in numbers.items()}


@lru_cache(maxsize=1024)
def _is_reserved(name: str) -> bool:
    """Whether the health check would take a metric of this name for one of the correction's."""
    if name == "step" or next(iter(bare_metrics({name: 0.0}))) != name:
        return True
    try:
        metric(name)
    except KeyError:
        return False
    return True


def _distribution(values: Tensor) -> Statistics:
    """Moments and extremes of the finite values, and how many are not finite."""
    flat = values.reshape(-1).to(STATISTICS_DTYPE)
    finite = flat.isfinite()
    return Statistics.of(
        sums={"nonfinite": (~finite).sum()},
        moments={"value": moments_of(flat, finite)},
        extremes={"value": extremes_of(flat, finite)},
    )


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
