"""The three stories of `rollcorr demo`, as numbers: what ran, and what the library says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from rollcorr.correction import correct
from rollcorr.demo.target_world import DemoStep, Sampler, TargetWorld, train
from rollcorr.diagnostics.provenance import Provenance, estimate_provenance

TEMPERATURE = 0.7
SYNC_EVERY = 20
SEEDS = (0, 1, 2)
LAST = 20
"""Steps at the end over which a reward is averaged."""
JUDGED = 10
"""Steps at the end whose log-probs are judged."""

LANGUAGE = TargetWorld(vocabulary=64, states=64, spread=4.0)
"""Peaked probabilities in 64 contexts, as a language model has them."""

ARMS: Mapping[str, str] = {
    "no correction": "measure",
    "token weights": "decoupled_token_is",
    "sequence weights": "decoupled_seq_is",
}
"""What the story of the stale sampler compares: a label, and its preset."""

OnStep = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run, and what its log-probs say about the sampler.

    Attributes:
        steps: the steps of training.
        provenance: of the last steps' log-probs.
    """

    steps: Sequence[DemoStep]
    provenance: Provenance


@dataclass(frozen=True, kw_only=True)
class FaultStory:
    """A wrong setting, found and fixed.

    Attributes:
        broken: the sampler has another temperature than the trainer's log-probs.
        fixed: what the same rollouts say when they are scored at the sampler's temperature.
        fixed_metrics: what the correction measures then.
    """

    broken: MeasuredRun
    fixed: Provenance
    fixed_metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to correct, over all seeds.

    Attributes:
        label: what the correction is called.
        preset: its name in the library.
        rewards: of each step, one list for each seed.
    """

    label: str
    preset: str
    rewards: Sequence[Sequence[float]]

    @property
    def curve(self) -> list[float]:
        """The mean over seeds of each step."""
        return [fmean(step) for step in zip(*self.rewards, strict=True)]

    @property
    def last(self) -> float:
        """The mean reward of the last steps."""
        return fmean(self.curve[-LAST:])


def healthy_story(on_step: OnStep = lambda: None) -> MeasuredRun:
    """The sampler rounds its logits to bfloat16, and is otherwise the trainer."""
    return _measured(lambda logits: logits.bfloat16().double(), on_step)


def fault_story(on_step: OnStep = lambda: None) -> FaultStory:
    """The sampler has a temperature that the trainer's log-probs do not have."""
    broken = _measured(lambda logits: (logits / TEMPERATURE).bfloat16().double(), on_step)
    judged = [step.rows for step in broken.steps[-JUDGED:]]
    scored = [(rows.pair.trainer.logits / TEMPERATURE).log_softmax(-1)[rows.states, rows.tokens] for rows in judged]
    measured = correct(scored[-1], judged[-1].rollout_log_prob, judged[-1].mask).metrics()
    return FaultStory(broken=broken, fixed=_provenance(broken.steps, torch.cat(scored)), fixed_metrics=measured)


def stale_story(on_step: OnStep = lambda: None, seeds: Sequence[int] = SEEDS) -> list[Arm]:
    """The sampler gets the weights every twentieth step; each arm trains on what it samples."""
    return [
        Arm(
            label=label,
            preset=preset,
            rewards=[
                [s.reward for s in train(TargetWorld(seed=seed), preset, sync_every=SYNC_EVERY, on_step=on_step)]
                for seed in seeds
            ],
        )
        for label, preset in ARMS.items()
    ]


def steps_in_all() -> int:
    """Training steps of the three stories together, for a progress bar."""
    return 2 * LAST + 60 * len(ARMS) * len(SEEDS)


def _measured(sampler: Sampler, on_step: OnStep) -> MeasuredRun:
    steps = train(LANGUAGE, "measure", sampler=sampler, steps=LAST, on_step=on_step)
    scored = torch.cat([step.rows.train_log_prob for step in steps[-JUDGED:]])
    return MeasuredRun(steps=steps, provenance=_provenance(steps, scored))


def _provenance(steps: Sequence[DemoStep], train_log_prob: Tensor) -> Provenance:
    """What the last steps say, with the trainer's log-probs as given."""
    rollout = torch.cat([step.rows.rollout_log_prob for step in steps[-JUDGED:]])
    return estimate_provenance(train_log_prob, rollout)
