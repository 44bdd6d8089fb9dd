"""From the answers of an engine, row by row, to a `Rollout`: everything is checked, nothing is filled in.

Engines that answer in lists (over HTTP, or from another runtime) differ in their formats and share their faults: a list
too short, None, NaN, −9999.0 where −inf would not go into JSON. An adapter turns each answer into a `Completion`;
`rollout_from_completions` checks them all and makes the tensors, or raises. There is no way to a part of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.engines.base import EngineAnswerError, Rollout
from rollcorr.engines.model_scoring import TokenBatch, pad_prompts

JSON_MINUS_INFINITY = -9999.0
"""What vLLM writes for −inf, for JSON has none. No token of this log-prob is ever drawn."""
ROUNDING = 1e-4
"""Nats above 0 that are taken for rounding and set to 0. A normaliser summed in bfloat16 is off by more: an error."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response as an engine told it.

    Attributes:
        token_ids: what was sampled, the end token included; may be empty.
        log_probs: one a token, nats: what the engine's `SamplingSpec` says that they are.
        kept: for each token the ids that could be drawn; None when nothing was truncated or the engine does not tell.
        log_kept_mass: for each token the log of the mass that `kept` has in the whole softmax, nats, where it is known.
        raw_log_probs: one a token, at temperature 1 over the full vocabulary, where the engine tells them too.
        versions: the policy version behind each token, where the engine tells it.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float | None]
    kept: Sequence[Sequence[int]] | None = None
    log_kept_mass: Sequence[float | None] | None = None
    raw_log_probs: Sequence[float | None] | None = None
    versions: Sequence[int] | None = None


def rollout_from_completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    sampling: SamplingSpec,
    pad_token_id: int,
    vocabulary_size: int | None = None,
    device: torch.device | str = "cpu",
) -> Rollout:
    """Check the answers to a batch of prompts and pad them into one rollout.

    A log-prob, or the log of a mass, up to `ROUNDING` above 0 becomes 0. An empty response is a row without response
    tokens; a batch of empty ones still has one column.

    Args:
        prompts: token ids, B rows, none empty.
        completions: one a prompt, in the same order.
        sampling: how the engine draws tokens, and what its log-probs are.
        pad_token_id: fills rows.
        vocabulary_size: ids run from 0 to below it; None checks the lower end only.
        device: where the tensors go.

    Returns:
        The rollout; its `policy_versions` is None when every token has that of `sampling`.

    Raises:
        ValueError: there is no prompt, or one is empty.
        EngineAnswerError: an answer is missing, or holds something that is no token, no log-prob, or not as long as
            its response; names the row, the token and the value.

    Example:
        >>> answer = Completion(token_ids=[7, 2], log_probs=[-0.5, -1.25])
        >>> rollout_from_completions([[5]], [answer], sampling=SamplingSpec(), pad_token_id=0).rollout_log_prob
        tensor([[-0.5000, -1.2500]])
    """
    prompt_ids, prompt_mask = pad_prompts([list(prompt) for prompt in prompts], pad_token_id=pad_token_id)
    if len(completions) != len(prompts):
        raise EngineAnswerError(f"the engine answered {len(completions)} of {len(prompts)} prompts; none is used")
    responses = [
        [_token_id(token, f"token {t} of row {row}", vocabulary_size) for t, token in enumerate(completion.token_ids)]
        for row, completion in enumerate(completions)
    ]
    lengths = torch.tensor([len(response) for response in responses], device="cpu")
    mask = torch.arange(max(1, int(lengths.max())), device="cpu") < lengths[:, None]

    def padded(rows: list[list[Any]] | None, dtype: torch.dtype, fill: int = 0) -> Tensor | None:
        if rows is None:
            return None
        flat = torch.tensor([value for row in rows for value in row], dtype=dtype, device="cpu")
        return torch.full(mask.shape, fill, dtype=dtype, device="cpu").masked_scatter_(mask, flat).to(device)

    response_ids = padded(responses, torch.int64, pad_token_id)
    log_prob = padded(_column(completions, "log_probs", check_log_prob), torch.float32)
    assert response_ids is not None  # every completion has these two
    assert log_prob is not None
    versions = _column(completions, "versions", _version)
    if versions is not None and all(version == sampling.policy_version for row in versions for version in row):
        versions = None
    return Rollout(
        tokens=TokenBatch(prompt_ids.to(device), prompt_mask.to(device), response_ids, mask.to(device)),
        rollout_log_prob=log_prob,
        raw_log_prob=padded(_column(completions, "raw_log_probs", check_log_prob), torch.float32),
        sampling=sampling,
        kept=_kept_sets(completions, vocabulary_size, device),
        log_kept_mass=padded(_column(completions, "log_kept_mass", check_log_prob), torch.float32),
        policy_versions=padded(versions, torch.int64),
    )


