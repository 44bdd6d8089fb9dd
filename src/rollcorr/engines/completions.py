"""Convert an engine's answers to a `Rollout`. Every value is checked; missing values raise an error.

Engines that return lists (over HTTP, or from a different runtime) have different formats and the same faults: a short
list, a null, NaN, or −9999.0 in place of −inf. An adapter converts each answer to a `Completion`;
`rollout_from_completions` checks all of them and builds the tensors, or raises. It never returns part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch

from rollcorr.config import SamplingSpec
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY
from rollcorr.core.sampling import KeptSets
from rollcorr.engines.base import EngineAnswerError, EngineRestartedError, Rollout, TokenBatch, pad_prompts
from rollcorr.engines.transport.answer_body import brief, printable

# Log-probs up to this many nats above 0 count as rounding and become 0. A normalizer summed in bfloat16 has a larger
# error, which raises.
ROUNDING = 1e-4

# Label of vLLM and SGLang for their initial weights.
INITIAL_WEIGHTS = "default"

# The largest token id or version that fits in an int64 tensor.
LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response as reported by the engine.

    Attributes:
        token_ids: the sampled tokens, with the end token; may be empty.
        log_probs: one per token, nats, of the kind that the engine's `SamplingSpec` names.
        kept: for each token the ids that could be drawn. None without truncation, or if the engine does not report
            them.
        log_kept_mass: for each token the log of the mass of `kept` in the full softmax, nats; optional.
        raw_log_probs: one per token, at temperature 1 over the full vocabulary; optional.
        versions: the policy version of each token; optional.
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
    """Check the answers to a batch of prompts and pad them to one rollout.

    A log-prob or log mass up to `ROUNDING` above 0 becomes 0. An empty response becomes a row without response
    tokens; a batch of empty responses still has one column.

    Args:
        prompts: token ids of B non-empty prompts.
        completions: one per prompt, in the same order.
        sampling: how the engine draws tokens, and the kind of its log-probs.
        pad_token_id: fills rows.
        vocabulary_size: valid ids are 0 to `vocabulary_size` − 1; optional. Defaults to no upper limit.
        device: device of the tensors.

    Returns:
        The rollout. Its `policy_versions` is None if every token has `sampling.policy_version`.

    Raises:
        ValueError: `prompts` is empty, or a prompt is empty.
        EngineAnswerError: an answer is missing, has an invalid token or log-prob, or has a list whose length differs
            from the response's. The message contains the row, the token and the value.

    Example:
        >>> answer = Completion(token_ids=[7, 2], log_probs=[-0.5, -1.25])
        >>> rollout_from_completions([[5]], [answer], sampling=SamplingSpec(), pad_token_id=0).rollout_log_prob
        tensor([[-0.5000, -1.2500]])
    """
    prompt_ids, prompt_mask = pad_prompts(prompts, pad_token_id=pad_token_id)
    if len(completions) != len(prompts):
        raise EngineAnswerError(f"the engine answered {len(completions)} of {len(prompts)} prompts; none is used")

    largest = LARGEST_INTEGER if vocabulary_size is None else vocabulary_size - 1

    def token_id(value: Any, where: str) -> int:  # noqa: ANN401 (unchecked JSON)
        return _check_integer(value, where, "token id of the vocabulary", largest)

    # Tokens first: every other list must have their length.
    responses = _read_column(completions, "token_ids", token_id)
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], device="cpu")
    mask = torch.arange(max(1, int(lengths.max())), device="cpu") < lengths[:, None]

    def padded(rows: list[list[Any]] | None, dtype: torch.dtype, fill: int = 0) -> Any:  # noqa: ANN401 (or None)
        if rows is None:
            return None
        flat = torch.tensor([value for row in rows for value in row], dtype=dtype, device="cpu")
        return torch.full(mask.shape, fill, dtype=dtype, device="cpu").masked_scatter_(mask, flat).to(device)

    response_ids = padded(responses, torch.int64, pad_token_id)

    # In the usual case all tokens have one version, which `sampling` records.
    versions = _read_column(
        completions, "versions", lambda value, where: _check_integer(value, where, "policy version")
    )
    if versions is not None and all(version == sampling.policy_version for row in versions for version in row):
        versions = None

    return Rollout(
        tokens=TokenBatch(prompt_ids.to(device), prompt_mask.to(device), response_ids, mask.to(device)),
        rollout_log_prob=padded(_read_column(completions, "log_probs", check_log_prob), torch.float32),
        raw_log_prob=padded(_read_column(completions, "raw_log_probs", check_log_prob), torch.float32),
        sampling=sampling,
        kept=_collect_kept_sets(completions, token_id, device),
        log_kept_mass=padded(_read_column(completions, "log_kept_mass", check_log_prob), torch.float32),
        policy_versions=padded(versions, torch.int64),
    )


@contextmanager
def reading(problem: str, value: object) -> Iterator[None]:
    """Raise `EngineAnswerError` if code inside the `with` block cannot parse a value of an answer.

    Args:
        problem: start of the error message.
        value: the value to parse.
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RecursionError, StopIteration, TypeError, ValueError) as error:
        text = printable(str(error))
        raise EngineAnswerError(f"{problem} ({type(error).__name__}: {text}): {brief(value)}") from error


