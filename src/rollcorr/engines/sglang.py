"""An SGLang server as an engine, over its native HTTP interface: token ids in, token ids and log-probs out.

Three kinds of log-probs come back, and the `SamplingSpec` names the one to use:

- "raw": `output_token_logprobs` at temperature 1 without penalties, where they are log softmax(logits);
- "tempered": `output_token_logprobs` at any temperature, over the full vocabulary;
- "processed": without a truncation the tempered ones. Under a truncation `output_token_sampling_logprobs`, over the
  kept sets of `output_token_sampling_mask`; they differ from the tempered ones by the log of the kept mass.

Sources: docs.sglang.io, "Sampling Parameters" and "SGLang for RL Systems". Answers to `/generate` are tested on what
SGLang 0.5.23 answered; re-scoring and weight updates follow the documentation (docs/guides/engines.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineError, GenerationSettings, WeightSyncError, settings_in_use
from rollcorr.engines.completions import Completion, check_log_prob, reading, version_of_weights, versions_of_spans
from rollcorr.engines.remote_engine import RemoteEngine, ServerOptions
from rollcorr.engines.transport.answer_body import brief


@dataclass(frozen=True, kw_only=True)
class SglangOptions(ServerOptions):
    """Options of `SglangEngine`, beside those of `ServerOptions`.

    Attributes:
        engine_version: SGLang's version, for the `SamplingSpec`.
    """

    engine_version: str | None = None


# Sampling settings that change log-probs over the whole vocabulary.
CHANGES_WHOLE = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
)


class SglangEngine(RemoteEngine):
    """Sample with an SGLang server.

    Start it with `--enable-deterministic-inference`, or it ignores seeds, and without SGLANG_RETURN_ORIGINAL_LOGPROB,
    which turns tempered log-probs into raw ones.

    Args:
        model: the policy. With a `folder` its weights are loaded into the server at once; without one the server must
            have been started with them.
        settings: how to sample. Truncated sampling needs a positive `top_k`: SGLang reports kept sets of a bounded size
            only. The end tokens in the model's own configuration end a response too.
        options: where the server is, and how weights reach it.
        version: policy version of `model`.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a number is of the wrong type.
        ValueError: a setting is out of range, or the server has no such log-probs.
        EngineUnavailableError: no server answers.
        EngineAnswerError: it is no SGLang server.
        WeightSyncError: it does not compute what `model` computes.
    """

    engine: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"

    options: SglangOptions

    def __init__(
        self, model: nn.Module, settings: GenerationSettings, options: SglangOptions, *, version: int = 0
    ) -> None:
        sampling = settings.sampling
        if sampling.logprobs == "raw" and not _full_is_raw(sampling):
            raise ValueError(
                "SGLang returns raw log-probs at temperature 1 without penalties and min_new_tokens only: set "
                "logprobs='tempered', or 'processed' under a truncation"
            )
        # Without a truncation there is no mask, and processed log-probs are the tempered ones.
        self._masked = sampling.logprobs == "processed" and sampling.truncates
        if self._masked and sampling.top_k < 1:
            raise ValueError(
                f"top_p={sampling.top_p:g}, min_p={sampling.min_p:g} without top_k: SGLang reports kept sets of "
                "bounded size only; set top_k too"
            )

        super().__init__(model, settings, options, version=version)
        self.sampling = dataclasses.replace(self.sampling, engine_version=options.engine_version)
        self._connect(model, options, version, log_probs_per_token=2 + sampling.top_k if self._masked else 1)

    @property
    def _folder(self) -> Path:
        if self.options.folder is None:
            raise EngineError("this SGLang engine updates no weights: give it a folder that the server reads too")
        return Path(self.options.folder)

    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        sampling = self.sampling

        # Every setting by name, or the model's `generation_config.json` would fill those left out.
        parameters = {
            "max_new_tokens": self.settings.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.biases().items()} or None,
            "stop_token_ids": [self.settings.eos_token_id],
            "no_stop_trim": True,
        }
        bodies = [
            {
                "input_ids": prompt,
                "sampling_params": parameters | {"sampling_seed": seed >> 32},  # 31 bits
                "return_logprob": True,
                "return_sampling_mask": self._masked,
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

        raw = _full_is_raw(sampling)
        return [
            read_completion(answer, row, masked=self._masked, raw=raw, initial=self._initial_version)
            for row, answer in enumerate(self._client.post_all("/generate", bodies))
        ]

    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> Sequence[Sequence[object]]:
        bodies = [
            {
                "input_ids": row,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            for row in rows
        ]
        answers = self._client.post_all("/generate", bodies)
        return [
            read_scores(answer, number, row, version=self._given[-1], initial=self._initial_version)
            for number, (answer, row) in enumerate(zip(answers, rows, strict=True))
        ]

    def _load(self, version: int) -> None:
        body = {"model_path": str(self._folder), "weight_version": str(version), "flush_cache": True}
        answer = self._client.post("/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise WeightSyncError(f"weight sync incomplete, SGLang did not load version {version}: {brief(answer)}")


def _full_is_raw(sampling: SamplingSpec) -> bool:
    """Whether log-probs over the whole vocabulary are those at temperature 1 without penalties."""
    return not settings_in_use(sampling, CHANGES_WHOLE)


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
    with reading(f"row {row} is no answer of SGLang", answer):
        meta, output_ids = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]
        if reason is None or reason["type"] not in ("stop", "length"):
            raise EngineAnswerError(f"row {row} did not finish: finish_reason is {brief(reason)}")

        # output_ids may lack the end token, whose log-prob is there.
        full, ids = _entries(meta, "output_token_logprobs", row)
        count = meta["completion_tokens"]
        if count != len(ids) or output_ids not in (ids, ids[:-1]):
            raise EngineAnswerError(
                f"row {row} has {len(ids)} output_token_logprobs, for completion_tokens {brief(count)} and output_ids "
                f"{brief(output_ids)}"
            )

        sampled, kept, mass = full, None, None
        if masked:
            sampled, kept = meta.get("output_token_sampling_logprobs"), meta.get("output_token_sampling_mask")
            if sampled is None or kept is None:
                raise EngineAnswerError(f"row {row} has no kept sets; the server must know return_sampling_mask")
            mass = [
                check_log_prob(whole, f"output_token_logprobs[{token}] of row {row}")
                - check_log_prob(inside, f"output_token_sampling_logprobs[{token}] of row {row}")
                for token, (whole, inside) in enumerate(zip(full, sampled, strict=True))
            ]

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
    with reading(f"row {row} is no answer of SGLang", answer):
        meta = answer["meta_info"]
        log_probs, ids = _entries(meta, "input_token_logprobs", row)
        if ids != list(tokens):
            raise EngineAnswerError(
                f"row {row}: SGLang scored the tokens {brief(ids)} instead of {brief(list(tokens))}"
            )
        found = version_of_weights(meta.get("weight_version"), row, initial=initial)
        if found != version:
            raise EngineAnswerError(
                f"row {row}: SGLang says that it has weights {str(found)!r}, it was given {str(version)!r}"
            )

        # The first token has no log-prob, and comes all the same.
        return log_probs[1:]


def _entries(meta: Mapping[str, Any], name: str, row: int) -> tuple[list[Any], list[Any]]:
    """Log-probs and token ids of a list of [log-prob, token id, text]."""
    entries = meta[name]
    with reading(f"row {row}: {name} is no list of [log-prob, token id, text]", entries):
        return [entry[0] for entry in entries], [entry[1] for entry in entries]