def versions_of_spans(spans: Any, tokens: int, row: int, number: Callable[[object], int]) -> list[int]:  # noqa: ANN401
    """The policy version behind each token, from the spans `{"version", "start", "end"}` of vLLM and SGLang.

    Args:
        spans: in order, covering the response.
        tokens: how long the response is.
        row: its number in the batch, for errors.
        number: from the engine's name of a version to the version.

    Raises:
        EngineAnswerError: a field is missing, or the spans do not cover the response.
    """
    try:
        starts, ends = [span["start"] for span in spans], [span["end"] for span in spans]
        names = [span["version"] for span in spans]
        edges = [0, *ends]
        covered = starts == edges[:-1] and edges[-1] == tokens and edges == sorted(edges)
    except (KeyError, TypeError) as error:
        raise EngineAnswerError(f"row {row}: weight_versions is {spans!r}") from error
    if not covered:
        raise EngineAnswerError(f"row {row}: weight_versions {spans!r} do not cover its {tokens} tokens")
    return [
        version
        for (start, end), version in zip(pairwise(edges), map(number, names), strict=True)
        for _ in range(start, end)
    ]


def _column(completions: Sequence[Completion], name: str, checked: Callable[[Any, str], Any]) -> list[list[Any]] | None:
    """One checked value a token from every row; None when no row has any."""
    rows = [getattr(completion, name) for completion in completions]
    missing = [row for row, values in enumerate(rows) if values is None]
    if missing and (name == "log_probs" or len(missing) < len(rows)):
        raise EngineAnswerError(f"row {missing[0]} has no {name}; ask the engine for them on every request")
    if missing:
        return None
    for row, (completion, values) in enumerate(zip(completions, rows, strict=True)):
        if len(values) != len(completion.token_ids):
            raise EngineAnswerError(
                f"row {row} has {len(values)} {name} for {len(completion.token_ids)} tokens; one a token is needed"
            )
    return [
        [checked(value, f"{name}[{token}] of row {row}") for token, value in enumerate(values)]
        for row, values in enumerate(rows)
    ]


def check_log_prob(value: object, where: str) -> float:
    """A finite number of at most 0 as a float; up to `ROUNDING` above it is 0.

    Raises:
        EngineAnswerError: it is None, NaN, infinite, −9999, above 0, or no number; `where` names it.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise EngineAnswerError(f"{where} is {value!r}, no number: the engine did not score this token")
    number = float(value)
    if not math.isfinite(number) or number <= JSON_MINUS_INFINITY:
        raise EngineAnswerError(
            f"{where} is {number:g}: a sampled token has a finite log-prob above {JSON_MINUS_INFINITY}"
        )
    if number > ROUNDING:
        raise EngineAnswerError(
            f"{where} is {number:g}, a log-prob is at most 0 (up to {ROUNDING:g} counts as rounding)"
        )
    return min(number, 0.0)


def _token_id(value: Any, where: str, vocabulary_size: int | None) -> int:  # noqa: ANN401 (whatever the engine sent)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise EngineAnswerError(f"{where} is {value!r}, no token id")
    token = int(value)
    if token < 0 or (vocabulary_size is not None and token >= vocabulary_size):
        last = "" if vocabulary_size is None else f" {vocabulary_size - 1}"
        raise EngineAnswerError(f"{where} is {token}, outside the vocabulary 0 …{last}")
    return token


def _version(value: Any, where: str) -> int:  # noqa: ANN401 (whatever the engine sent)
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 0:
        raise EngineAnswerError(f"{where} is {value!r}; a policy version is an integer from 0 up")
    return int(value)


def _kept_sets(
    completions: Sequence[Completion], vocabulary_size: int | None, device: torch.device | str
) -> KeptSets | None:
    def checked(ids: Any, where: str) -> list[int]:  # noqa: ANN401 (whatever the engine sent)
        if not ids:
            raise EngineAnswerError(f"{where} is empty: a token was drawn from nothing")
        found = [_token_id(token, f"an id in {where}", vocabulary_size) for token in ids]
        if len(set(found)) < len(found):
            raise EngineAnswerError(f"{where} names an id twice: {found}")
        return found

    rows = _column(completions, "kept", checked)
    return None if rows is None else KeptSets.of([ids for row in rows for ids in row], device=device)
