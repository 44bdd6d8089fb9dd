"""Embedded engine: a low-precision copy of the policy that samples in process with `generate` of `transformers`.

It needs only the trainer's own packages and has a real mismatch: the copy computes in bfloat16, the trainer in
float32.

Continuous batching starts the next response as soon as one ends. It is faster on a GPU if lengths differ much. On
a CPU it is slower than `generate`, and by default its cache uses nine tenths of the free memory; `num_blocks` limits
it. It returns processed log-probs only: no raw log-probs and no kept sets.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.config.checks import check_integer
from rollcorr.core.sampling import KeptSets, concatenate_kept_sets, kept_sets_of_support
from rollcorr.engines.base import (
    Engine,
    EngineAnswerError,
    EngineUnavailableError,
    GenerationSettings,
    Rollout,
    TokenBatch,
    check_weight_sync,
    join_padded,
    pad_prompts,
    refuse_settings,
)
from rollcorr.engines.completions import Completion, rollout_from_completions
from rollcorr.engines.gathered_policy import gather_policy
from rollcorr.engines.response_scoring import copied_model, make_probe, score_probe, score_responses
from rollcorr.engines.row_seeds import RowSampler

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

# Tolerance, in nats, between the copy and the rounded policy on the probe. Both run the same code.
SYNC_TOLERANCE = 1e-4

# Settings that continuous batching ignores, at most with a warning.
_UNSUPPORTED_SETTINGS = ("min_p", "repetition_penalty", "min_new_tokens")


class TransformersEngine(Engine):
    """Engine that samples with a copy of `model` in a different dtype.

    Args:
        model: a causal language model of `transformers`; it is copied, never changed.
        settings: sampling settings. Biases, and penalties that `generate` lacks, raise an error.
        version: policy version of `model`.
        dtype: precision of the copy's parameters. Buffers (rotary frequencies) keep their own.
        batch_size: rows per batch of sampling; optional. Defaults to all rows. Needs memory for a batch's logits.
        continuous_batching: fields of transformers' `ContinuousBatchingConfig`, such as `num_blocks`: sample with
            `generate_batch`, which returns processed log-probs and no kept sets, with one seed per process; optional.
            Defaults to `generate`.

    Raises:
        ImportError: this release of transformers has no continuous batching.
        ValueError: a setting is out of range or unsupported.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: GenerationSettings,
        *,
        version: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        batch_size: int | None = None,
        continuous_batching: Mapping[str, Any] | None = None,
    ) -> None:
        import transformers

        if batch_size is not None:
            check_integer("batch_size (None for all)", batch_size, at_least=1)
        if continuous_batching is not None:
            _check_continuous_batching(settings.sampling)

        self.settings = settings
        self.sampling = dataclasses.replace(
            settings.sampling, engine="transformers", engine_version=transformers.__version__, policy_version=version
        )
        self.dtype = dtype
        self.batch_size = batch_size
        self.continuous_batching = continuous_batching
        self.row_seeds = continuous_batching is None
        self.truncation_records = ("replay", "kept_mass") if continuous_batching is None else ()

        # Parameters only: `model.to(dtype)` would round the rotary frequencies as well.
        model = gather_policy(model)
        self.model: Any = copied_model(model).requires_grad_(False).eval()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

        # The copy's own generation defaults would fill every unset field.
        self.generation_config = _generation_config(settings, do_sample=not self.row_seeds)
        self.model.generation_config = self.generation_config

        self._probe = make_probe(model)
        self.update_weights(model, version=version)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int, first_row: int = 0) -> Rollout:
        """Sample one response per prompt. The global random state stays unchanged.

        Args:
            prompts: token ids of B non-empty prompts.
            seed: random seed; each row gets a seed derived from it.
            first_row: index of the first prompt in the global batch.

        Raises:
            ValueError: a prompt is empty.
            EngineAnswerError: a log-prob is NaN.
            EngineError: continuous batching failed.
        """
        ids, mask = pad_prompts(prompts, pad_token_id=self.settings.pad_token_id)
        size = self.batch_size or len(prompts)
        device = self.model.device
        if self.continuous_batching is not None:
            # It draws from torch's global generator.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                completions = generate_continuously(
                    self.model, prompts, self.generation_config, options=self.continuous_batching, seed=seed + first_row
                )
            return rollout_from_completions(
                prompts,
                completions,
                sampling=self.sampling,
                pad_token_id=self.settings.pad_token_id,
                device=device,
            )

        rows = range(first_row, first_row + len(prompts))
        parts = [
            self._generate(chunk, chunk_mask, RowSampler(seed, rows[first : first + size]))
            for first, chunk, chunk_mask in zip(
                range(0, len(prompts), size), ids.to(device).split(size), mask.to(device).split(size), strict=True
            )
        ]

        # Each chunk ends with its longest response, so chunks differ in width.
        chunks, kept_sets = zip(*parts, strict=True)
        response, valid, raw, processed, mass = map(join_padded, zip(*chunks, strict=True))
        kept = [sets for sets in kept_sets if sets is not None]
        if processed.isnan().any():
            raise EngineAnswerError(
                f"{int(processed.isnan().sum())} of {int(valid.sum())} sampled tokens have the log-prob NaN: the "
                f"weights are broken, or the model leaves the range of {self.dtype}; try dtype=torch.float32"
            )
        return Rollout(
            tokens=TokenBatch(ids.to(device), mask.to(device), response, valid),
            rollout_log_prob=raw if self.sampling.logprobs == "raw" else processed,
            sampling=self.sampling,
            raw_log_prob=raw,
            kept=concatenate_kept_sets(kept) if kept else None,
            log_kept_mass=mass if kept else None,
        )

    @torch.no_grad()
    def score(self, tokens: TokenBatch) -> Tensor:
        """Compute log-probs of response tokens under the copy, at the sampling temperature, (B, T) float32."""
        return score_responses(self.model, tokens.to(self.model.device), temperature=self.sampling.temperature).log_prob

    @torch.no_grad()
    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Copy the weights of `model`, rounded to this engine's dtype, and verify them on a probe batch.

        `model` scores the probe as well, with its weights rounded the same way. So both log-probs agree to the last bit
        if every parameter was copied.

        Args:
            model: the trainer's policy.
            version: version of its weights, recorded in rollouts.

        Raises:
            WeightSyncError: the log-probs differ.
        """
        model = gather_policy(model)
        self._copy_weights(model)

        # The version changes last: after a failure the engine keeps the previous one.
        expected = score_probe(model, self._probe, dtype=self.dtype, temperature=self.sampling.temperature)
        check_weight_sync(self.score(self._probe), expected, tolerance=SYNC_TOLERANCE)
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the current parameters by name; tied ones once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore weights from `export_weights`.

        Args:
            weights: name → parameter, each in the shape that it has in the model.
            version: version of these weights, recorded in rollouts.
        """
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def _copy_weights(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)

    def _generate(self, ids: Tensor, mask: Tensor, sampler: RowSampler) -> tuple[list[Tensor], KeptSets | None]:
        """Sample one chunk: ids, mask, raw and processed log-probs, log kept mass, (b, t) each; and the kept sets."""
        output = self.model.generate(
            ids,
            attention_mask=mask.long(),
            generation_config=copy.deepcopy(self.generation_config),
            logits_processor=_processors(self.sampling, sampler),
        )

        # A response includes its first end token and stops there. On a GPU `generate` may discard a last position.
        response = output.sequences[:, ids.shape[1] :]
        scores = sampler.scores[: response.shape[1]]
        is_end = response == self.settings.eos_token_id
        ended = is_end.cumsum(1)
        valid = (ended == 0) | ((ended == 1) & is_end)

        # Finite scores mark the ids that remain after truncation.
        kept, mass = None, torch.zeros_like(response, dtype=torch.float32)
        if self.sampling.truncates:
            kept = _collect_kept_sets(scores, valid)
            mass = _log_kept_mass(output.logits, scores, valid, self.sampling.temperature)

        chunk = [
            response.masked_fill(~valid, self.settings.pad_token_id),
            valid,
            _log_prob(output.logits, response, valid),
            _log_prob(scores, response, valid),
            mass,
        ]
        return chunk, kept


