"""What the hot path does not pay for: quantiles, and the worst tokens and sequences. A second read, on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.boundary import truth
from rollcorr.core.detail_rows import histogram_of, top_entries, top_indices
from rollcorr.core.layout import sequence_count
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.core.ratios import classify_tokens, token_log_ratio
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.cpu.kernel import cpu_detail, why_not
from rollcorr.kernels.correction.torch.blocks import in_threads, threads_for, token_blocks
from rollcorr.kernels.correction.torch.table import Block, SequenceTable, joined


@dataclass(frozen=True, eq=False, kw_only=True)
class Detail:
    """How the worst tokens and sequences are to be named.

    Attributes:
        sequence_offset: index of the batch's first sequence: what came before it on other ranks, shards and
            micro-batches, so that merged entries can be told apart.
        position_ids: where in its sequence each token stands, in the shape of the log-probs; needed when a slice of
            every sequence is given. None: the column when padded, the place in the sequence when packed.
    """

    sequence_offset: int = 0
    position_ids: Tensor | None = None


def token_detail(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    detail: Detail,
    *,
    neutral: bool,
    cu_seqlens: Tensor | None = None,
    compiled_for: RolloutCorrectionConfig | None = None,
) -> tuple[Statistics, SequenceTable]:
    """Read every token once for what is shown in detail: histograms of d and of the weights, and the worst tokens.

    Args:
        train_log_prob: log π, nats. (B, T), or (N,) when packed; any floating dtype.
        rollout_log_prob: log μ, nats. Same shape.
        mask: non-zero on response tokens. Same shape; any dtype.
        weights: applied weights before normalization, same shape; None if there are none.
        detail: how tokens are named.
        neutral: `nonfinite="neutral"` holds, so missing tokens have weights too.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        compiled_for: the configuration, where compiled C may read the batch if it can. None: torch reads it.

    Returns:
        The histograms and the worst tokens, and the per-sequence table that `sequence_detail` reads.
    """
    sequences = sequence_count(mask, cu_seqlens=cu_seqlens)
    if compiled_for is not None:
        batch = Batch(train_log_prob, rollout_log_prob, mask, cu_seqlens)
        if why_not(batch, compiled_for) is None:
            return _compiled(batch, compiled_for, weights, detail)
    mask = truth(mask)

    def read_share(blocks: list[Block]) -> tuple[Statistics, SequenceTable]:
        """What one thread makes of its share of the blocks."""
        table = SequenceTable(_COLUMNS, sequences, mask.device)
        per_block = []
        for block in blocks:
            at = block.at
            valid = mask[at]
            classes = classify_tokens(train_log_prob[at], rollout_log_prob[at], valid)
            compared = classes.measured | classes.zero_probability
            d = token_log_ratio(train_log_prob[at], rollout_log_prob[at], classes.measured)

            # One row for each column of the table, in the same order.
            columns = (d, classes.zero_probability, compared)
            table.add(torch.stack([column.double() for column in columns]), block)

            histograms = {"log_ratio": histogram_of(d, classes.measured)}
            if weights is not None:
                histograms["weight"] = histogram_of(weights[at], valid if neutral else compared)

            # A token of probability zero is among the worst, as −∞. Up to here its d was 0, and the column `zero`
            # counted it.
            d.masked_fill_(classes.zero_probability, -torch.inf)
            worst = _worst_tokens(d, compared, block, detail, cu_seqlens)
            per_block.append(Statistics.of(histograms=histograms, tops={"tokens": worst}))
        return merge_statistics(per_block), table

    passes = in_threads(read_share, list(token_blocks(mask, cu_seqlens)), threads_for(mask))

    # Each thread filled a table of all sequences from its own blocks; together they are whole.
    statistics, tables = zip(*passes, strict=True)
    return merge_statistics(statistics), joined(tables)


_COLUMNS = ("log_ratio", "zero", "compared")
"""Of the per-sequence table, in the order in which they are summed."""


def _compiled(
    batch: Batch, config: RolloutCorrectionConfig, weights: Tensor | None, detail: Detail
) -> tuple[Statistics, SequenceTable]:
    """What `token_detail` returns, read in compiled C."""
    seen = cpu_detail(batch, config, weights)
    table = SequenceTable(_COLUMNS, batch.sequences, batch.mask.device)
    table.neighbors(_COLUMNS[0], _COLUMNS[-1]).copy_(seen.sums)

    # C names a token by its place in its sequence.
    value, sequence, at = seen.worst.unbind(-1)
    exists = sequence >= 0
    if detail.position_ids is not None and batch.mask.numel():
        row, place = sequence.clamp(min=0).long(), at.clamp(min=0).long()
        start = row * batch.mask.shape[-1] if batch.cu_seqlens is None else batch.cu_seqlens[row]
        at = detail.position_ids.flatten()[start + place]
    worst = top_entries(value, sequence + detail.sequence_offset, at, exists)

    histograms = {"log_ratio": seen.log_ratio}
    if weights is not None:
        histograms["weight"] = seen.weight
    return Statistics.of(histograms=histograms, tops={"tokens": worst}), table


def sequence_detail(table: SequenceTable, detail: Detail) -> Statistics:
    """The histogram of S_i, and the worst sequences by |S_i|, from the sums of whole sequences."""
    tokens = table["compared"]
    product = table["log_ratio"].masked_fill(table["zero"] > 0, -torch.inf)
    found, exists = top_indices(product, tokens > 0)
    worst = top_entries(product[found], found + detail.sequence_offset, tokens[found], exists)
    return Statistics.of(
        histograms={"sequence_log_ratio": histogram_of(product, tokens > 0)}, tops={"sequences": worst}
    )


def _worst_tokens(d: Tensor, mask: Tensor, block: Block, detail: Detail, cu_seqlens: Tensor | None) -> Tensor:
    """(TOP, 3): log-ratio, sequence and position of a block's worst tokens."""
    found, exists = top_indices(d.flatten(), mask.flatten())
    start = block.at.start
    ids = block.ids()
    if ids is not None and cu_seqlens is not None:
        sequence = ids[found]
        position = found + start - cu_seqlens[sequence]
    else:
        width = max(1, d.shape[1])
        sequence, position = start + found // width, found % width
    if detail.position_ids is not None:
        position = detail.position_ids[block.at].flatten()[found]
    return top_entries(d.flatten()[found], sequence + detail.sequence_offset, position, exists)
