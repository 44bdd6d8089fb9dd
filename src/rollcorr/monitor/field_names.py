"""Tensors of other frameworks' batches, by the names in the table of frameworks: read by `Monitor.correct(batch)`.

A batch contains tensors by name: a mapping, a `TensorDict`, or a `DataProto` with its `batch` and `non_tensor_batch`.
No framework is imported. Names must match exactly, because they are ambiguous: `log_probs` is the trainer's policy
before the update in slime, and the policy being trained in SkyRL's losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rollcorr.layouts import local_lists, pack_lists
from rollcorr.rollout_log.framework_form import Framework
from rollcorr.rollout_log.frameworks import FRAMEWORKS, OWN
from rollcorr.rollout_log.schema import check_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_NEEDED = ("old_log_prob", "rollout_log_prob", "response_mask")
_CUSTOM = "your names"

# Columns of the rollout log that are taken from a padded batch of a known framework.
LOGGED = ("response_ids", "advantages", "group_id", "sequence_id")

# Frameworks whose batches can be corrected.
ACCEPTED: Mapping[str, Framework] = {
    framework.name.lower(): framework for framework in (OWN, *FRAMEWORKS) if framework.batch
}


class BatchFields(NamedTuple):
    """The tensors of a batch.

    Attributes:
        train_log_prob: (B, T), or (N,) when packed.
        rollout_log_prob: the same shape.
        response_mask: the same shape.
        cu_seqlens: (B + 1,) token offsets; `None` when padded.
        columns: further columns of the rollout log.
    """

    train_log_prob: Tensor
    rollout_log_prob: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor | None
    columns: dict[str, object]


def read_fields(
    batch: object, names: str | Mapping[str, str] | None = None, *, context_group: ProcessGroup | None = None
) -> BatchFields:
    """Return the tensors of a framework's batch.

    Args:
        batch: a mapping, a `TensorDict` or a `DataProto`.
        names: a framework of `ACCEPTED`, or column of the rollout log → name in the batch. By default, the framework
            whose names are all present.
        context_group: for lists of split log-probs and full masks: the ranks with the other tokens.

    Raises:
        TypeError: `batch` is not a batch.
        ValueError: the framework is unknown, fields are missing, or several frameworks match.
    """
    held = _batch_values(batch)
    found = _detect_names(held, names)
    train, rollout, mask = (
        next(held[name] for name in group if held.get(name) is not None) for group in _required_names(found)
    )
    logged = [
        column for column in found.tensors if column not in _NEEDED and (found.name == _CUSTOM or column in LOGGED)
    ]
    columns = {column: held[name] for column in logged for name in found.names(column) if held.get(name) is not None}
    if "cu_seqlens" in held and held["cu_seqlens"] is not None:
        return BatchFields(train, rollout, mask, torch.as_tensor(held["cu_seqlens"], device=train.device), columns)
    if isinstance(train, Tensor):
        # A mask of tokens has the shape of the log-probs; a mask of sequences counts for all of their tokens.
        for further in (held[name] for name in found.further_masks if held.get(name) is not None):
            mask = (mask != 0) & ((further if further.dim() == mask.dim() else further.unsqueeze(-1)) != 0)
        return BatchFields(train, rollout, mask, None, columns)

    # Lists contain one tensor per sequence. Masks cover full responses, but log-probs may be a context rank's slices.
    mask = [torch.as_tensor(one, device=train[0].device) for one in mask]
    if context_group is not None and context_group.size() > 1 and found.total_lengths is not None:
        (mask,) = local_lists(
            mask,
            total_lengths=[int(length) for length in held[found.total_lengths]],
            ranks=context_group.size(),
            rank=context_group.rank(),
        )
    packed = pack_lists(train, rollout, mask)
    train, rollout, mask = packed.tensors
    return BatchFields(train, rollout, mask, packed.cu_seqlens, {})


def _batch_values(batch: object) -> dict[str, Any]:
    """Return the values of a batch by name."""
    tensors, others = getattr(batch, "batch", None), getattr(batch, "non_tensor_batch", None)
    if others is not None:
        return {**({} if tensors is None else _batch_values(tensors)), **dict(others)}
    keys = getattr(batch, "keys", None)
    if keys is None or isinstance(batch, Tensor) or not hasattr(batch, "__getitem__"):
        raise TypeError(
            "expected train_log_prob, rollout_log_prob and response_mask, or one batch that holds them by name; got "
            f"{type(batch).__name__}"
        )
    return {str(name): batch[name] for name in keys()}


def _detect_names(held: Mapping[str, Any], names: str | Mapping[str, str] | None) -> Framework:
    """Return the requested names, or the names of the one framework whose names are all present."""
    if isinstance(names, Mapping):
        check_columns(names)
        without = [column for column in _NEEDED if column not in names]
        if without:
            raise ValueError(f"fields has no {', '.join(without)}; it maps {', '.join(names)}")
        candidates: Mapping[str, Framework] = {_CUSTOM: Framework(name=_CUSTOM, version="", tensors=names)}
    elif names is None or names in ACCEPTED:
        candidates = ACCEPTED if names is None else {names: ACCEPTED[names]}
    else:
        raise ValueError(f"no framework is called {names!r}; there are {', '.join(ACCEPTED)}")

    missing = {framework: _missing_tensors(held, known) for framework, known in candidates.items()}
    fitting = [framework for framework, lacking in missing.items() if not lacking]
    if len(fitting) > 1:
        raise ValueError(f"the batch has the fields of {' and of '.join(fitting)}; say which: fields={fitting[0]!r}")
    if fitting:
        return candidates[fitting[0]]

    # If all names of a framework are present, the error suggests a fix for each field that is `None`.
    listed = ", ".join(name if value is not None else f"{name} (None)" for name, value in held.items())
    for lacking in missing.values():
        if all(lacking.values()):
            raise ValueError(f"{'; '.join(lacking.values())}; the batch has {listed}")
    wanted = "; ".join(
        f"{framework}: {', '.join(' or '.join(group) for group in _required_names(known))}"
        for framework, known in candidates.items()
    )
    raise ValueError(f"the batch has {listed}, and no framework's fields. {wanted}")


def _required_names(names: Framework) -> tuple[tuple[str, ...], ...]:
    """Return the names of each tensor that a correction needs."""
    return tuple(names.names(column) for column in _NEEDED)


def _missing_tensors(held: Mapping[str, Any], names: Framework) -> dict[str, str]:
    """Return missing tensors: names → a fix if the value is None (TRL: not computed), or "" if absent."""
    fixes = (  # in the order of `_required_names`
        "compute it first (the trainer's forward pass over this batch, before the update)",
        "let the sampler report the log-probs of its tokens",
        "it marks the sampled tokens with 1",
    )
    missing = {}
    for group, fix in zip(_required_names(names), fixes, strict=True):
        if all(held.get(name) is None for name in group):
            given = [name for name in group if name in held]
            missing[" or ".join(group)] = f"{given[0]} is None: {fix}" if given else ""
    return missing
