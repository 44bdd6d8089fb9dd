"""Read what SGLang's `/generate` answers to one request into a `Completion`, or say what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.completions import Completion, versions_of_spans


def read_completion(answer: Any, row: int, *, masked: bool, raw: bool, first_version: int) -> Completion:  # noqa: ANN401
    """The response in an answer.

    Args:
        answer: the JSON of the answer.
        row: which prompt it answers, for errors.
        masked: the request asked for `return_sampling_mask`: log-probs are over the kept sets.
        raw: log-probs over the full vocabulary are those at temperature 1.
        first_version: policy version of the weights that the server was started with.

    Raises:
        EngineAnswerError: the response was cut off, or a field is missing or of another length.
    """
    meta = _meta(answer, row)
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length"):
        raise EngineAnswerError(f"row {row} did not finish: finish_reason is {reason!r}")

    # output_ids may lack the end token, whose log-prob is there.
    ids, full = _entries(meta, "output_token_logprobs", row)
    count, output_ids = meta.get("completion_tokens"), answer.get("output_ids")
    if count != len(ids) or output_ids not in (ids, ids[:-1]):
        raise EngineAnswerError(
            f"row {row} has {len(ids)} output_token_logprobs, for completion_tokens {count} and output_ids {output_ids}"
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
        versions=versions_of_spans(spans, len(ids), row, initial=first_version),
    )


def read_scores(answer: Any, row: int, tokens: Sequence[int], *, label: str | None) -> list[Any]:  # noqa: ANN401
    """The log-probs of `tokens` after their first, from an answer to a request with `logprob_start_len` 0.

    Args:
        answer: the JSON of the answer.
        row: which row it answers, for errors.
        tokens: what was to be scored.
        label: the `weight_version` that must have scored them; None for any.

    Raises:
        EngineAnswerError: a field is missing, or other tokens or other weights were scored.
    """
    meta = _meta(answer, row)
    # The first token has no log-prob, and comes all the same.
    ids, log_probs = _entries(meta, "input_token_logprobs", row)
    if ids != list(tokens):
        raise EngineAnswerError(f"row {row}: SGLang scored the tokens {ids} instead of {list(tokens)}")
    if label is not None and meta.get("weight_version") != label:
        raise EngineAnswerError(
            f"row {row}: SGLang says that it has weights {meta.get('weight_version')!r}, it was given {label!r}"
        )
    return log_probs[1:]


def _meta(answer: Any, row: int) -> dict[str, Any]:  # noqa: ANN401
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineAnswerError(f"row {row}: SGLang's answer has no meta_info: {str(answer)[:200]}")
    return meta


def _entries(meta: dict[str, Any], name: str, row: int) -> tuple[list[Any], list[Any]]:
    """Token ids and log-probs of a list of [log-prob, token id, text]."""
    entries = meta.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        raise EngineAnswerError(f"row {row}: {name} is {str(entries)[:200]}, no list of [log-prob, token id, text]")
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def _list_of(meta: dict[str, Any], name: str, row: int, length: int) -> list[Any]:
    values = meta.get(name)
    if not isinstance(values, list) or len(values) != length:
        raise EngineAnswerError(
            f"row {row}: {name} is {str(values)[:200]}, one per token is needed, {length} in all; the server must "
            "know return_sampling_mask"
        )
    return values


def _difference(whole: Any, inside: Any) -> float | None:  # noqa: ANN401
    """log p − log p/S = log S; None if either is no number, which the checks of a batch then name."""
    return whole - inside if isinstance(whole, float) and isinstance(inside, float) else None
