"""SGLang server as an engine, over its native HTTP interface: token ids in, token ids and log-probs out.

The server returns three kinds of log-probs, and the `SamplingSpec` selects one:

- "raw": `output_token_logprobs` at temperature 1 without penalties, where they are log softmax(logits);
- "tempered": `output_token_logprobs` at any temperature, over the full vocabulary;
- "processed": without truncation the tempered ones. With truncation `output_token_sampling_logprobs`, over the
  kept sets of `output_token_sampling_mask`; they differ from the tempered ones by the log of the kept mass.

Sources: docs.sglang.io, "Sampling Parameters" and "SGLang for RL Systems". Tests of `/generate` use recorded answers
of SGLang 0.5.23; re-scoring and weight updates follow the documentation (docs/guides/engines.md).
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
    """Options of `SglangEngine`, in addition to `ServerOptions`.

    Attributes:
        engine_version: SGLang's version, for the `SamplingSpec`.
    """

    engine_version: str | None = None


# Sampling settings that change log-probs over the full vocabulary.
CHANGES_WHOLE = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
)


class SglangEngine(RemoteEngine):
    """Engine that samples with an SGLang server.

    Start the server with `--enable-deterministic-inference`, or it ignores seeds, and without
    SGLANG_RETURN_ORIGINAL_LOGPROB, which changes tempered log-probs to raw ones.

    Args:
        model: the policy. With a `folder` the engine loads its weights into the server at once; without a folder the
            server must already run them.
        settings: sampling settings. Truncated sampling needs a positive `top_k`: SGLang reports kept sets of a bounded
            size only. The end tokens in the model's own configuration end a response as well.
        options: the server's address and the folder for weights.
        version: policy version of `model`.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a number has an invalid type.
        ValueError: a setting is out of range, or the server does not return the requested log-probs.
        EngineUnavailableError: no server answers.
        EngineAnswerError: the server is not an SGLang server.
        WeightSyncError: the server's log-probs differ from the log-probs of `model`.
    """

    engine: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"

    options: SglangOptions

    def __init__(
        self, model: nn.Module, settings: GenerationSettings, options: SglangOptions, *, version: int = 0
    ) -> None:
        sampling = settings.sampling
        if sampling.logprobs == "raw" and not _full_equals_raw(sampling):
            raise ValueError(
                "SGLang returns raw log-probs at temperature 1 without penalties and min_new_tokens only: set "
                "logprobs='tempered', or 'processed' under a truncation"
            )
        # Without truncation there is no mask, and processed log-probs are the tempered ones.
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

        # Set every field: the model's `generation_config.json` would fill missing ones.
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

        raw = _full_equals_raw(sampling)
        return [
            read_completion(answer, row, masked=self._masked, raw=raw, initial=self._initial_version)
            for row, answer in enumerate(self._client.post_all("/generate", bodies))
        ]

    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> Sequence[Sequence[object]]:
        bodies = [
            {
                "input_ids": row,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},  # `score` rejects others
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


def _full_equals_raw(sampling: SamplingSpec) -> bool:
    """Return whether full-vocabulary log-probs equal log-probs at temperature 1 without penalties."""
    return not settings_in_use(sampling, CHANGES_WHOLE)


def read_completion(
    answer: Any,  # noqa: ANN401 (unchecked JSON)
    row: int,
    *,
    masked: bool,
    raw: bool,
    initial: int | None,
) -> Completion:
    """Parse the response in an answer.

    Args:
        answer: the JSON of the answer.
        row: index of its prompt, for errors.
        masked: whether the request set `return_sampling_mask`: log-probs are over the kept sets.
        raw: whether full-vocabulary log-probs are at temperature 1.
        initial: as in `versions_of_spans`.

    Raises:
        EngineRestartedError: the server lost the updated weights.
        EngineAnswerError: the response was cut off, a field is missing, or its length differs from the response's.
    """
    with reading(f"row {row} is no answer of SGLang", answer):
        meta, output_ids = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]
        if reason is None or reason["type"] not in ("stop", "length"):
            raise EngineAnswerError(f"row {row} did not finish: finish_reason is {brief(reason)}")

        # `output_ids` may lack the end token, but its log-prob is there.
        full, ids = _split_entries(meta, "output_token_logprobs", row)
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

        # The answer contains spans if weights changed within the response, otherwise one label.
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
    answer: Any,  # noqa: ANN401 (unchecked JSON)
    row: int,
    tokens: Sequence[int],
    *,
    version: int,
    initial: int | None,
) -> list[Any]:
    """Parse the log-probs of `tokens` after their first, from an answer to a request with `logprob_start_len` 0.

    Args:
        answer: the JSON of the answer.
        row: index of the row, for errors.
        tokens: the tokens to score.
        version: policy version that must have scored them.
        initial: as in `versions_of_spans`.

    Raises:
        EngineRestartedError: the server lost the updated weights.
        EngineAnswerError: a field is missing, or the tokens or weights differ from the request.
    """
    with reading(f"row {row} is no answer of SGLang", answer):
        meta = answer["meta_info"]
        log_probs, ids = _split_entries(meta, "input_token_logprobs", row)
        if ids != list(tokens):
            raise EngineAnswerError(
                f"row {row}: SGLang scored the tokens {brief(ids)} instead of {brief(list(tokens))}"
            )
        found = version_of_weights(meta.get("weight_version"), row, initial=initial)
        if found != version:
            raise EngineAnswerError(
                f"row {row}: SGLang says that it has weights {str(found)!r}, it was given {str(version)!r}"
            )

        # The list contains an entry without a log-prob for the first token.
        return log_probs[1:]


def _split_entries(meta: Mapping[str, Any], name: str, row: int) -> tuple[list[Any], list[Any]]:
    """Return log-probs and token ids of a list of [log-prob, token id, text]."""
    entries = meta[name]
    with reading(f"row {row}: {name} is no list of [log-prob, token id, text]", entries):
        return [entry[0] for entry in entries], [entry[1] for entry in entries]
