"""Common base of both vLLM engines: sampling parameters of requests, and the parser of answers.

Answers have one format here: a choice of `/inference/v1/generate`. The worker process sends this format as well, and
`choice_of_text` converts a choice of `/v1/completions` to it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from rollcorr.config import SamplingSpec
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, Actor
from rollcorr.engines.base import EngineAnswerError, GenerationSettings
from rollcorr.engines.completions import Completion, reading, versions_of_spans
from rollcorr.engines.remote_engine import RemoteEngine, RemoteOptions
from rollcorr.engines.transport.answer_body import brief

# Lowest temperature: vLLM raises lower ones to it.
LOWEST_TEMPERATURE = 0.01

# Largest logit bias: vLLM cuts larger ones to it.
LARGEST_BIAS = 100.0

# Tolerance for the sum of a kept set's probabilities, which should be 1.
KEPT_MASS_ERROR = 1e-3


class VllmBase(RemoteEngine):
    """Base class of vLLM engines. Subclasses implement the transport.

    vLLM scores prompts at temperature 1. Any other temperature needs every log-prob of the vocabulary, which only
    offline vLLM returns: slow for a large vocabulary.

    Args:
        model: a causal language model of `transformers`: the policy, and the reference of the first probe.
        settings: sampling settings. `logprobs` is "raw" or "processed"; processed ones come with kept sets if anything
            truncates, and then `top_k` must be on. Only `eos_token_id` ends a response, not the checkpoint's own end
            tokens.
        options: precision and tolerance.
        version: policy version of `model`.
        sampling_mask: whether vLLM returns kept sets itself.

    Raises:
        TypeError: a number has an invalid type.
        ValueError: a setting is out of range or unsupported.
    """

    engine: ClassVar[str] = "vllm"
    truncation_records: tuple[Actor, ...] = ("replay",)
    title: ClassVar[str] = "vLLM"

    def __init__(
        self,
        model: nn.Module,
        settings: GenerationSettings,
        options: RemoteOptions,
        *,
        version: int,
        sampling_mask: bool,
    ) -> None:
        sampling = settings.sampling
        check_sampling(sampling)
        super().__init__(model, settings, options, version=version)

        # vLLM keeps all logits that tie with the k-th, and logits computed in bfloat16 often do.
        log_probs = 0
        if tells_kept(sampling) and not sampling_mask:
            log_probs = min(self.vocabulary_size, sampling.top_k + sampling.top_k // 2 + 12)

        # Fields of `vllm.SamplingParams`, also used in requests to a server. Each has a value here, so that no server
        # default applies. Only `eos_token_id` ends a response, not the checkpoint's own end tokens.
        self._parameters: dict[str, Any] = {
            "max_tokens": settings.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "stop_token_ids": [settings.eos_token_id],
            "ignore_eos": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.biases().items()},
            "logprobs": log_probs,
        }

    @abc.abstractmethod
    def _request_choices(self, prompts: list[list[int]], seeds: list[int], parameters: Mapping[str, Any]) -> list[Any]:
        """Return one answer per prompt, in the format of `/inference/v1/generate`."""

    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        choices = self._request_choices(prompts, seeds, self._parameters)
        return [
            completion(choice, row=row, sampling=self.sampling, initial=self._initial_version)
            for row, choice in enumerate(choices)
        ]


def check_sampling(sampling: SamplingSpec) -> None:
    """Check that vLLM follows the settings exactly, and can report the kept sets of the log-probs.

    Raises:
        ValueError: the message contains the setting and the fix.
    """
    if sampling.logprobs == "tempered":
        raise ValueError("logprobs='tempered': vLLM returns raw or processed log-probs; set logprobs to one of these")
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
            f"top_p={sampling.top_p:g}, min_p={sampling.min_p:g} without top_k: a kept set may be the whole "
            "vocabulary, too large to send for each token, and vLLM's return_sampling_mask refuses it as well; set "
            "top_k too (a large one changes little), or do without kept sets: logprobs='raw'"
        )


def tells_kept(sampling: SamplingSpec) -> bool:
    """Return whether kept sets come with the log-probs."""
    return sampling.truncates and sampling.logprobs == "processed"


def completion(
    choice: Any,  # noqa: ANN401 (unchecked JSON)
    *,
    row: int,
    sampling: SamplingSpec,
    initial: int | None,
) -> Completion:
    """Parse one response, with its kept sets if `sampling` truncates and its log-probs are processed.

    Args:
        choice: a choice in the format of `/inference/v1/generate`.
        row: index of its prompt, for errors.
        sampling: how it was drawn.
        initial: as in `versions_of_spans`.

    Raises:
        EngineRestartedError: vLLM lost the updated weights.
        EngineAnswerError: the response was cut off, a field is missing, or the probabilities of a kept set do not sum
            to 1.
    """
    with reading(f"row {row} is no answer of vLLM", choice):
        tokens, content = choice["token_ids"], (choice.get("logprobs") or {}).get("content") or []
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise EngineAnswerError(
                f"row {row} ended with {brief(reason)}, not with an end token or at its full length"
            )

        # Fewer log-probs than tokens are allowed here: the checks of the batch report them.
        ids = [entry["token_id"] for entry in content]
        log_probs = [entry["logprob"] for entry in content]
        if ids != list(tokens[: len(ids)]):
            raise EngineAnswerError(
                f"row {row} has log-probs of the tokens {brief(ids)}, its tokens are {brief(tokens)}"
            )

        kept = None
        if tells_kept(sampling):
            kept = choice.get("sampling_mask") or [
                _finite_ids(entry["top_logprobs"], f"token {t} of row {row}", sampling)
                for t, entry in enumerate(content)
            ]

        # An older release omits the versions, or sends an empty list in their place.
        spans = choice.get("weight_versions") or None
        return Completion(
            token_ids=tokens,
            log_probs=log_probs,
            kept=kept,
            raw_log_probs=log_probs if sampling.logprobs == "raw" else None,
            versions=None if spans is None else versions_of_spans(spans, len(tokens), row, initial=initial),
        )


def choice_of_text(choice: Any) -> dict[str, Any]:  # noqa: ANN401 (unchecked JSON)
    """Convert a choice of `/v1/completions` to the format of `/inference/v1/generate`.

    The request must set `return_token_ids` and `return_tokens_as_token_ids`.

    Raises:
        EngineAnswerError: the choice has an unexpected format.
    """
    with reading("no choice of vLLM's /v1/completions", choice):
        found = choice.get("logprobs") or {}
        names, log_probs = found.get("tokens") or [], found.get("token_logprobs") or []
        tops = found.get("top_logprobs") or [{} for _ in names]
        content = [
            {
                "token_id": _parse_token_id(name),
                "logprob": log_prob,
                "top_logprobs": [
                    {"token_id": _parse_token_id(n), "logprob": value} for n, value in (top or {}).items()
                ],
            }
            for name, log_prob, top in zip(names, log_probs, tops, strict=True)
        ]
        return {
            "token_ids": choice["token_ids"],
            "finish_reason": choice["finish_reason"],
            "logprobs": {"content": content},
        }


def prompt_log_probs(found: Any, row: Sequence[int]) -> list[Any]:  # noqa: ANN401 (unchecked JSON)
    """Return the log-probs of a prompt's tokens after its first, from `prompt_logprobs`: one mapping per token, by id.

    The values are not checked here.

    Raises:
        EngineAnswerError: they belong to a different prompt.
    """
    with reading("prompt_logprobs are not those of the prompt", found):
        return [by_id[str(token)]["logprob"] for token, by_id in zip(row[1:], found[1:], strict=True)]


def _parse_token_id(name: str) -> int:
    """Parse the id in "token_id:71"; raise `ValueError` for any other text."""
    _, number = name.split("token_id:")
    return int(number)


def _finite_ids(entries: Sequence[Mapping[str, Any]], where: str, sampling: SamplingSpec) -> list[int]:
    """Return the ids of the entries above −∞: all ids that could be drawn."""
    # Processed log-probs of a complete kept set sum to probability 1; any other sum means an incomplete set.
    finite = {entry["token_id"]: entry["logprob"] for entry in entries if entry["logprob"] > JSON_MINUS_INFINITY}
    mass = math.fsum(map(math.exp, finite.values()))
    if not abs(mass - 1) <= KEPT_MASS_ERROR:  # true for NaN as well
        raise EngineAnswerError(
            f"{where}: the {len(finite)} ids that vLLM kept have a mass of {mass:.4f}, not 1. Either its log-probs are "
            'not processed (start it with logprobs_mode="processed_logprobs"), or more logits tie at the '
            f"{sampling.top_k}-th place than {len(entries)} log-probs can show"
        )
    return list(finite)
