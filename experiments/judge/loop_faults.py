"""Eight faults of a training loop, each an override of the healthy loop; tasks show them in different ways."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from judge_engine import Rollout, engine_copy, sample, within_top_p
from judge_loop import Loop
from judge_tasks import MARK
from torch import Tensor

from rollcorr import SamplingSpec

TOP_P = 0.9

FROZEN_FROM = (15, 8, 2, 12, 10)
"""By seed: the first step whose samples come from old weights, because the sync before it did not happen."""
PARTIAL_FROM = (2, 2, 10, 6, 13)
"""The same where some layers only keep their old weights."""
STALE_PARTS = {
    "copy": ("layers.1.",),
    "reverse": ("self_attn",),
    "arithmetic": ("wte", "lm_head"),
    "ngram": ("head.",),
    "stories": ("layers.3.", "layers.4."),
}
"""Which parameters a partial sync leaves out, by task: substrings of their names."""


class FrozenSync(Loop):
    """The weight sync stops."""

    def sync(self, step: int) -> None:
        """Do nothing from the onset on."""
        if step < FROZEN_FROM[self.seed]:
            super().sync(step)


class PartialSync(Loop):
    """The weight sync leaves out some parameters."""

    def sync(self, step: int) -> None:
        """Sync a model whose named parts are those of the last complete sync."""
        if step < PARTIAL_FROM[self.seed]:
            self.kept = copy.deepcopy(self.trainer.state_dict())
            return super().sync(step)
        mixed = copy.deepcopy(self.trainer)
        old = {
            name: weight
            for name, weight in self.kept.items()
            if any(part in name for part in STALE_PARTS[self.task.name])
        }
        assert old, "no parameter has such a name"
        mixed.load_state_dict(old, strict=False)
        self.sampler = engine_copy(mixed, self.task.engine)
        return None


class Dropout(Loop):
    """The trainer stays in training mode when it scores."""

    def log_probs(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Score with dropout."""
        self.trainer.train()
        scored = super().log_probs(prompts, ids)
        self.trainer.eval()
        return scored


class Temperature(Loop):
    """One side does not apply the temperature."""

    def sample(self, prompts: Tensor) -> Rollout:
        """Sample at the engine's own temperature, which differs from the user's where the task says so."""
        temperature = self.task.faulty_temperature
        return sample(self.sampler, prompts, width=self.task.width, generator=self.generator, temperature=temperature)

    def log_probs(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Score without dividing the logits."""
        asked, self.task = self.task, replace(self.task, temperature=1.0)
        scored = super().log_probs(prompts, ids)
        self.task = asked
        return scored


class TopPRaw(Loop):
    """Tokens are drawn within top-p, and the log-probs leave top-p out; two of the trainers score within top-p."""

    def sample(self, prompts: Tensor) -> Rollout:
        """Draw within top-p and report the softmax over all ids."""
        return sample(
            self.sampler,
            prompts,
            width=self.task.width,
            generator=self.generator,
            temperature=self.task.temperature,
            drawn_from=lambda logits, _ids: within_top_p(logits, TOP_P),
            reported=lambda logits, _ids: logits,
        )

    def log_probs(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Score over all ids, or within the trainer's own top-p and the sampled token."""
        if self.task.name not in ("arithmetic", "ngram"):
            return super().log_probs(prompts, ids)
        logits = self.trainer(input_ids=torch.cat([prompts, ids], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
        full = logits.float() / self.task.temperature
        sampled = torch.zeros_like(full, dtype=torch.bool).scatter(-1, ids[..., None], True)
        kept = within_top_p(full, TOP_P).isfinite() | sampled
        return full.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def settings(self) -> SamplingSpec:
        """Return what the user set: top-p, and the engine's default kind of log-probs."""
        kind = "raw" if self.task.temperature == 1.0 else "tempered"
        return replace(super().settings(), top_p=TOP_P, logprobs=kind)


class ShiftByOne(Loop):
    """The sampler's log-probs arrive one token late (three tasks) or early (two)."""

    def reported(self, rollout: Rollout) -> Tensor:
        """Return the log-probs moved by a token; 0 fills the gap."""
        late = self.task.name in ("copy", "arithmetic", "stories")
        moved = rollout.log_prob.roll(1 if late else -1, dims=1)
        moved[:, 0 if late else -1] = 0.0
        return moved


class Template(Loop):
    """The trainer scores another prompt than the sampler saw."""

    def log_probs(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Score after a prompt without BOS, with two marks, without a mark, or with a system token in front."""
        match self.task.name:
            case "reverse":
                prompts = torch.cat([prompts, torch.full_like(prompts[:, :1], MARK)], dim=1)
            case "arithmetic":
                prompts = prompts[:, :-1]
            case "ngram":
                prompts = torch.cat([prompts[:, :1], torch.full_like(prompts[:, :1], 9), prompts[:, 1:]], dim=1)
            case _:
                prompts = prompts[:, 1:]
        return super().log_probs(prompts, ids)


class OtherWeights(Loop):
    """The sampler adds every update to another base checkpoint, as with adapters."""

    other: dict[str, Tensor]
    start: dict[str, Tensor]

    def sync(self, step: int) -> None:
        """Sync other + (trainer − start)."""
        mixed = copy.deepcopy(self.trainer)
        updates = {name: weight - self.start[name] for name, weight in mixed.state_dict().items()}
        mixed.load_state_dict({name: self.other[name] + update for name, update in updates.items()})
        self.sampler = engine_copy(mixed, self.task.engine)


LOOPS: dict[str, type[Loop]] = {
    "healthy": Loop,
    "frozen_sync": FrozenSync,
    "partial_sync": PartialSync,
    "dropout": Dropout,
    "temperature": Temperature,
    "top_p_raw": TopPRaw,
    "shift_by_one": ShiftByOne,
    "template": Template,
    "other_weights": OtherWeights,
}
"""The loops by name of the fault."""
