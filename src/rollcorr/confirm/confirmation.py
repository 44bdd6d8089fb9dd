"""Select the worst rows of a log, score them under every variant, and name the variant that explains the mismatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rollcorr.config.documents import BadInputError
from rollcorr.confirm.variants import PLAIN, LoggedRow, score_row
from rollcorr.core.divergence import k3
from rollcorr.rollout_log import read_rollout_log
from rollcorr.rollout_log.reader import Paths

# Tokens of a response that are scored, from its start on. Memory grows with this number times the vocabulary.
MAX_TOKENS = 1024

# Share of the excess that a named variant removes; limit of a gap in multiples of rounding noise; and the share of the
# mismatch below which a side is the model's own.
REMOVED, NOISE, SMALL_PART = 0.9, 3.0, 0.1

NOISE_OF, MARK, EVALUATED, LOOK_FOR = (
    "rounding",
    "\x1d",
    "evaluation mode, one row at a time",
    "; look for dropout, padding, batch size, kernels or other weights of the trainer",
)
PREVIOUS, NEXT, FIRST = "previous row's prompt", "next row's prompt", "first row's prompt"
SIDES = {"sampler": "rollout_log_prob", "trainer": "old_log_prob"}


@dataclass(frozen=True)
class SideResult:
    """One side of the log, compared with the model.

    Attributes:
        gaps: mean gap of the side to each variant, nats per token, by the variant's name; smallest first.
        removed: share of the excess over rounding noise that each variant removes, at most 1. Empty if
            the side agrees with the model. "plain": the share that the model's own scores remove in place of the
            trainer's, if no other variant explains them.
    """

    gaps: dict[str, float]
    removed: dict[str, float]


@dataclass(frozen=True)
class Confirmation:
    """The result of `confirm`.

    Attributes:
        rows: number of scored rows.
        mismatch: mean gap between the two sides of these rows, nats per token.
        noise: mean gap of the model in bfloat16 to itself in float32, nats per token.
        sides: "sampler" and "trainer".
        cause: the side and the variant that explains it, such as "sampler: temperature 0.8"; None without one.
        verdict: one sentence.
        complete: whether every row was scored, rather than interrupted.
    """

    rows: int
    mismatch: float
    noise: float
    sides: dict[str, SideResult]
    cause: str | None
    verdict: str
    complete: bool

    @property
    def is_explained(self) -> bool:
        """Return whether a cause is named, or there is nothing to explain."""
        return self.cause is not None or self.mismatch <= NOISE * self.noise


def confirm(
    logs: Paths,
    model: Any,  # noqa: ANN401 (a transformers model)
    *,
    tokenizer: Any = None,  # noqa: ANN401
    rows: int = 8,
    steps: tuple[int, int] | None = None,
    train_column: str | None = None,
    column_names: dict[str, str] | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> Confirmation:
    """Score the first 1,024 tokens of the rows with the largest mismatch again, under every variant.

    The gap of two log-probs with difference d is e^−|d| − 1 + |d|: k3 of the ratio below 1. The share of a side's
    excess that a variant removes is min(1, 1 − (gap(side, variant) − 3 noise(variant)) / (gap(side, plain) −
    3 noise(plain))). Noise is the gap of the variant in bfloat16 to itself in float32; a changed context has the plain
    noise. The variant with the smallest gap is named if it removes at least 0.9, every side that differs from the model
    is explained, and not both by the same variant.

    Args:
        logs: rollout logs with `prompt_ids`, `response_ids` and both log-probs.
        model: a causal language model of `transformers` with the trainer's weights before these steps, in float32. It
            is set to evaluation mode.
        tokenizer: optional; with a chat template, prompts are also scored with and without it.
        rows: number of rows, at least 2.
        steps: first and last step to choose from; defaults to all.
        train_column: old_log_prob or log_prob; defaults to the recorded one.
        column_names: column of the log → its name in the files; optional.
        on_rows: callback with the rows since the last call and their total; optional.

    Returns:
        The result; after Ctrl-C, of the rows that were scored.

    Raises:
        BadInputError: fewer than 2 rows, a missing column, no sampled token, or an id outside the vocabulary.
        RolloutLogError: a log cannot be read.
        KeyboardInterrupt: it was interrupted before the first row was scored.
    """
    # The rows with the largest mismatch show a fault most clearly, even a fault in few rows.
    chosen = _worst_rows(logs, rows, steps, train_column, column_names)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for token in {int(token) for row in chosen for token in (*row.prompt, *row.response)}:
        if not 0 <= token < vocabulary:
            raise BadInputError(
                f"the log has the token id {token}, and the model has the ids 0 to {vocabulary - 1}; give the log's "
                "model, or log the ids of masked tokens too"
            )
    model.eval()
    template = _template_toggle(tokenizer)
    # side (or NOISE_OF) → variant → gap of each row
    totals: dict[str, dict[str, list[float]]] = {side: {} for side in (*SIDES, NOISE_OF)}
    mismatch: list[float] = []
    complete = True
    try:
        for row in chosen:
            of_row = _measure_row(model, row, template)
            for side, found in of_row.items():
                for name, value in found.items():
                    totals[side].setdefault(name, []).append(value)
            mismatch.append(_mean_gap(row.log_probs["trainer"], row.log_probs["sampler"], row.sampled))
            if on_rows is not None:
                on_rows(1, len(chosen))
    except KeyboardInterrupt:
        if not mismatch:
            raise
        complete = False
    return _judge(totals, mismatch, complete=complete)


def _measure_row(model: Any, row: LoggedRow, template: Callable[..., Any]) -> dict[str, dict[str, float]]:  # noqa: ANN401
    """Return the mean gap of each side to each variant of a row; under `NOISE_OF`, what rounding does to each."""
    found: dict[str, dict[str, float]] = {side: {} for side in (*SIDES, NOISE_OF)}
    for name, scores, rounded in score_row(model, row, template):
        for side, logged in row.log_probs.items():
            found[side][name] = _mean_gap(scores, logged, row.sampled)
        if rounded is not None:
            found[NOISE_OF][name] = _mean_gap(scores, rounded, row.sampled)
    return found


def _mean_gap(first: Tensor, second: Tensor, sampled: Tensor) -> float:
    """Return the mean of e^−|d| − 1 + |d|: k3 of the smaller ratio, over the sampled tokens with both values.

    It is symmetric, and grows as |d|, so that one token cannot outweigh all others.
    """
    d = (first - second)[sampled & ~(first - second).isnan()].clamp(-20.0, 20.0)
    return float(k3(-d.abs()).mean()) if d.numel() else 0.0


def _judge(totals: dict[str, dict[str, list[float]]], mismatch: Sequence[float], *, complete: bool) -> Confirmation:
    """Return the verdict from the gaps of each row: side → variant → values."""
    # A variant that not all rows have, such as BOS, counts as the plain scores on the others.
    means = {
        side: {
            name: (sum(values) + (len(mismatch) - len(values)) * fmean(found[PLAIN])) / len(mismatch)
            for name, values in found.items()
        }
        for side, found in totals.items()
    }
    total, noise_of, noise = fmean(mismatch), means[NOISE_OF], means[NOISE_OF][PLAIN]
    sides, causes, faulty = {}, [], []
    for side in SIDES:
        gaps = dict(sorted(means[side].items(), key=lambda item: item[1]))
        excess = gaps[PLAIN] - NOISE * noise
        removed: dict[str, float] = {}
        if gaps[PLAIN] > NOISE * noise and gaps[PLAIN] > SMALL_PART * total:
            faulty.append(side)
            removed = {
                name: min(1.0, 1 - (gap - NOISE * noise_of.get(name, noise)) / excess)
                for name, gap in gaps.items()
                if name != PLAIN
            }
            name, share = next(iter(removed.items()))
            if share >= REMOVED:
                causes.append(f"{side}: {name}")
        sides[side] = SideResult(gaps, removed)

    # The plain scores in place of the trainer's remove what dropout, padding or kernels add.
    if faulty == ["trainer"] and not causes:
        sides["trainer"].removed[PLAIN] = share = min(
            1.0, 1 - (means["sampler"][PLAIN] - NOISE * noise) / (means["trainer"][PLAIN] - NOISE * noise)
        )
        causes += [f"trainer: {EVALUATED}"] * (share >= REMOVED)

    # What both sides do explains no difference between them.
    shared = {named.partition(": ")[2] for named in causes} if len(causes) == len(SIDES) else set()
    explains = total > NOISE * noise and len(causes) == len(faulty) and len(shared) != 1
    cause = (", ".join(causes) or None) if explains else None
    verdict = _sentence(total, noise, cause, causes, faulty)
    if len(shared) == 1 and total > NOISE * noise:
        verdict = f"unknown: both sides use {shared.pop()}, a setting of the run; log `sampling`, and confirm again"
    return Confirmation(len(mismatch), total, noise, sides, cause, verdict, complete)


def _sentence(total: float, noise: float, cause: str | None, causes: list[str], faulty: list[str]) -> str:
    if total <= NOISE * noise:
        return f"no mismatch to explain: {total:.2g} nats per token, and rounding to bfloat16 alone makes {noise:.2g}"
    if cause is not None:
        return f"confirmed: {cause}" + ("" if EVALUATED not in cause else LOOK_FOR)
    of_sides = {
        "sampler": "unknown: the trainer agrees with these weights, and no variant explains the sampler: its weights, "
        "their precision or its kernels differ; send it the trainer's weights, and measure again",
        "": "both sides agree with these weights, and differ from each other by noise of several kinds",
    }
    neither = (
        f"unknown: neither side agrees with these weights{' (' + causes[0] + ')' if causes else ''}; give the "
        "checkpoint before the step, with --steps"
    )
    return of_sides.get(" ".join(faulty), neither)


def _worst_rows(
    logs: Paths,
    count: int,
    steps: tuple[int, int] | None,
    train_column: str | None,
    column_names: dict[str, str] | None,
) -> list[LoggedRow]:
    """Return the rows with the largest mean gap, each with the prompts of its neighbors and of the first row."""
    if count < 2:
        raise BadInputError(f"rows must be at least 2, got {count}")

    # Keep only the worst rows so far. Rows of one prompt share the prompts of their neighbors.
    found: list[tuple[float, LoggedRow]] = []
    neighbors, of_first = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    prompt: tuple[int, ...] = ()
    for batch in read_rollout_log(logs, column_names=column_names):
        train = train_column or next((name for name in ("old_log_prob", "log_prob") if batch.has(name)), "old_log_prob")
        needed = ("prompt_ids", "response_ids", "rollout_log_prob", train)
        for name in needed:
            if not batch.has(name):
                raise BadInputError(f"{batch.file} has no {name}: log it, because rows are scored again from their ids")
        batch.check_lengths()
        for values in batch.to_rows():
            in_steps = steps is None or steps[0] <= (values.get("step") or 0) <= steps[1]
            if not in_steps or any(values.get(name) is None for name in needed):
                continue

            now = tuple(values["prompt_ids"])
            if now != prompt:
                neighbors[NEXT] = now
                neighbors = {PREVIOUS: prompt, FIRST: of_first.get(FIRST, now)}
                of_first, prompt = of_first or neighbors, now
            row = _row_of(values, train, neighbors)
            if row.sampled.any():
                found.append((_mean_gap(row.log_probs["trainer"], row.log_probs["sampler"], row.sampled), row))
                found = sorted(found, key=lambda scored: -scored[0])[:count]
    if not found:
        raise BadInputError("no row of these steps has a sampled token; choose others with --steps")

    # The neighbors of a rotated batch form a circle.
    neighbors[NEXT], of_first[PREVIOUS] = of_first[FIRST], prompt
    return [row for _, row in found]


def _row_of(values: dict[str, Any], train: str, neighbors: dict[str, tuple[int, ...]]) -> LoggedRow:
    response = torch.tensor(values["response_ids"][:MAX_TOKENS], dtype=torch.int64, device="cpu")
    mask = values.get("response_mask")
    sampled = torch.tensor(
        [True] * len(response) if mask is None else mask[:MAX_TOKENS], dtype=torch.bool, device="cpu"
    )
    log_probs = {
        side: torch.tensor(
            [math.nan if x is None else x for x in values[train if side == "trainer" else column][:MAX_TOKENS]],
            dtype=torch.float64,
            device="cpu",
        )
        for side, column in SIDES.items()
    }
    # Raw log-probs are of temperature 1; greedy decoding, 0, has none of its own.
    spec = values.get("sampling") or {}
    tempered = spec.get("temperature") if spec.get("logprobs", "raw") != "raw" else None
    return LoggedRow(tuple(values["prompt_ids"]), response, sampled, log_probs, neighbors, temperature=tempered or 1.0)


def _template_toggle(tokenizer: Any) -> Callable[[tuple[int, ...]], tuple[int, ...] | None]:  # noqa: ANN401
    """Return a function that adds the tokenizer's chat template to a prompt, or removes it."""
    if getattr(tokenizer, "chat_template", None) is None:
        return lambda prompt: None
    before, _, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    ).partition(MARK)
    prefix, suffix = (tuple(tokenizer(part.strip(), add_special_tokens=False)["input_ids"]) for part in (before, after))

    def toggled(prompt: tuple[int, ...]) -> tuple[int, ...]:
        # A template may end in a newline, which is no part of the suffix.
        ids = prompt[: 1 + max((n for n, token in enumerate(prompt) if tokenizer.decode([token]).strip()), default=-1)]
        end = len(ids) - len(suffix)
        if ids[: len(prefix)] == prefix and ids[end:] == suffix:
            return tuple(tokenizer(tokenizer.decode(ids[len(prefix) : end]).strip())["input_ids"])

        # A template contains its own BOS, if the model has one, in place of that of the plain text.
        plain = tokenizer.decode(prompt[1:] if prompt[:1] == (tokenizer.bos_token_id,) else prompt)
        return tuple(tokenizer(f"{before}{plain}{after}", add_special_tokens=False)["input_ids"])

    return toggled
