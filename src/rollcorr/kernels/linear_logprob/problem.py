"""Input and output of every implementation, with the tokens of a batch in one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from rollcorr.core.sampling import KeptSets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PerToken = TypeVar("PerToken", bound="Tensor | float | None")
Context = Any
"""What autograd hands to the two halves of a function; torch has no type that allows its attributes."""

CHUNK_ENTRIES = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Logits that are live at once, by device: what stays in a CPU's cache, and what keeps a GPU busy (8 MB and 256 MB)."""

SMALLEST_CHUNK = 256
"""Vocabulary entries; below this a matrix product is slower than its operands' way from memory."""


class LinearLogProb(NamedTuple):
    """Log-probs of tokens from hidden states, in the shape of the token ids.

    Attributes:
        log_prob: log p(a), nats, float32 or wider; 0 where the mask is false.
        outside: true where the sampled token was not in its kept set, and was added to it. Bool.
        entropy: optional; entropy of the distribution of `log_prob`: over the vocabulary, or over the kept set. Nats;
            NaN where not requested and where the mask is false. Absent without a request.
        log_kept_mass: optional; log of the kept set's mass in the full softmax, nats, without a gradient; NaN as above.
    """

    log_prob: Tensor
    outside: Tensor
    entropy: Tensor | None
    log_kept_mass: Tensor | None


class LogSums(NamedTuple):
    """Sufficient statistics of each token's softmax over some entries z_j; parts of a vocabulary merge exactly.

    Attributes:
        largest: max z, −inf without entries. (N,), no gradient.
        log_sum: log Σ exp(z_j − max z). (N,)
        target: z_a, or 0 if a is not among the entries. (N,)
        entropy: optional; −Σ p_j log p_j, p over these entries, of every token or of the measured ones. Absent unless
            requested.
    """

    largest: Tensor
    log_sum: Tensor
    target: Tensor
    entropy: Tensor | None

    @property
    def log_prob(self) -> Tensor:
        """Return log p(a), (N,): exactly 0 when only a has weight."""
        return (self.target - self.largest) - self.log_sum


@dataclass(frozen=True)
class Problem:
    """The arguments of `rollcorr.kernels.linear_logprob.linear_log_prob`, checked, with N tokens in one row.

    Attributes:
        hidden: (N, d).
        weight: (V, d), or this rank's slice of it; with `accumulate_into` a graph node (`asked_for_gradient`).
        token_ids: (N,) int64.
        bias: optional; (V,).
        temperature: a number, or (N,).
        mask: optional; (N,) bool. The default is all tokens.
        kept: optional; N sets. The default is the full vocabulary.
        entropy: whether to compute it, or for which tokens, (N,) bool.
        log_kept_mass: as `entropy`.
        accumulate_into: optional; (V, d). The default is a new gradient.
        group: optional; ranks with the other slices of the head.
        first_id: the id of the slice's first row.
        chunk: number of vocabulary entries whose logits are in memory at once.
        precision: precision of the products, where operands are float32.
        compact: whether to drop tokens that do not count before the products, which reads their number.
    """

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    mask: Tensor | None
    kept: KeptSets | None
    entropy: Tensor | bool
    log_kept_mass: Tensor | bool
    accumulate_into: Tensor | None
    group: ProcessGroup | None
    first_id: int
    chunk: int | None
    precision: Literal["float32", "tf32"] = "float32"
    compact: bool = True

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits, sums and results: float32, or float64 if an operand is float64."""
        return wide_type(self.hidden, self.weight)

    def at(self, rows: Tensor | None) -> Problem:
        """Return the problem for some of the tokens; all of them by default (rows is `None`)."""
        if rows is None:
            return self
        names = ("hidden", "token_ids", "temperature", "mask", "entropy", "log_kept_mass")
        part: dict[str, Any] = {name: at_rows(getattr(self, name), rows) for name in names}
        return replace(self, kept=self.kept and self.kept.select(rows), **part)

    def harmless(self, counts: Tensor) -> Problem:
        """Return the problem with hidden states 0 and temperatures 1 on tokens that do not count, to hide them."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.masked_fill(~counts, 1.0)
        return replace(self, hidden=self.hidden.masked_fill(~counts.unsqueeze(-1), 0.0), temperature=temperature)


def wide_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the logits of these operands: float32 at least."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def at_rows(per_token: PerToken, rows: Tensor | None) -> PerToken:
    """Return values of some of the tokens, or of all if `rows` is `None`; a number is the same for each token."""
    return per_token if rows is None or not isinstance(per_token, Tensor) else cast("PerToken", per_token[rows])


def rows_where(counts: Tensor) -> Tensor | None:
    """Return positions of the tokens that count, `None` for all. Their number is data: this waits for the device."""
    rows = torch.where(counts)[0]
    return None if rows.numel() == counts.numel() else rows


def placed(values: Tensor, rows: Tensor | None, tokens: int, fill: float) -> Tensor:
    """Return values of some of the tokens in a (tokens,) tensor, with `fill` elsewhere; `None` rows are all tokens."""
    return values if rows is None else values.new_full((tokens,), fill).index_copy(0, rows, values)


def column(per_token: float | Tensor) -> float | Tensor:
    """Return a temperature as a divisor of (N, …) logits."""
    return per_token.unsqueeze(-1) if isinstance(per_token, Tensor) else per_token
