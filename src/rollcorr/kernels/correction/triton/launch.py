"""The correction in three Triton launches: a token pass, a sequence pass, and one that merges and spreads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.layout import sequence_count
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, outputs
from rollcorr.kernels.correction.rows import empty_statistics
from rollcorr.kernels.correction.triton.final_pass import ROWS, finish
from rollcorr.kernels.correction.triton.plan import limits_of, plan_of
from rollcorr.kernels.correction.triton.sequence_pass import decide_sequences
from rollcorr.kernels.correction.triton.token_pass import BLOCK, read_tokens
from rollcorr.kernels.gpu_launch import Launch

PROGRAMS = 2048
"""Programs that the token pass aims at: about as many as are resident at a time. A multiprocessor with 65,536 registers
holds 16 warps of 128 for each thread, and an H200 has 132 of them. More would wait, and each leaves a row of the table.
"""

REGISTERS = {8: 128, 9: 128}
"""For each thread of the token pass, by the first number of the compute capability. Left to itself, the assembler takes
up to 168 for what fits into as few. On Blackwell it does not fit: there the assembler decides, and takes 128 to 168.
"""

RANGES_TESTED = {8: 136, 9: 136}
"""Where tests of ranges take a few more."""

TOKEN_CRITERIA = {9: 192, 10: 208}
"""With token weights and token criteria. Left to itself, the assembler of Triton 3.9 stops at 168 here, and spills."""

SHORTEST_SHARE = 2
"""Blocks that a program reads at least, where a sequence is split: what it does beside them costs as much as one."""

MOST_SPLITS = 64
ALIGNMENT = 16
"""Tokens: a row of which this divides the length starts where vector loads and stores can."""


class Buffers(NamedTuple):
    """Buffers that the three launches write. All but the outputs contain a few numbers per sequence."""

    weights: Tensor | None
    loss_mask: Tensor
    sequence_kept: Tensor
    sequence_weight: Tensor
    alive: Tensor
    table: Tensor
    row_sets: Tensor
    rows: Tensor
    policy_sums: Tensor


def launch_correction(
    batch: Batch, config: RolloutCorrectionConfig, *, out: Out | None = None, splits: int | None = None
) -> CorrectionOutput:
    """Implement `rollcorr.kernels.correction.correction_kernel` for a batch that contains at least one token.

    Args:
        batch: the batch to correct.
        config: configuration of the correction.
        out: optional buffers for weights and loss mask.
        splits: optional; number of programs per sequence: a power of two, at most 64. The default depends on the shape.
    """
    mask, sequences = batch.mask, sequence_count(batch.mask, cu_seqlens=batch.cu_seqlens)
    splits = splits or choose_splits(mask.numel(), sequences)
    buffers = make_buffers(mask, sequences, splits, config, out)
    for launch in launches(batch, buffers, splits, config):
        launch.run(enable_fp_fusion=True)
    statistics = empty_statistics(config, "meta").unpack(buffers.rows)
    return CorrectionOutput(buffers.weights, buffers.loss_mask, buffers.sequence_kept, statistics, buffers.policy_sums)


def choose_splits(tokens: int, sequences: int) -> int:
    """Return the number of programs per sequence: 1 for large B, more for few long sequences. A power of two."""
    shares = max(1, tokens // max(1, sequences) // (SHORTEST_SHARE * BLOCK.value))
    wanted = min(PROGRAMS // max(1, sequences), shares, MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def lanes() -> int:
    """Return the threads of a warp, each of which is a lane of the token pass: AMD's have 64."""
    return 32 if torch.version.hip is None else 64


def sequences_for_each(splits: int) -> int:
    """Return the number of sequences per program of the sequence pass: 32 cells of a column, for any split."""
    return max(1, 32 // splits)


def make_buffers(
    mask: Tensor, sequences: int, splits: int, config: RolloutCorrectionConfig, out: Out | None = None
) -> Buffers:
    """Allocate the outputs and the intermediate results of the launches."""
    plan = plan_of(config)
    weights, loss_mask = outputs(mask, config, out)
    sets = -(-sequences // sequences_for_each(splits))

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=STATISTICS_DTYPE, device=mask.device)

    return Buffers(
        weights=weights,
        loss_mask=loss_mask,
        sequence_kept=torch.empty(sequences, dtype=torch.bool, device=mask.device),
        sequence_weight=torch.empty(sequences, dtype=torch.float32, device=mask.device),
        alive=torch.empty(sequences, dtype=torch.uint8, device=mask.device),
        table=numbers(sequences * splits, len(plan.columns)),
        row_sets=numbers(sets, plan.width),
        rows=numbers(plan.width),
        policy_sums=numbers(4, sequences),
    )


def launches(batch: Batch, buffers: Buffers, splits: int, config: RolloutCorrectionConfig) -> list[Launch]:
    """Return the three launches, in order. Reads only shapes, so it also serves to compile without a GPU."""
    plan, limits = plan_of(config), limits_of(config)
    train, rollout, mask = (_as_bytes(x.contiguous()) for x in batch.named.values())
    loss_mask, sequence_kept = _as_bytes(buffers.loss_mask), _as_bytes(buffers.sequence_kept)
    sequences, T = buffers.alive.numel(), mask.shape[-1]
    packed = batch.cu_seqlens is not None
    # A kernel needs a valid pointer even where it does not use it.
    shared = {
        "cu_seqlens": buffers.alive if batch.cu_seqlens is None else batch.cu_seqlens.contiguous(),
        "weights": buffers.sequence_weight if buffers.weights is None else buffers.weights,
        "loss_mask": loss_mask,
        "T": T,
        "splits": splits,
    }

    # Ranges are tested at both ends of a row, only at the last end if rows are aligned, or not at all.
    align = ALIGNMENT if packed or T % ALIGNMENT else int(T % BLOCK.value > 0)
    layout = {"PLAN": plan, "PACKED": packed, "ALIGN": align, "LANES": lanes()}

    # The register limit at which the token pass does not spill.
    registers = RANGES_TESTED if align else REGISTERS
    if plan.token_criteria:
        registers = TOKEN_CRITERIA if plan.level == "token" else {}

    shares, sets = sequences * splits, buffers.row_sets.shape[0]
    decided = {"sequence_weight": buffers.sequence_weight, "alive": buffers.alive}
    mergers = -(-len(plan.sums) // ROWS.value)
    read = {"train": train, "rollout": rollout, "mask": mask, "tokens": mask.numel()}
    left = {"table": buffers.table, "limits": limits}
    written = {"all_rows": buffers.row_sets, "sequence_kept": sequence_kept, "sequences": sequences}
    written["policy_sums"] = buffers.policy_sums
    merged = {"all_rows": buffers.row_sets, "merged": buffers.rows, "sets": sets}
    of_sequences = {"PLAN": plan, "SEQUENCES": sequences_for_each(splits), "SPLITS": splits}

    return [
        Launch(read_tokens, (shares,), shared | read | left, layout, warps=1, registers=registers),
        Launch(decide_sequences, (sets,), decided | left | written, of_sequences, warps=1),
        Launch(finish, (mergers + (shares if plan.spreads else 0),), shared | decided | merged, layout),
    ]


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x
