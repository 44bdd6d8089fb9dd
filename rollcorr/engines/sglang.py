"""An SGLang server as an engine, over its native HTTP interface: token ids in, token ids and log-probs out.

Three kinds of log-probs come back, and the `SamplingSpec` says which one is wanted:

- "raw": `output_token_logprobs` at temperature 1 without penalties, where they are log softmax(logits);
- "tempered": `output_token_logprobs` at any temperature, over the full vocabulary;
- "processed": under a truncation `output_token_sampling_logprobs`, over the kept sets of `output_token_sampling_mask`,
  which differ from the tempered ones by the log of the kept mass; without a truncation the tempered ones.

Sources: docs.sglang.io, "Sampling Parameters" and "SGLang for RL Systems". Answers to `/generate` are tested on what
SGLang 0.5.23 answered; re-scoring and weight updates follow the documentation (docs/engines.md).
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcorr.checks import check_integer, check_number
from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, Rollout, WeightSyncError, check_weight_sync
from rollcorr.engines.completions import rollout_from_completions
from rollcorr.engines.http import JsonClient
from rollcorr.engines.probe import make_probe, score_probe
from rollcorr.engines.scoring import TokenBatch, pad_prompts
from rollcorr.engines.sglang_answer import read_completion, read_scores


class SglangEngine:
    """Sample with an SGLang server.

    Start it with `--enable-deterministic-inference`, or it ignores seeds, and without SGLANG_RETURN_ORIGINAL_LOGPROB,
    which makes tempered log-probs raw ones.

    Args:
        url: where the server is, or a `JsonClient` with time-outs of your own.
        sampling: how to draw tokens. Truncated sampling needs a positive `top_k`: SGLang tells kept sets of a bounded
            size only.
        max_new_tokens: longest response, at least 1.
        eos_token_id: ends a response and belongs to it. The model's own end tokens end one too.
        pad_token_id: fills rows.
        vocabulary_size: ids run from 0 to below it; None checks the lower end only.
        weights_dir: where weights for the server are written, at a path that it can read too. None for an engine whose
            weights are never updated.
        dtype: what the server computes in.
        sync_tolerance: nats by which a probe may differ between the server and the policy in `dtype` after a weight
            update. Measure yours: two bfloat16 implementations differ by tenths of a nat on unlikely tokens.
        engine_version: SGLang's version, for the `SamplingSpec`.
        device: where rollouts go.
        version: policy version of the weights that the server was started with.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a number is of the wrong type.
        ValueError: a setting is out of range, or the server has no such log-probs.
    """

    def __init__(
        self,
        url: str | JsonClient,
        *,
        sampling: SamplingSpec,
        max_new_tokens: int,
        eos_token_id: int,
        pad_token_id: int,
        vocabulary_size: int | None = None,
        weights_dir: str | Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        sync_tolerance: float = 0.5,
        engine_version: str | None = None,
        device: torch.device | str = "cpu",
        version: int = 0,
    ) -> None:
        check_integer("max_new_tokens", max_new_tokens, at_least=1)
        check_number("sync_tolerance", sync_tolerance, above=0)
        _check_sampling(sampling)
        self.client = url if isinstance(url, JsonClient) else JsonClient(url)
        self.sampling = dataclasses.replace(
            sampling, engine="sglang", engine_version=engine_version, policy_version=version
        )
        self.max_new_tokens = max_new_tokens
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.vocabulary_size = vocabulary_size
        self.weights_dir = None if weights_dir is None else Path(weights_dir)
        self.dtype = dtype
        self.sync_tolerance = sync_tolerance
        self.device = device
        self._first_version = version
        self._directory: Path | None = None  # the weights that the server loaded last

    @property
    def weight_version(self) -> int:
        """Version of the policy that samples now."""
        return self.sampling.policy_version or 0

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int) -> Rollout:
        """Sample one response per prompt, one request each; all arrive, or none is used.

        Args:
            prompts: token ids, B rows, none empty.
            seed: gives each request a seed of its own.

        Raises:
            ValueError: a prompt is empty.
            EngineUnavailableError: the server died or did not answer in time.
            EngineAnswerError: it refused, or an answer is incomplete.
        """
        pad_prompts([list(prompt) for prompt in prompts], pad_token_id=self.pad_token_id)  # refuses empty ones
        seeds = random.Random(seed)
        bodies = [
            {
                "input_ids": list(prompt),
                "sampling_params": self._sampling_params() | {"sampling_seed": seeds.getrandbits(31)},
                "return_logprob": True,
                "return_sampling_mask": self._masked,
            }
            for prompt in prompts
        ]
        answers = self.client.post_all("/generate", bodies)
        return rollout_from_completions(
            prompts,
            [
                read_completion(
                    answer, row, masked=self._masked, raw=_full_is_raw(self.sampling), first_version=self._first_version
                )
                for row, answer in enumerate(answers)
            ],
            sampling=self.sampling,
            pad_token_id=self.pad_token_id,
            vocabulary_size=self.vocabulary_size,
            device=self.device,
        )

    def score(self, tokens: TokenBatch) -> Tensor:
        """Log-probs that the server gives to response tokens at temperature 1, (B, T) float32; 0 outside the mask.

        Raises:
            ValueError: the sampling temperature is another; SGLang scores given tokens at temperature 1 only.
            EngineUnavailableError: the server died or did not answer in time.
            EngineAnswerError: it refused, or an answer is incomplete.
        """
        if self.sampling.temperature != 1:
            raise ValueError(
                f"SGLang scores given tokens at temperature 1 only, and this engine samples at temperature "
                f"{self.sampling.temperature:g}"
            )
        return self._score(tokens, None)

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Write the weights of `model`, have the server load them, and verify them on a probe batch.

        Raises:
            ValueError: the engine has no `weights_dir`.
            EngineUnavailableError: the server died or did not answer in time.
            WeightSyncError: it refused the weights, reports another version, or scores the probe differently.
        """
        self._take(model, version)

    def export_weights(self) -> Mapping[str, Tensor]:
        """The weights given last, by name, as they were written; tied ones once.

        Raises:
            ValueError: none were given: the server still has those that it was started with.
        """
        from safetensors.torch import load_file

        weights: dict[str, Tensor] = {}
        for path in sorted(self._given().glob("*.safetensors")):
            weights |= load_file(path)
        return weights

    @torch.no_grad()
    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore what `export_weights` returned, verified as in `update_weights`.

        Raises:
            ValueError: no weights were given before, so the architecture is not known.
            WeightSyncError: as `update_weights`.
        """
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._given(), local_files_only=True)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        self._take(model, version)

    def _given(self) -> Path:
        if self._directory is None:
            raise ValueError("the server still has the weights that it was started with: call update_weights first")
        return self._directory

    def _take(self, model: Any, version: int) -> None:  # noqa: ANN401 (a transformers model)
        if self.weights_dir is None:
            raise ValueError("weights cannot be updated without weights_dir, a directory that the server reads too")
        directory = self.weights_dir / f"version_{version}"
        unfinished = self.weights_dir / f"version_{version}.unfinished"
        for old in (directory, unfinished):
            shutil.rmtree(old, ignore_errors=True)
        model.save_pretrained(unfinished)
        unfinished.rename(directory)
        try:
            answer = self.client.post(
                "/update_weights_from_disk",
                {"model_path": str(directory), "weight_version": str(version), "flush_cache": True},
            )
        except EngineAnswerError as error:
            raise WeightSyncError(f"SGLang did not take the weights of version {version}: {error}") from error
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise WeightSyncError(f"SGLang did not take the weights of version {version}: {answer}")
        probe = make_probe(model)
        expected = score_probe(model, probe, dtype=self.dtype)
        check_weight_sync(self._score(probe, version), expected, tolerance=self.sync_tolerance)
        if self._directory not in (None, directory):
            shutil.rmtree(self._given(), ignore_errors=True)
        self._directory = directory
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def _score(self, tokens: TokenBatch, version: int | None) -> Tensor:
        """Log-probs at temperature 1; `version`: what the server must say that it scored with."""
        prompts = [ids[mask].tolist() for ids, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)]
        responses = [ids[mask].tolist() for ids, mask in zip(tokens.response_ids, tokens.response_mask, strict=True)]
        bodies = [
            {
                "input_ids": prompt + response,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        answers = self.client.post_all("/generate", bodies)
        completions = [
            read_scores(answer, row, response, version=version)
            for row, (answer, response) in enumerate(zip(answers, responses, strict=True))
        ]
        log_prob = rollout_from_completions(
            prompts, completions, sampling=self.sampling, pad_token_id=self.pad_token_id
        ).rollout_log_prob
        width = tokens.response_ids.shape[1]
        return nn.functional.pad(log_prob, (0, width - log_prob.shape[1])).to(tokens.response_ids.device)

    @property
    def _masked(self) -> bool:
        return self.sampling.logprobs == "processed" and self.sampling.truncates

    def _sampling_params(self) -> dict[str, Any]:
        """Every setting by name, or the model's `generation_config.json` would fill those left out."""
        sampling = self.sampling
        return {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.biases().items()} or None,
            "stop_token_ids": [self.eos_token_id],
            "no_stop_trim": True,
        }


def _full_is_raw(sampling: SamplingSpec) -> bool:
    """Whether log-probs over the whole vocabulary are those at temperature 1 without penalties."""
    off = SamplingSpec()
    names = (
        "temperature",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "min_new_tokens",
    )
    return all(getattr(sampling, name) == getattr(off, name) for name in names)


def _check_sampling(sampling: SamplingSpec) -> None:
    if sampling.temperature <= 0:
        raise ValueError(f"temperature must be > 0 to sample, got {sampling.temperature}")
    if sampling.support != "engine":
        raise ValueError(f"support={sampling.support!r}: an engine returns log-probs over its own support")
    if sampling.logprobs == "raw" and not _full_is_raw(sampling):
        raise ValueError(
            f"SGLang returns raw log-probs at temperature 1 without penalties only, got temperature "
            f"{sampling.temperature:g}: set logprobs='tempered', or 'processed' under a truncation"
        )
    if sampling.logprobs == "processed" and sampling.truncates and sampling.top_k < 1:
        raise ValueError(
            f"top_p={sampling.top_p:g}, min_p={sampling.min_p:g} without top_k: SGLang tells kept sets of bounded size "
            "only; set top_k too"
        )
