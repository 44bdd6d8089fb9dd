"""Statistics outside of the hot path: quantiles, and the worst tokens and sequences. They need a second read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.boundary import truth
from rollcorr.core.detail_rows import histogram_of, top_entries, top_indices
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.core.ratios import classify_tokens, token_log_ratio
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.cpu.kernel import cpu_detail, why_not
from rollcorr.kernels.correction.torch.blocks import read_blocks
from rollcorr.kernels.correction.torch.table import Block, SequenceTable


@dataclass(frozen=True, eq=False, kw_only=True)
class Detail:
    """Naming of the worst tokens and sequences.

    Attributes:
        sequence_offset: index of the batch's first sequence: the number of sequences on earlier ranks, shards and
            micro-batches. It distinguishes merged entries.
        position_ids: position of each token in its sequence, in the shape of the log-probs; required for a slice of
            every sequence. The default is the column when padded, and the position in the sequence when packed.
    """

    sequence_offset: int = 0
    position_ids: Tensor | None = None


def token_detail(
    batch: Batch, config: RolloutCorrectionConfig, weights: Tensor | None, detail: Detail, *, compiled: bool
) -> tuple[Statistics, SequenceTable]:
    """Compute details in one read of the tokens: histograms of d and of the weights, and the worst tokens.

    Args:
        batch: the corrected batch; the mask may have any dtype.
        config: decides how missing log-probs count.
        weights: optional; applied weights before normalization, in the mask's shape.
        detail: how to name tokens.
        compiled: whether compiled C may read the batch, if it can.

    Returns:
        The histograms and the worst tokens, and the per-sequence table that `sequence_detail` reads.
    """
    if compiled and why_not(batch, config) is None:
        sums, statistics = cpu_detail(batch, config, weights)
        table = SequenceTable(zip(_TABLE_COLUMNS, sums, strict=True))
    else:
        batch = batch._replace(mask=truth(batch.mask))
        read = partial(_measure_block, batch, weights, config.nonfinite == "neutral")
        table, statistics = read_blocks(read, batch.mask, batch.cu_seqlens)

    # Until here a token is identified by its position in its sequence.
    value, sequence, at = statistics.rows["tops"][0].unbind(-1)
    exists = sequence >= 0
    if detail.position_ids is not None and batch.mask.numel():
        row, place = sequence.clamp(min=0).long(), at.clamp(min=0).long()
        start = row * batch.mask.shape[-1] if batch.cu_seqlens is None else batch.cu_seqlens[row]
        at = detail.position_ids.flatten()[start + place]
    worst = top_entries(value, sequence + detail.sequence_offset, at, exists)
    return Statistics(statistics.names, {**statistics.rows, "tops": worst.unsqueeze(0)}), table


_TABLE_COLUMNS = ("log_ratio", "zero", "compared")
"""Of the per-sequence table, in the order in which they are summed."""


def _measure_block(
    batch: Batch, weights: Tensor | None, neutral: bool, block: Block
) -> tuple[SequenceTable, Statistics]:
    """Return a block's table and statistics, computed in torch."""
    train, rollout, valid = batch.train[block.at], batch.rollout[block.at], batch.mask[block.at]
    classes = classify_tokens(train, rollout, valid)
    compared = classes.measured | classes.zero_probability
    d = token_log_ratio(train, rollout, classes.measured)
    columns = (d, classes.zero_probability, compared)
    table = SequenceTable((name, block.sum(x.double())) for name, x in zip(_TABLE_COLUMNS, columns, strict=True))

    histograms = {"log_ratio": histogram_of(d, classes.measured)}
    if weights is not None:
        histograms["weight"] = histogram_of(weights[block.at], valid if neutral else compared)

    # A token of probability zero is among the worst, with d = −∞.
    d = d.masked_fill_(classes.zero_probability, -torch.inf).flatten()
    found, exists = top_indices(d, compared.flatten())
    ids = block.ids()
    if ids is None or batch.cu_seqlens is None:
        width = max(1, valid.shape[1])
        sequence, place = block.at.start + found // width, found % width
    else:
        sequence = ids[found]
        place = block.at.start + found - batch.cu_seqlens[sequence]
    worst = top_entries(d[found], sequence, place, exists)
    return table, Statistics.of(histograms=histograms, tops={"tokens": worst})


def sequence_detail(table: SequenceTable, detail: Detail) -> Statistics:
    """Compute the histogram of S_i, and the worst sequences by |S_i|, from sums over each sequence."""
    tokens = table["compared"]
    product = table["log_ratio"].masked_fill(table["zero"] > 0, -torch.inf)
    found, exists = top_indices(product, tokens > 0)
    worst = top_entries(product[found], found + detail.sequence_offset, tokens[found], exists)
    return Statistics.of(
        histograms={"sequence_log_ratio": histogram_of(product, tokens > 0)}, tops={"sequences": worst}
    )