def _generation_config(settings: GenerationSettings, *, do_sample: bool) -> GenerationConfig:
    """Return the configuration of `generate`; without `do_sample`, `_processors` changes the logits and draws."""
    from transformers import GenerationConfig

    sampling = settings.sampling
    lacking = ("presence_penalty", "frequency_penalty")
    refuse_settings(sampling, lacking, "the transformers engine, which has repetition_penalty only")
    if sampling.logit_bias or sampling.logprobs == "tempered":
        raise ValueError(
            f"logit_bias={sampling.logit_bias!r}, logprobs={sampling.logprobs!r}: the transformers engine biases no "
            "logits and returns raw or processed log-probs; leave logit_bias out and set logprobs to one of these"
        )

    sampled = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p or None,
    }

    # Logits give the raw log-probs.
    return GenerationConfig(
        do_sample=do_sample,
        **(sampled if do_sample else {}),
        repetition_penalty=sampling.repetition_penalty,
        min_new_tokens=sampling.min_new_tokens or None,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _processors(sampling: SamplingSpec, sampler: RowSampler) -> LogitsProcessorList:
    """Return temperature and truncation in the order of `generate`, after its penalties; then the draw."""
    import transformers

    warpers = (
        (sampling.temperature != 1, transformers.TemperatureLogitsWarper, sampling.temperature),
        (sampling.top_k > 0, transformers.TopKLogitsWarper, sampling.top_k),
        (sampling.top_p < 1, transformers.TopPLogitsWarper, sampling.top_p),
        (sampling.min_p > 0, transformers.MinPLogitsWarper, sampling.min_p),
    )
    used = [warper(value) for is_used, warper, value in warpers if is_used]
    return transformers.LogitsProcessorList([*used, sampler])


def _log_prob(logits: Sequence[Tensor], response: Tensor, valid: Tensor) -> Tensor:
    """Compute log softmax in float32 of each step's logits at the sampled token; one step at a time to bound memory."""
    steps = [
        step.float().log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
        for step, token in zip(logits, response.unbind(1), strict=True)
    ]
    return torch.stack(steps, dim=1).masked_fill(~valid, 0.0)


def _collect_kept_sets(scores: Sequence[Tensor], valid: Tensor) -> KeptSets:
    """Return the finite scores of each valid token, row after row; one step at a time, to bound memory."""
    # Sets are collected step by step, and returned row after row.
    by_step = concatenate_kept_sets([kept_sets_of_support(step.isfinite()) for step in scores])
    row, step = torch.where(valid)
    return by_step.select(step * len(valid) + row)


def _log_kept_mass(logits: Sequence[Tensor], scores: Sequence[Tensor], valid: Tensor, temperature: float) -> Tensor:
    """Compute the log of the mass of the finite scores in the softmax of logits / temperature, (b, t)."""
    steps = []
    for raw, processed in zip(logits, scores, strict=True):
        scaled = raw.float() / temperature
        kept = scaled.masked_fill(~processed.isfinite(), -torch.inf)
        steps.append(kept.logsumexp(-1) - scaled.logsumexp(-1))
    return torch.stack(steps, dim=1).masked_fill(~valid, 0.0)


def _check_continuous_batching(sampling: SamplingSpec) -> None:
    """Check that continuous batching follows `sampling`, and reports the log-probs that it names.

    Raises:
        ImportError: this release of transformers has no log-probs from continuous batching.
        ValueError: continuous batching would ignore a setting, or the log-probs are raw.
    """
    import transformers

    if not hasattr(transformers, "ContinuousBatchingConfig"):
        raise ImportError(
            f"transformers {transformers.__version__} has no log-probs from continuous batching: "
            "pip install 'transformers>=5.23', or leave continuous_batching out"
        )
    if sampling.logprobs != "processed":
        raise ValueError(
            f"logprobs={sampling.logprobs!r}: continuous batching returns processed log-probs alone; set "
            "logprobs='processed', or leave continuous_batching out"
        )
    refuse_settings(sampling, _UNSUPPORTED_SETTINGS, "continuous batching, which would leave it out")


def generate_continuously(
    model: Any,  # noqa: ANN401 (a transformers model)
    prompts: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    *,
    options: Mapping[str, Any],
    seed: int,
) -> list[Completion]:
    """Sample one response per prompt, in their order. Seeds torch's global generator.

    Args:
        model: the model to sample from.
        prompts: token ids of non-empty prompts.
        generation_config: sampling parameters.
        options: fields of transformers' `ContinuousBatchingConfig`: `num_blocks`, `page_size`, `max_batch_tokens`, ….
        seed: random seed; with the same options, equal seeds give equal tokens.

    Raises:
        EngineUnavailableError: the engine's thread died.
        EngineAnswerError: a request ended with an error.
    """
    from transformers import ContinuousBatchingConfig

    answers = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=copy.deepcopy(generation_config),
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, seed=seed, **options),
    )
    if len(answers) != len(prompts):
        raise EngineUnavailableError(
            f"continuous batching answered {len(answers)} of {len(prompts)} prompts, then its thread died; none is used"
        )

    # Results arrive in the order in which responses end; their names contain the rows.
    completions = []
    for row, prompt in enumerate(prompts):
        answer = answers.get(f"req_{row}")
        if answer is None or answer.error is not None or list(answer.prompt_ids) != list(prompt):
            reason = "is missing or of another prompt" if answer is None or answer.error is None else answer.error
            raise EngineAnswerError(f"the answer of continuous batching to row {row}: {reason}")
        completions.append(Completion(token_ids=answer.generated_tokens, log_probs=answer.logprobs))
    return completions
