"""Supports: the tokens a sampler could have drawn, recomputed from logits or recorded as kept sets.

Logits are (…, V), in any float dtype; a support is bool of that shape. Logits may contain −inf (removed by an earlier
filter), which filters never keep. Logits that tie at a boundary are kept together, so a support does not depend on the
order in which a sort puts ties; engines that break ties keep one of them.

Recomputed supports are fragile: logits differ slightly between engines, tokens at the boundary fall in or out, and a
sampled token may lie outside. `with_sampled` adds such a token and reports its position. Recorded sets (`KeptSets`) do
not have this problem.

No function reads tensor values, unless its docstring states it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcorr.core.boundary import (
    bounded_offsets,
    check_count,
    check_cu_seqlens,
    check_tensors,
    in_host_memory,
    truth,
    usable_ids,
)
from rollcorr.core.layout import offsets_of, sequence_ids
from rollcorr.core.ratios import at_least_float32

Filter = Callable[[Tensor], Tensor]
"""Function from logits (…, V), −inf where already removed, to the bool support of the remaining tokens."""


def top_k_support(logits: Tensor, top_k: int) -> Tensor:
    """Return {j : z_j ≥ the k-th largest z}: k tokens, plus ties with the last. (…, V) bool.

    Raises:
        ValueError: `top_k` is below 1.
    """
    if top_k < 1:
        raise ValueError(f"top_k must be >= 1, got {top_k}; leave the filter out for no limit")
    smallest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return (logits >= smallest) & (logits > -torch.inf)


def top_p_support(logits: Tensor, top_p: float) -> Tensor:
    """Return the smallest set of most likely tokens with mass ≥ p, plus ties with its last. (…, V) bool.

    Probabilities are softmax(logits), so tokens removed by an earlier filter have mass 0. Sums run in float64.

    Raises:
        ValueError: `top_p` is outside (0, 1].

    Source: Holtzman et al. (2020), "The Curious Case of Neural Text Degeneration".
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    descending = at_least_float32(logits).sort(dim=-1, descending=True).values
    probability = descending.softmax(-1, dtype=torch.float64)
    inside = probability.cumsum(-1) - probability < top_p
    smallest = descending.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    return (at_least_float32(logits) >= smallest) & (logits > -torch.inf)


def min_p_support(logits: Tensor, min_p: float) -> Tensor:
    """Return {j : p_j ≥ m max p} = {j : z_j ≥ max z + log m}. (…, V) bool.

    Raises:
        ValueError: `min_p` is outside (0, 1].
    """
    if not 0 < min_p <= 1:
        raise ValueError(f"min_p must be in (0, 1], got {min_p}; leave the filter out for 0")
    wide = at_least_float32(logits)
    return (wide >= wide.amax(-1, keepdim=True) + math.log(min_p)) & (logits > -torch.inf)


def sequential_support(logits: Tensor, filters: Sequence[Filter]) -> Tensor:
    """Apply each filter to the renormalized output of the previous one (transformers, vLLM, llama.cpp). (…, V) bool."""
    support = logits > -torch.inf
    for keep in filters:
        support = keep(logits.masked_fill(~support, -torch.inf))
    return support


def joint_support(logits: Tensor, filters: Sequence[Filter]) -> Tensor:
    """Apply every filter to the same full softmax, and intersect the results (SGLang). (…, V) bool."""
    support = logits > -torch.inf
    for keep in filters:
        support = support & keep(logits)
    return support


