"""Between a `SamplingSpec` and vLLM: what to ask for, and what an answer says.

Answers have one form here, that of a choice of `/inference/v1/generate`; the worker process sends it too, and
`choice_of_text` makes it from a choice of `/v1/completions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollcorr.config import SamplingSpec
from rollcorr.config.checks import check_integer
from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.completions import JSON_MINUS_INFINITY, Completion, versions_of_spans

LOWEST_TEMPERATURE = 0.01
"""Below it vLLM samples at it."""
LARGEST_BIAS = 100.0
"""Above it vLLM cuts a logit bias to it."""
KEPT_MASS_ERROR = 1e-3
"""How far the probabilities of a kept set may be from summing to 1."""
INITIAL_VERSION = "default"
"""What vLLM calls the weights that it started with."""


def check_sampling(sampling: SamplingSpec) -> None:
    """Require settings that vLLM follows to the letter, and log-probs whose kept sets it can tell.

    Raises:
        ValueError: names the setting and the mend.
    """
    if sampling.logprobs == "tempered" or sampling.support != "engine":
        raise ValueError(
            f"logprobs={sampling.logprobs!r}, support={sampling.support!r}: vLLM returns raw or processed log-probs, "
            "over its own support"
        )
    if sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature must be at least {LOWEST_TEMPERATURE} to sample with vLLM, which raises lower ones to it; "
            f"got {sampling.temperature}"
        )
    too_large = {token: bias for token, bias in sampling.biases().items() if abs(bias) > LARGEST_BIAS}
    if too_large:
        raise ValueError(f"logit_bias must be within ±{LARGEST_BIAS:g}, to which vLLM cuts it, got {too_large}")
    if sampling.logprobs == "processed" and sampling.truncates and sampling.top_k < 1:
        raise ValueError(
            f"top_p={sampling.top_p:g}, min_p={sampling.min_p:g} without top_k: a kept set may be all the vocabulary, "
            "too large to send for each token, and vLLM's return_sampling_mask refuses it as well; set top_k too (a "
            "large one changes little), or do without kept sets: logprobs='raw'"
        )


def sampling_parameters(
    sampling: SamplingSpec, *, max_new_tokens: int, eos_token_id: int, vocabulary_size: int, sampling_mask: bool
) -> dict[str, Any]:
    """Fields of `vllm.SamplingParams` that mean `sampling`; the same names go into requests to a server.

    The checkpoint's own end tokens are ignored: `eos_token_id` alone ends a response.

    Args:
        sampling: how to draw tokens.
        max_new_tokens: longest response, at least 1.
        eos_token_id: ends a response and belongs to it.
        vocabulary_size: most log-probs that can be asked for.
        sampling_mask: vLLM returns kept sets itself (`return_sampling_mask`).
    """
    check_integer("max_new_tokens", max_new_tokens, at_least=1)
    return {
        "max_tokens": max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": [eos_token_id],
        "ignore_eos": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.biases().items()},
        "logprobs": 0 if sampling_mask or not tells_kept(sampling) else log_probs_for(sampling.top_k, vocabulary_size),
    }


def tells_kept(sampling: SamplingSpec) -> bool:
    """Whether kept sets come with the log-probs."""
    return sampling.truncates and sampling.logprobs == "processed"


def log_probs_for(top_k: int, vocabulary_size: int) -> int:
    """How many log-probs a token to ask for so that the finite ones are the whole kept set.

    vLLM keeps all logits that tie with the k-th, and logits computed in bfloat16 often do.
    """
    return min(vocabulary_size, top_k + top_k // 2 + 12)


def completion(choice: Any, *, row: int, sampling: SamplingSpec) -> Completion:  # noqa: ANN401 (whatever vLLM sent)
    """One response, with its kept sets when `sampling` truncates and its log-probs are processed.

    Args:
        choice: a choice as `/inference/v1/generate` sends it.
        row: which prompt it answers, for errors.
        sampling: how it was drawn; `policy_version` is that of the weights that vLLM started with.

    Raises:
        EngineAnswerError: the response was broken off, something is missing, or the probabilities of a kept set do
            not sum to 1.
    """
    try:
        tokens, content = choice["token_ids"], (choice.get("logprobs") or {}).get("content") or []
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise EngineAnswerError(f"row {row} ended with {reason!r}, not with an end token or at its full length")
        ids = [entry["token_id"] for entry in content]
        log_probs = [entry["logprob"] for entry in content]
        if ids != list(tokens[: len(ids)]):
            raise EngineAnswerError(f"row {row} has log-probs of the tokens {ids}, its tokens are {tokens}")
        kept = None
        if tells_kept(sampling):
            kept = choice.get("sampling_mask") or [
                _finite(entry["top_logprobs"], f"token {t} of row {row}", sampling) for t, entry in enumerate(content)
            ]
        return Completion(
            token_ids=tokens,
            log_probs=log_probs,
            kept=kept,
            raw_log_probs=log_probs if sampling.logprobs == "raw" else None,
            versions=_versions(choice.get("weight_versions"), len(tokens), row, sampling.policy_version),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineAnswerError(
            f"row {row} is no answer of vLLM ({type(error).__name__}: {error}): {str(choice)[:300]}"
        ) from error


def choice_of_text(choice: Any) -> dict[str, Any]:  # noqa: ANN401 (whatever vLLM sent)
    """A choice of `/v1/completions` in the form of `/inference/v1/generate`.

    It must have been asked for with `return_token_ids` and `return_tokens_as_token_ids`.

    Raises:
        EngineAnswerError: it has another form.
    """
    try:
        told = choice.get("logprobs") or {}
        names, log_probs = told.get("tokens") or [], told.get("token_logprobs") or []
        tops = told.get("top_logprobs") or [{} for _ in names]
        content = [
            {
                "token_id": _named(name),
                "logprob": log_prob,
                "top_logprobs": [{"token_id": _named(n), "logprob": value} for n, value in (top or {}).items()],
            }
            for name, log_prob, top in zip(names, log_probs, tops, strict=True)
        ]
        return {
            "token_ids": choice["token_ids"],
            "finish_reason": choice["finish_reason"],
            "logprobs": {"content": content},
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(
            f"no choice of vLLM's /v1/completions ({type(error).__name__}: {error}): {str(choice)[:300]}"
        ) from error


def prompt_log_probs(told: Any, row: Sequence[int]) -> list[float]:  # noqa: ANN401 (whatever vLLM sent)
    """The log-probs of a prompt's tokens after its first, from `prompt_logprobs`: one mapping a token, by its id.

    Raises:
        EngineAnswerError: they are not of this prompt.
    """
    try:
        return [float(found[str(token)]["logprob"]) for token, found in zip(row[1:], told[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(
            f"prompt_logprobs are not those of the prompt ({type(error).__name__}: {error}): {str(told)[:300]}"
        ) from error


def _named(name: str) -> int:
    """The id in "token_id:71"."""
    head, _, number = name.partition(":")
    if head != "token_id":
        raise ValueError(f"{name!r} is a text, not token_id:N")
    return int(number)


def _finite(entries: Sequence[Mapping[str, Any]], where: str, sampling: SamplingSpec) -> list[int]:
    """Ids of the entries above −∞: all that could be drawn."""
    finite = {entry["token_id"]: entry["logprob"] for entry in entries if entry["logprob"] > JSON_MINUS_INFINITY}
    mass = math.fsum(map(math.exp, finite.values()))
    if not abs(mass - 1) <= KEPT_MASS_ERROR:
        raise EngineAnswerError(
            f"{where}: the {len(finite)} ids that vLLM kept have a mass of {mass:.4f}, not 1. Either its log-probs are "
            'not processed (start it with logprobs_mode="processed_logprobs"), or more logits tie at the '
            f"{sampling.top_k}-th place than {len(entries)} log-probs can show"
        )
    return list(finite)


def _versions(spans: Any, tokens: int, row: int, initial: int | None) -> list[int] | None:  # noqa: ANN401
    """The policy version behind each token, from spans that cover them; None when vLLM tells none."""
    if not spans:
        return None

    def number(name: object) -> int:
        version = initial if name == INITIAL_VERSION else int(str(name)) if str(name).isdecimal() else None
        if version is None:
            raise EngineAnswerError(
                f"row {row} is of weights {name!r}; policy versions are numbers: set it with /update_weight_version"
            )
        return version

    return versions_of_spans(spans, tokens, row, number)
