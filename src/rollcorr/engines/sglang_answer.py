"""Read what SGLang's `/generate` answers to one request into a `Completion`, or say what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.completions import Completion, version_of_weights, versions_of_spans
from rollcorr.engines.transport.answer_body import brief


def read_completion(
    answer: Any,  # noqa: ANN401 (whatever the server sent)
    row: int,
    *,
    masked: bool,
    raw: bool,
    initial: int | None,
) -> Completion:
    """The response in an answer.

    Args:
        answer: the JSON of the answer.
        row: which prompt it answers, for errors.
        masked: the request asked for `return_sampling_mask`: log-probs are over the kept sets.
        raw: log-probs over the full vocabulary are those at temperature 1.
        initial: as in `versions_of_spans`.

    Raises:
        EngineRestartedError: the server lost the weights that it was given.
        EngineAnswerError: the response was cut off, or a field is missing or of another length.
    """
    meta = _meta(answer, row)
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length"):
        raise EngineAnswerError(f"row {row} did not finish: finish_reason is {brief(reason)}")

    # output_ids may lack the end token, whose log-prob is there.
    ids, full = _entries(meta, "output_token_logprobs", row)
    count, output_ids = meta.get("completion_tokens"), answer.get("output_ids")
    if count != len(ids) or output_ids not in (ids, ids[:-1]):
        raise EngineAnswerError(
            f"row {row} has {len(ids)} output_token_logprobs, for completion_tokens {brief(count)} and output_ids "
            f"{brief(output_ids)}"
        )

    sampled, kept, mass = full, None, None
    if masked:
        sampled, kept = (
            _list_of(meta, f"output_token_sampling_{name}", row, len(ids)) for name in ("logprobs", "mask")
        )
        mass = [_difference(whole, inside) for whole, inside in zip(full, sampled, strict=True)]

    # Spans come where weights changed within the response, one label otherwise.
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(ids)}]
    return Completion(
        token_ids=ids,
        log_probs=sampled,
        kept=kept,
        log_kept_mass=mass,
        raw_log_probs=full if raw else None,
        versions=versions_of_spans(spans, len(ids), row, initial=initial),
    )


def read_scores(
    answer: Any,  # noqa: ANN401 (whatever the server sent)
    row: int,
    tokens: Sequence[int],
    *,
    version: int,
    initial: int | None,
) -> list[Any]:
    """The log-probs of `tokens` after their first, from an answer to a request with `logprob_start_len` 0.

    Args:
        answer: the JSON of the answer.
        row: which row it answers, for errors.
        tokens: what was to be scored.
        version: policy version that must have scored them.
        initial: as in `versions_of_spans`.

    Raises:
        EngineRestartedError: the server lost the weights that it was given.
        EngineAnswerError: a field is missing, or other tokens or other weights were scored.
    """
    meta = _meta(answer, row)
    # The first token has no log-prob, and comes all the same.
    ids, log_probs = _entries(meta, "input_token_logprobs", row)
    if ids != list(tokens):
        raise EngineAnswerError(f"row {row}: SGLang scored the tokens {brief(ids)} instead of {brief(list(tokens))}")
    found = version_of_weights(meta.get("weight_version"), row, initial=initial)
    if found != version:
        raise EngineAnswerError(
            f"row {row}: SGLang says that it has weights {str(found)!r}, it was given {str(version)!r}"
        )
    return log_probs[1:]


def _meta(answer: Any, row: int) -> dict[str, Any]:  # noqa: ANN401
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineAnswerError(f"row {row}: SGLang's answer has no meta_info: {brief(answer)}")
    return meta


def _entries(meta: dict[str, Any], name: str, row: int) -> tuple[list[Any], list[Any]]:
    """Token ids and log-probs of a list of [log-prob, token id, text]."""
    entries = meta.get(name)
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise EngineAnswerError(f"row {row}: {name} is {brief(entries)}, no list of [log-prob, token id, text]")
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def _is_entry(entry: object) -> bool:
    """Whether it begins with two values, the second an integer; the first is checked with all log-probs."""
    return isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int


def _list_of(meta: dict[str, Any], name: str, row: int, length: int) -> list[Any]:
    values = meta.get(name)
    if not isinstance(values, list) or len(values) != length:
        raise EngineAnswerError(
            f"row {row}: {name} is {brief(values)}, one per token is needed, {length} in all; the server must "
            "know return_sampling_mask"
        )
    return values


def _difference(whole: Any, inside: Any) -> float | None:  # noqa: ANN401
    """log p − log p/S = log S; None if either is no number, which the checks of a batch then name."""
    if type(whole) not in (int, float) or type(inside) not in (int, float):
        return None
    try:
        return float(whole) - float(inside)
    except OverflowError:
        return None