def with_sampled(support: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Add every sampled token to the support, and report which were outside before: (…, V) and (…) bool.

    Otherwise the trainer's probability of a token that the engine did sample would be 0, and its loss infinite.

    Raises:
        ValueError: a token id is outside the support's 0 … V − 1, in host memory.
    """
    index = usable_ids("token_ids", token_ids, (0, support.shape[-1])).unsqueeze(-1)
    outside = ~support.gather(-1, index).squeeze(-1)
    return support.scatter(-1, index, True), outside


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The keep-sampling-mask: for each token the ids that the engine could have drawn, in CSR form.

    Token t kept `ids[offsets[t] : offsets[t + 1]]`. Tokens of all sequences follow each other, as in a packed batch.

    Attributes:
        ids: (M,) int32.
        offsets: (N + 1,) int64, from 0 to M, never decreasing; else a ValueError in host memory.

    Source: DeepSeek-AI (2025), "DeepSeek-V3.2", keep sampling mask.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        check_tensors(**{"kept ids": self.ids, "kept offsets": self.offsets})
        for name, tensor, dtype in (("ids", self.ids, torch.int32), ("offsets", self.offsets, torch.int64)):
            if tensor.dim() != 1 or tensor.dtype != dtype:
                raise ValueError(
                    f"kept {name} must be a vector of {dtype}, got {tuple(tensor.shape)} of {tensor.dtype}"
                )
        if self.offsets.numel() < 1:
            raise ValueError("kept offsets must have one entry more than tokens, so at least one; got none")
        if in_host_memory(self.offsets):
            check_cu_seqlens(self.offsets, self.ids.numel(), "kept offsets", of="ids")

    def __len__(self) -> int:
        """Return N, the number of tokens."""
        return self.offsets.numel() - 1

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], *, device: torch.device | str | None = None) -> KeptSets:
        """Create kept sets from one list of ids per token.

        Args:
            sets: N lists of token ids, in the order of the tokens.
            device: device of the tensors; optional, the default device of torch if omitted.
        """
        sizes = torch.tensor([0, *map(len, sets)], dtype=torch.int64, device=device)
        ids = torch.tensor([token for kept in sets for token in kept], dtype=torch.int32, device=device)
        return cls(ids, sizes.cumsum(0))

    def to(self, device: torch.device | str) -> KeptSets:
        """Return the same sets on another device."""
        # The constructor reads offsets in host memory, so wait for a copy from a device to finish.
        to_device = torch.device(device).type != "cpu"
        return KeptSets(self.ids.to(device, non_blocking=to_device), self.offsets.to(device, non_blocking=to_device))

    def padded(self, mask: Tensor) -> KeptSets:
        """Convert the sets of a packed batch to the padded layout: tokens where `mask` is false have empty sets.

        Args:
            mask: (B, T) with as many nonzero entries as there are sets.

        Raises:
            ValueError: their number differs from N, or the mask contains a negative or non-finite value in host memory.
        """
        flat = truth(mask).flatten()
        check_count(self.offsets[1:], flat, "mask")
        sizes = torch.cat([self.offsets.diff(), self.offsets.new_zeros(1)])
        packed = (flat.cumsum(0) - 1).clamp(0, len(self))
        return KeptSets(self.ids, offsets_of(sizes[packed].masked_fill(~flat, 0)))

    def select(self, rows: Tensor) -> KeptSets:
        """Return the sets of selected tokens. Syncs, because sizes depend on the data.

        Args:
            rows: positions of tokens, 0 … N − 1, of shape (n,), in the output order.

        Raises:
            ValueError: a position is outside 0 … N − 1, in host memory.
        """
        rows = usable_ids("rows", rows, (0, len(self)))
        sizes = self.offsets.diff()[rows]
        offsets = offsets_of(sizes)
        first = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], sizes)
        return KeptSets(self.ids[first + torch.arange(first.numel(), device=first.device)], offsets)


def concatenate_kept_sets(parts: Sequence[KeptSets]) -> KeptSets:
    """Concatenate the sets of one or more batches, in order."""
    sizes = torch.cat([part.offsets.diff() for part in parts])
    return KeptSets(torch.cat([part.ids for part in parts]), offsets_of(sizes))


def kept_sets_of_support(support: Tensor) -> KeptSets:
    """Return the true entries of a dense (…, V) support, e.g. transformers' finite scores. Syncs: sizes are data."""
    rows = support.reshape(-1, support.shape[-1])
    return KeptSets(torch.where(rows)[1].to(torch.int32), offsets_of(rows.sum(-1)))


def usable_kept_sets(kept: KeptSets, *ranges: tuple[int, int], mask: Tensor | None = None) -> KeptSets:
    """Return sets with ids and offsets within the data: checked in host memory, bounded on a device.

    Args:
        kept: one set per token.
        ranges: of ids, as in `rollcorr.core.boundary.usable_ids`.
        mask: one bool per token, any shape; where it is false, ids may have any value. Defaults to all true.

    Raises:
        ValueError: an id in host memory is outside all ranges.
    """
    offsets = bounded_offsets(kept.offsets, kept.ids.numel())
    try:
        ids = usable_ids("kept.ids", kept.ids, *ranges)
    except ValueError:
        if mask is None:
            raise

        # Selecting the entries in the mask costs a pass over all of them, so do it only if an id is invalid.
        of_entry = mask.flatten()[sequence_ids(kept.ids, cu_seqlens=offsets)]
        ids = usable_ids("kept.ids", kept.ids, *ranges, mask=of_entry)
    return KeptSets(ids.to(torch.int32), offsets)


def check_kept_sets(kept: KeptSets, tokens: int, vocabulary: int) -> None:
    """Check the number of tokens, nondecreasing offsets, ids inside the vocabulary, and that no id is duplicated.

    Reads values (a device sync): call it in loaders and on request, not on the step path.

    Args:
        kept: the sets.
        tokens: N, the number of tokens in the batch.
        vocabulary: V, the number of ids.

    Raises:
        ValueError: names the first invalid token.
    """
    if len(kept) != tokens:
        raise ValueError(f"kept sets are of {len(kept)} tokens, the batch has {tokens}; give offsets for every token")

    # In host memory the constructor checks the offsets.
    kept = kept.to("cpu")
    ids = usable_ids("kept.ids", kept.ids, (0, vocabulary))
    token = sequence_ids(ids, cu_seqlens=kept.offsets)

    # After sorting by token and id, equal neighbors are duplicates.
    key, _ = (token * vocabulary + ids).sort()
    twice = key[1:] == key[:-1]
    if twice.any():
        first = int(key[int(twice.int().argmax())])
        raise ValueError(f"kept id {first % vocabulary} of token {first // vocabulary} is listed twice")
