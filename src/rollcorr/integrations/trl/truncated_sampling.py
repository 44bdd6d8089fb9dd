"""Log-probs of a truncated sampler's tokens in TRL's trainers, by replay of the engine's kept sets.

TRL scores over the full vocabulary. A replay scores over the ids that the engine could draw, so it needs the logits of
these ids. The sets of a row are one item of a list in TRL's batch: TRL shuffles and splits lists as it does tensors.

Symbols (docs/reference/notation.md): B sequences, T padded completion length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollcorr.config.sampling_spec import Actor
from rollcorr.core.logprobs import kept_entropy, kept_log_prob
from rollcorr.core.sampling import KeptSets, concatenate_kept_sets
from rollcorr.engines.base import Rollout, TokenBatch
from rollcorr.engines.response_scoring import response_logits

Trainer = Any  # one of TRL's trainers: they are not imported here

KEPT_SETS = "rollcorr_kept_sets"
"""Name of the list in TRL's batch."""

# (attribute of the trainer, value that turns it off, reason why a replay does not support it)
_REFUSED = (
    ("beta", 0.0, "the KL penalty compares with a reference over the full vocabulary"),
    ("use_liger_kernel", False, "this kernel computes log-probs over the full vocabulary"),
    ("aux_loss_enabled", False, "the auxiliary loss comes from TRL's own forward pass"),
)


def check_actor(trainer: Trainer, actor: Actor, records: Sequence[Actor], truncates: bool) -> None:
    """Check that trainer and engine support a way to score truncated samples.

    Args:
        trainer: one of TRL's trainers.
        actor: "full", "replay" or "kept_mass".
        records: the engine's `truncation_records`.
        truncates: whether the engine's log-probs are over a truncated support.

    Raises:
        ValueError: they do not; the message names the value and the fix.
    """
    if actor not in ("full", "replay", "kept_mass"):
        raise ValueError(f"actor must be 'full', 'replay' or 'kept_mass'; got {actor!r}")
    if actor != "full" and not truncates:
        raise ValueError(
            f"actor={actor!r} has no effect, as the engine's log-probs are not truncated; set actor='full'"
        )
    if actor != "full" and actor not in records:
        raise ValueError(
            f"actor={actor!r} needs what this engine does not report: it supports {', '.join(records) or 'neither'}. "
            "Sample without top_k, top_p and min_p, or with an engine that records kept sets, as TransformersEngine"
        )
    for name, off, reason in _REFUSED if actor == "replay" else ():
        if getattr(trainer, name, off) != off:
            raise ValueError(
                f"actor='replay' does not support {name}={getattr(trainer, name)!r}: {reason}. Set {name}={off!r}, or "
                "actor='kept_mass'"
            )


def sets_of_rows(rollout: Rollout) -> list[KeptSets]:
    """Return the kept sets of each row, in host memory."""
    assert rollout.kept is not None
    kept, lengths = rollout.kept.to("cpu"), rollout.tokens.response_mask.sum(1).cpu()
    return [kept.select(positions) for positions in torch.arange(len(kept), device="cpu").split(lengths.tolist())]


def replayed_scores(
    trainer: Trainer,
    rows: Sequence[KeptSets],
    model: Any,  # noqa: ANN401 (a transformers model, perhaps wrapped)
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    **_: Any,  # noqa: ANN401 (images and the auxiliary loss, which are off)
) -> tuple[Tensor, Tensor | None, None]:
    """Compute log-probs and entropies over kept sets: replaces TRL's `_get_per_token_logps_and_entropies`.

    Args:
        trainer: one of TRL's trainers.
        rows: kept sets of each row, one for each token of its completion.
        model: the policy.
        input_ids: prompts and completions, (B, P + T).
        attention_mask: 1 on their tokens, (B, P + T).
        logits_to_keep: T.
        batch_size: rows in each forward pass; defaults to B.
        compute_entropy: also return the entropies.

    Returns:
        Log-probs and entropies, nats, (B, T) float32, 0 on padding; and no auxiliary loss.

    Raises:
        ValueError: a completion has other tokens than its kept sets.
    """
    log_probs, entropies = [], []
    step = batch_size or len(input_ids)
    for first in range(0, len(input_ids), step):
        chunk = slice(first, first + step)
        prompt, response = input_ids[chunk, :-logits_to_keep], input_ids[chunk, -logits_to_keep:]
        mask = attention_mask[chunk] != 0
        tokens = TokenBatch(prompt, mask[:, :-logits_to_keep], response, mask[:, -logits_to_keep:])
        kept = _sets_of_tokens(rows[chunk], tokens.response_mask)

        # Only tokens have sets, so padding is left out.
        with trainer.accelerator.autocast():
            logits = response_logits(model, tokens)[tokens.response_mask]
        ids = response[tokens.response_mask]
        zeros = logits.new_zeros(response.shape, dtype=torch.float32)
        scored = kept_log_prob(logits, ids, kept, temperature=trainer.temperature).log_prob
        log_probs.append(zeros.masked_scatter(tokens.response_mask, scored))
        if compute_entropy:
            entropy = kept_entropy(logits, ids, kept, temperature=trainer.temperature)
            entropies.append(zeros.masked_scatter(tokens.response_mask, entropy))
    return torch.cat(log_probs), torch.cat(entropies) if entropies else None, None


def _sets_of_tokens(rows: Sequence[KeptSets], mask: Tensor) -> KeptSets:
    """Concatenate the sets of rows for the tokens in `mask`, (b, T). TRL masks a row fully, or not at all."""
    counts = mask.sum(1).tolist()
    for row, (sets, count) in enumerate(zip(rows, counts, strict=True)):
        if count not in (0, len(sets)):
            raise ValueError(
                f"completion {row} has {count} tokens and {len(sets)} kept sets: a replay needs completions of one "
                "sampling call, without tools. Use actor='kept_mass'"
            )
    used = [KeptSets.of([], device="cpu"), *(sets for sets, count in zip(rows, counts, strict=True) if count)]
    return concatenate_kept_sets(used).to(mask.device)


def subtract_kept_mass(generation: Any, *log_probs: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 (a sampler)
    """Return log p − log S, if the sampler's log-probs are over kept sets and TRL's batch contains log p.

    Both policies of a ratio shift by the same log S, so only the recorded log-probs change.
    """
    mass = getattr(generation, "log_kept_mass", None)
    if mass is None or any(log_prob.shape != mass.shape for log_prob in log_probs):
        return log_probs
    return tuple(log_prob - mass.to(log_prob) for log_prob in log_probs)


def add_kept_sets(generation: Any, batch: dict[str, Any]) -> None:  # noqa: ANN401 (a sampler)
    """Add the rows' kept sets to TRL's batch, in place, if the sampler recorded them."""
    rows = getattr(generation, "kept_sets", None)
    if rows is not None:
        batch[KEPT_SETS] = rows