def versions_of_spans(spans: Any, tokens: int, row: int, *, initial: int | None) -> list[int]:  # noqa: ANN401
    """Return the policy version of each token, from the spans `{"version", "start", "end"}` of vLLM and SGLang.

    Args:
        spans: sorted, covering the response.
        tokens: length of the response.
        row: the row in the batch, for errors.
        initial: policy version of the engine's initial weights (label "default"). None after an update: the label then
            means that the engine was restarted.

    Returns:
        One version per token.

    Raises:
        EngineRestartedError: a token was sampled from the initial weights after an update.
        EngineAnswerError: a field is missing or has an unexpected type, the spans do not cover the response, or a label
            is not a policy version.
    """
    with reading(f"row {row}: weight_versions is no list of spans with a version, a start and an end", spans):
        # Spans are contiguous: the first starts at 0, each later one at the previous end, the last ends the response.
        starts, edges = [span["start"] for span in spans], [0, *(span["end"] for span in spans)]
        if starts != edges[:-1] or edges[-1] != tokens or edges != sorted(edges):
            raise EngineAnswerError(f"row {row}: weight_versions {brief(spans)} do not cover its {tokens} tokens")

        labels = [
            span["version"]
            for span, (start, end) in zip(spans, pairwise(edges), strict=True)
            for _ in range(start, end)
        ]
        return [version_of_weights(label, row, initial=initial) for label in labels]


def version_of_weights(label: object, row: int, *, initial: int | None) -> int:
    """Return the policy version in an engine's label for its weights.

    Args and Raises: as `versions_of_spans`.
    """
    if label == INITIAL_WEIGHTS:
        if initial is not None:
            return initial
        raise EngineRestartedError(
            f"row {row} is of weights {label!r}, those that the engine was started with: it was restarted since it was "
            "given others. Call update_weights"
        )
    if not (isinstance(label, str) and label.isascii() and label.isdecimal() and int(label[:20]) <= LARGEST_INTEGER):
        raise EngineAnswerError(
            f"row {row} is of weights {brief(label)}, which is no policy version; update the weights through this "
            "engine only, or label them with the version's number"
        )
    return int(label[:20])


def check_versions(completions: Sequence[Completion], allowed: Sequence[int], title: str) -> None:
    """Check that every token was sampled from weights that the engine received.

    Args:
        completions: answers; their `versions` are None where the engine does not report them.
        allowed: versions of the engine's weights during sampling.
        title: the engine, for the error message.

    Raises:
        EngineAnswerError: the message contains the row, the token, and both versions.
    """
    for row, completion in enumerate(completions):
        for token, version in enumerate(completion.versions or ()):
            if version not in allowed:
                given = ", ".join(map(str, sorted(set(allowed))))
                raise EngineAnswerError(
                    f"token {token} of row {row} is of version {version} by {title}'s own account, and it was given "
                    f"version {given}: someone else updates its weights, or one of several servers behind the address "
                    "missed an update. Give each run a server of its own"
                )


def check_log_prob(value: object, where: str) -> float:
    """Return a finite number of at most 0 as a float; a number up to `ROUNDING` above 0 becomes 0.

    Raises:
        EngineAnswerError: the value is None, NaN, infinite, −9999, above 0, or not a number. `where` starts the text.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise EngineAnswerError(f"{where} is {brief(value)}, no number: the engine did not score this token")

    if value <= JSON_MINUS_INFINITY:
        raise EngineAnswerError(
            f"{where} is {brief(value)}: a sampled token has a finite log-prob above {JSON_MINUS_INFINITY}"
        )
    if not value <= ROUNDING:  # also true for NaN
        raise EngineAnswerError(
            f"{where} is {brief(value)}, a log-prob is at most 0 (up to {ROUNDING:g} counts as rounding)"
        )
    return min(float(value), 0.0)


def _read_column(
    completions: Sequence[Completion], name: str, checked: Callable[[Any, str], Any]
) -> list[list[Any]] | None:
    """Return one checked value per token from every row, or None if no row has any."""
    rows = [getattr(completion, name) for completion in completions]

    # An engine reports an optional list for every row or for no row; tokens and log_probs are required.
    missing = [row for row, values in enumerate(rows) if values is None]
    if missing and (name in ("token_ids", "log_probs") or len(missing) < len(rows)):
        raise EngineAnswerError(f"row {missing[0]} has no {name}; ask the engine for them on every request")
    if missing:
        return None

    for row, (completion, values) in enumerate(zip(completions, rows, strict=True)):
        _check_sequence(values, f"{name} of row {row}")
        if len(values) != len(completion.token_ids):
            raise EngineAnswerError(
                f"row {row} has {len(values)} {name} for {len(completion.token_ids)} tokens; one per token is needed"
            )
    return [
        [checked(value, f"{name}[{token}] of row {row}") for token, value in enumerate(values)]
        for row, values in enumerate(rows)
    ]


def _check_sequence(values: object, where: str) -> None:
    """Raise unless the value is a list. Strings and mappings also have a length, numbers do not."""
    if isinstance(values, (str, bytes, Mapping)) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        raise EngineAnswerError(f"{where} is {brief(values)}, no list")


def _check_integer(value: Any, where: str, kind: str, largest: int = LARGEST_INTEGER) -> int:  # noqa: ANN401
    """Return an integer from 0 to `largest`; raise an error that contains `kind` for any other value."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= largest:
        raise EngineAnswerError(f"{where} is {brief(value)}, no {kind} 0 … {largest}")
    return int(value)


def _collect_kept_sets(
    completions: Sequence[Completion], token_id: Callable[[Any, str], int], device: torch.device | str
) -> KeptSets | None:
    def checked(ids: Any, where: str) -> list[int]:  # noqa: ANN401 (unchecked JSON)
        _check_sequence(ids, where)
        if not ids:
            raise EngineAnswerError(f"{where} is empty: a token was drawn from nothing")
        found = [token_id(token, f"an id in {where}") for token in ids]
        if len(set(found)) < len(found):
            raise EngineAnswerError(f"{where} names an id twice: {found}")
        return found

    # One packed list for the batch: the sets of row 0, then of row 1, and so on.
    rows = _read_column(completions, "kept", checked)
    return None if rows is None else KeptSets.of([ids for row in rows for ids in row], device=device)
