"""What every implementation is given and gives back, with the tokens of a batch in one row."""

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
        outside: true where the sampled token was not in its kept set and was taken in. Bool.
        entropy: of the distribution that `log_prob` is of: over the vocabulary, or over the kept set. Nats; NaN where
            it was not asked for and where the mask is false. None without a request.
        log_kept_mass: log of the kept set's mass in the whole softmax, nats, without a gradient; NaN and None as above.
    """

    log_prob: Tensor
    outside: Tensor
    entropy: Tensor | None
    log_kept_mass: Tensor | None


class LogSums(NamedTuple):
    """What a softmax of each token comes down to, over some entries z_j; parts of a vocabulary merge exactly.

    Attributes:
        largest: max z, −inf without entries. (N,), no gradient.
        log_sum: log Σ exp(z_j − max z). (N,)
        target: z_a, or 0 if a is not among the entries. (N,)
        entropy: −Σ p_j log p_j, p over these entries, of every token or of those measured. None if not asked for.
    """

    largest: Tensor
    log_sum: Tensor
    target: Tensor
    entropy: Tensor | None

    @property
    def log_prob(self) -> Tensor:
        """log p(a), (N,): exactly 0 when a alone has weight."""
        return (self.target - self.largest) - self.log_sum


@dataclass(frozen=True)
class Problem:
    """The arguments of `rollcorr.kernels.linear_logprob.linear_log_prob`, checked, with N tokens in one row.

    Attributes:
        hidden: (N, d).
        weight: (V, d), or this rank's slice of it; with `accumulate_into` a node of the graph (`asked_for_gradient`).
        token_ids: (N,) int64.
        bias: (V,) or None.
        temperature: a number, or (N,).
        mask: (N,) bool, or None for all tokens.
        kept: N sets, or None for the whole vocabulary.
        entropy: whether it is wanted, or where, (N,) bool.
        log_kept_mass: as `entropy`.
        accumulate_into: (V, d), or None for a gradient of its own.
        group: ranks that hold the other slices of the head, or None.
        first_id: the id of the slice's first row.
        chunk: vocabulary entries whose logits are live at once.
        precision: of the products, where operands are float32.
        compact: whether tokens that do not count are dropped before the products, which reads how many they are.
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
        """The type of logits, sums and results: float32, or float64 if an operand is."""
        return wide_type(self.hidden, self.weight)

    def at(self, rows: Tensor | None) -> Problem:
        """The same of some of the tokens; rows None are all of them."""
        if rows is None:
            return self
        names = ("hidden", "token_ids", "temperature", "mask", "entropy", "log_kept_mass")
        part: dict[str, Any] = {name: at_rows(getattr(self, name), rows) for name in names}
        return replace(self, kept=self.kept and self.kept.select(rows), **part)

    def harmless(self, counts: Tensor) -> Problem:
        """The same with hidden states 0 and temperatures 1 where a token does not count, to hide what is there."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.masked_fill(~counts, 1.0)
        return replace(self, hidden=self.hidden.masked_fill(~counts.unsqueeze(-1), 0.0), temperature=temperature)


def wide_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What logits of these operands are held in: float32 at least."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def at_rows(per_token: PerToken, rows: Tensor | None) -> PerToken:
    """Values of some of the tokens: rows None are all of them, and what is no tensor is the same for each."""
    return per_token if rows is None or not isinstance(per_token, Tensor) else cast("PerToken", per_token[rows])


def rows_where(counts: Tensor) -> Tensor | None:
    """Positions of the tokens that count, None for all. How many there are is data: this waits for the device."""
    rows = torch.where(counts)[0]
    return None if rows.numel() == counts.numel() else rows


def placed(values: Tensor, rows: Tensor | None, tokens: int, fill: float) -> Tensor:
    """Values of some of the tokens, (tokens,), with `fill` at the others; rows None are all of them."""
    return values if rows is None else values.new_full((tokens,), fill).index_copy(0, rows, values)


def column(per_token: float | Tensor) -> float | Tensor:
    """A temperature as what divides (N, …) logits."""
    return per_token.unsqueeze(-1) if isinstance(per_token, Tensor) else per_token
