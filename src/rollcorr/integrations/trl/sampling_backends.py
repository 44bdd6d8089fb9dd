"""Replacements of TRL's `VLLMGeneration`: an engine of this library, or a wrapper that records vLLM's log-probs.

TRL calls two methods of its sampler: `sync_weights()` and `generate(prompts, images, num_generations, profiler)`, which
returns prompt ids, completion ids, the log-probs of each token as a list, and the ids of these log-probs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import IncompatibleSamplingError, SamplingSpec
from rollcorr.config.sampling_spec import Actor, compare
from rollcorr.core.sampling import KeptSets
from rollcorr.engines.base import Engine, require_row_seeds
from rollcorr.engines.gathered_policy import evaluating
from rollcorr.engines.row_seeds import row_seed
from rollcorr.integrations.trl.truncated_sampling import check_actor, sets_of_rows

Ids = list[list[int]]
LogProbLists = list[list[list[float | None]]]
Generated = tuple[Ids, Ids, LogProbLists | None, list[list[list[int]]] | None]


class EngineGeneration:
    """Adapter of an engine to the two vLLM methods that TRL calls.

    Each rank samples for its own prompts with its own engine. A row's draws depend on the trainer's seed, its global
    step and the row's index over all ranks, so they are the same on any number of ranks and after a resume.

    With `actor="kept_mass"` TRL gets log μ + log S: the engine's log-probs over the full vocabulary, as its own are.
    With `actor="replay"` it gets log μ, and `kept_sets` contains the sets of the last call's rows.

    Args:
        engine: any engine of `rollcorr.engines`.
        trainer: the trainer whose policy the engine samples.
        actor: how the trainer scores truncated samples; see `attach`.

    Raises:
        ValueError: several ranks sample with an engine that has one seed per process; or the engine or the trainer does
            not support `actor`.
        IncompatibleSamplingError: the engine's log-probs are not comparable with the trainer's, which are computed over
            the full vocabulary at the trainer's temperature.
    """

    def __init__(self, engine: Engine, trainer: Any, actor: Actor = "full") -> None:  # noqa: ANN401 (TRL's trainer)
        sampling, records = engine.sampling, getattr(engine, "truncation_records", ())
        check_actor(trainer, actor, records, sampling.restricts)
        scored = SamplingSpec(temperature=trainer.temperature, logprobs="tempered")
        if actor != "full":
            scored = sampling.for_actor(actor, temperature=trainer.temperature)
        comparison = compare(sampling, scored)
        if comparison.verdict == "different":
            # TRL's logits and support are fixed, so the engine's must match them.
            how = f" ({sampling.engine_sampling.processed})" if sampling.logprobs == "raw" else ""
            raise IncompatibleSamplingError(
                f"the engine's log-probs are not comparable with the trainer's: {comparison.reason}. To fix it: give "
                f"the engine SamplingSpec(temperature=trainer.temperature, logprobs='processed'){how}, without top_k, "
                "top_p, min_p, penalties and biases; or keep the truncation, with an engine that records kept sets "
                "(TransformersEngine) and attach(…, actor='replay') or actor='kept_mass'"
            )
        require_row_seeds(engine, trainer.accelerator.num_processes)
        self.engine = engine
        self._trainer = trainer
        self._actor = actor
        self.kept_sets: list[KeptSets] | None = None
        self.log_kept_mass: Tensor | None = None
        self._step: tuple[str, int] | None = None
        self._calls = self._rows_per_rank = 0

    def sync_weights(self) -> None:
        """Send the trainer's weights to the engine, and verify the transfer.

        Raises:
            WeightSyncError: the verification fails.
        """
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)

        # Without dropout: engine and policy must score the probe alike.
        with evaluating(policy):
            self.engine.update_weights(policy, version=int(self._trainer.state.global_step))

    def generate(
        self,
        prompts: Ids,
        images: list[Any] | None = None,
        num_generations: int = 1,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> Generated:
        """Sample one completion for each prompt; TRL repeats a prompt once for each of its generations.

        Args:
            prompts: token ids of each prompt.
            images: must be None.
            num_generations: ignored; prompts are repeated already.
            profiler: optional; a context manager around the sampling.

        Raises:
            ValueError: there are images, which the engines cannot read.
        """
        if images is not None and any(images):
            raise ValueError("this engine samples from text alone; leave the images out, or use vLLM")

        # Number the calls of a step: evaluation batches, or turns with tools, which have fewer rows than the first.
        trainer = self._trainer
        step = ("train" if trainer.model.training else "eval", int(trainer.state.global_step))
        if step != self._step:
            self._step, self._calls, self._rows_per_rank = step, 0, len(prompts)
        seed = row_seed(trainer.args.seed, *step, self._calls)
        self._calls += 1

        with profiler or nullcontext():
            first_row = trainer.accelerator.process_index * self._rows_per_rank
            rollout = self.engine.generate(prompts, seed=seed, first_row=first_row)

        rollout_log_prob = rollout.rollout_log_prob
        if self._actor == "kept_mass":
            assert rollout.log_kept_mass is not None  # by the engine's `truncation_records`
            self.log_kept_mass = rollout.log_kept_mass
            rollout_log_prob = rollout_log_prob + rollout.log_kept_mass
        elif self._actor == "replay":
            self.kept_sets = sets_of_rows(rollout)

        prompt_ids, completion_ids = rollout.tokens.unpadded()
        rows = zip(rollout_log_prob, rollout.tokens.response_mask, strict=True)
        log_probs: LogProbLists = [[[value] for value in row[mask].tolist()] for row, mask in rows]
        return prompt_ids, completion_ids, log_probs, [[[token] for token in row] for row in completion_ids]


class GenerationRecorder:
    """Sampler wrapper that stores the log-probs of the last completions, for `RLOOTrainer`, which drops them.

    Args:
        generation: TRL's `VLLMGeneration`, or an `EngineGeneration`; set to return the log-probs of sampled tokens.
    """

    def __init__(self, generation: Any) -> None:  # noqa: ANN401 (vLLM's class, or one like it)
        self._generation = generation
        self.last: LogProbLists | None = None

        # vLLM returns log-probs only if requested; 0 means only the sampled token's.
        if getattr(generation, "logprobs", 0) is None:
            generation.logprobs = 0

    def generate(self, *args: Any, **kwargs: Any) -> Generated:  # noqa: ANN401
        """As the sampler's own; also store the log-probs."""
        generated: Generated = self._generation.generate(*args, **kwargs)
        self.last = generated[2]
        return generated

    def padded(self, like: Tensor) -> Tensor | None:
        """Return the last log-probs as (B, T) float32, NaN where missing; None if they do not match `like`."""
        rows, width = like.shape
        if self.last is None or len(self.last) != rows or any(len(tokens) > width for tokens in self.last):
            return None
        padded = [
            [torch.nan if token[0] is None else token[0] for token in tokens] + [torch.nan] * (width - len(tokens))
            for tokens in self.last
        ]
        return torch.tensor(padded, dtype=torch.float32, device=like.device).reshape(rows, width)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any attribute of the sampler)
        return getattr(self._generation, name)
