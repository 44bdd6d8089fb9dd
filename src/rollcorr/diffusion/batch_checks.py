"""Checks of a diffusion batch. Shapes are checked on every call; values once per batch, because reading them syncs.

A batch is a mapping of tensors; B samples, W steps in the window:

    key                    shape          content
    rollout_log_probs      (B, W)         log μ of each step, averaged over the D latent dimensions, nats
    old_log_probs          (B, W)         log π_old, likewise
    advantages             (B,)           A of each sample
    latents                (B, W+1, …)    x before each step of the window, and after the last; float32
    next_latents           (B, W, …)      x after each step; only for windows with holes
    timesteps              (B, W)         timestep *value* of each step, as the scheduler has it
    prev_sample_mean       (B, W, …)      m of the rollout: makes the KL exact
    old_prev_sample_mean   (B, W, …)      m of π_old (bypass: the rollout's)
    ref_prev_sample_mean   (B, W, …)      m of the reference, for kl_coef
    std                    (B, W)         s of each step
    dt                     (B, W)         σ_next − σ < 0, for GRPO-Guard
    rollout_is_weights     (B, W)         written: factors of the loss; 0 where rejected
    rollout_keep_mask      (B, W)         written: steps in the loss, bool
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]

PER_STEP = ("old_log_probs", "timesteps", "std", "dt", "rollout_is_weights", "rollout_keep_mask")
MEANS = ("prev_sample_mean", "old_prev_sample_mean", "ref_prev_sample_mean")
FIXES = {
    "rollout_log_probs": "have the rollout record them (calculate_log_probs: true)",
    "old_log_probs": "recompute them with the trainer, or set bypass_mode=True and call "
    "apply_bypass_mode_to_diffusion_batch",
    "rollout_keep_mask": "call apply_rollout_correction_to_diffusion_batch once per batch",
    "rollout_is_weights": "call apply_rollout_correction_to_diffusion_batch once per batch",
    "prev_sample_mean": "have the rollout ship the mean of each step",
    "old_prev_sample_mean": "store the mean of each step where old_log_probs are computed",
    "ref_prev_sample_mean": "compute the reference model's mean of each step, or set kl_coef=0",
    "std": "store s of each step, (B, W)",
    "dt": "store σ_next − σ of each step, (B, W)",
    "advantages": "compute one advantage per sample",
}


def require(batch: Batch, *keys: str, reason: str) -> list[Tensor]:
    """Return the tensors under these keys.

    Raises:
        KeyError: names the missing key, why it is needed, and the fix.
    """
    for key in keys:
        if key not in batch:
            raise KeyError(f"the batch has no {key!r}, which {reason}: {FIXES.get(key, 'put it there')}")
    return [batch[key] for key in keys]


def check_shapes(batch: Batch, *, like: str = "rollout_log_probs") -> tuple[int, int]:
    """Check that the tensors present fit (B, W), and return B and W.

    Raises:
        ValueError: names the tensor, its shape and the expected shape.
    """
    first = batch[like]
    if first.dim() != 2:
        raise ValueError(f"{like} must be (B, W), samples and steps; got {tuple(first.shape)}. One step is (B, 1)")
    B, W = first.shape

    # The leading sizes of each tensor, and whether dimensions of the latent follow them.
    layout = {
        **dict.fromkeys((*PER_STEP, "rollout_log_probs"), ("(B, W)", (B, W), False)),
        "advantages": ("(B,)", (B,), False),
        "latents": ("(B, W + 1, …)", (B, W + 1), True),
        **dict.fromkeys((*MEANS, "next_latents"), ("(B, W, …)", (B, W), True)),
    }
    for key, (meaning, sizes, goes_on) in layout.items():
        shape = tuple(batch[key].shape) if key in batch else None
        if shape is not None and (shape[: len(sizes)] != sizes or (len(shape) > len(sizes)) != goes_on):
            wanted = str(sizes).replace(")", ", …)") if goes_on else sizes
            raise ValueError(f"{key} must be {meaning} = {wanted} like {like}; got {shape}")

    # The means of π, π_old, μ and the reference are subtracted from each other.
    shapes = {key: tuple(batch[key].shape) for key in MEANS if key in batch}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"means of one batch must have one shape; got {shapes}")
    return B, W


def dimensions_of(*batches: Batch) -> int | None:
    """Return D, the number of latent dimensions, from the first tensor that has them, or None."""
    for batch in batches:
        for key in (*MEANS, "latents"):
            if key in batch:
                return math.prod(batch[key].shape[2:])
    return None


def check_diffusion_batch(batch: Batch, *, schedule: Sequence[float] | None = None) -> None:
    """Check a batch's values: latents are finite, timesteps are in the schedule, log-probs are means over D.

    Syncs with the device, so call it once per batch, before training on it. Non-finite *log-probs* raise no error:
    the correction's `nonfinite` option handles them.

    Args:
        batch: a mapping as described at the top of this file; absent tensors are not checked.
        schedule: the trainer's timestep values, in order, e.g. `scheduler.timesteps.tolist()`.

    Raises:
        ValueError: names the sample and step, the value, and the fix.
    """
    check_shapes(batch)
    for key in ("latents", "next_latents", *MEANS):
        if key in batch:
            _check_finite(key, batch[key])
    if "timesteps" in batch and schedule is not None:
        _check_timesteps(batch["timesteps"], schedule, holes="next_latents" in batch)
    if "std" in batch:
        _check_averaged(batch["rollout_log_probs"], batch["std"], dimensions_of(batch))


def check_schedule(rollout: Sequence[float], trainer: Sequence[float], *, tolerance: float = 1e-5) -> None:
    """Check that rollout and trainer denoise along the same schedule (of sigmas, or of timestep values).

    A shifted schedule, for example by one entry, assigns a different σ to every step. The log-probs then belong to a
    different distribution.

    Args:
        rollout: the sampler's, in order.
        trainer: the trainer's.
        tolerance: largest difference allowed, relative to the largest entry.

    Raises:
        ValueError: the lengths differ, or an entry does; names the first.
    """
    fix = "give both the same number of steps, shift and resolution (set_timesteps with the same arguments)"
    limit = tolerance * max([abs(x) for x in (*rollout, *trainer)], default=0.0)
    for i, (theirs, ours) in enumerate(zip(rollout, trainer, strict=False)):
        if not abs(theirs - ours) <= limit:  # true for NaN as well
            lag = _shift_hint(rollout, trainer, limit)
            raise ValueError(
                f"rollout and trainer schedules differ first at entry {i}: {theirs:g} and {ours:g}{lag}; {fix}"
            )
    if len(rollout) != len(trainer):
        raise ValueError(f"the rollout's schedule has {len(rollout)} entries and the trainer's {len(trainer)}; {fix}")


def _shift_hint(rollout: Sequence[float], trainer: Sequence[float], limit: float) -> str:
    """Return a hint for the most common mistake, a schedule off by one entry; empty if the cause is different."""
    for lag in (1, -1):
        pairs = list(zip(rollout[max(lag, 0) :], trainer[max(-lag, 0) :], strict=False))
        if pairs and all(abs(a - b) <= limit for a, b in pairs):
            return f" (entry i of the {'trainer' if lag > 0 else 'rollout'} is entry i + 1 of the other: off by one)"
    return ""


def _first_wrong_step(wrong: Tensor) -> tuple[int, int] | None:
    """Return sample and step of the first true entry of (B, W), or None."""
    found = wrong.nonzero()
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None


def _check_finite(key: str, values: Tensor) -> None:
    finite = values.flatten(2).isfinite().all(-1)
    if (at := _first_wrong_step(~finite)) is not None:
        sample, step = at
        raise ValueError(
            f"{key} has NaN or inf in {int((~finite).any(1).sum())} of {len(values)} samples, first in {sample} "
            f"at step {step} of the window: a model would spread it over every gradient. Drop these samples, and look "
            "for overflow in the rollout's precision"
        )

    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{key} is {values.dtype}; store it in float32: rounding it is a mismatch of its own")


def _check_timesteps(timesteps: Tensor, schedule: Sequence[float], *, holes: bool) -> None:
    known = torch.tensor(schedule, dtype=torch.float64, device="cpu")
    limit = 1e-5 * float(known.abs().max())
    values = timesteps.detach().to("cpu", torch.float64)

    # Every value must be an entry of the schedule, up to rounding. NaN never matches.
    nearest, index = (values.unsqueeze(-1) - known).abs().min(-1)
    if (at := _first_wrong_step(~(nearest <= limit))) is not None:
        sample, step = at
        raise ValueError(
            f"timestep {values[sample, step].item():g} of sample {sample}, step {step}, is not in the trainer's "
            f"schedule (nearest {schedule[int(index[sample, step])]:g}): rollout and trainer must share number of "
            "steps, shift and resolution"
        )

    # Without x after each step, each step must start where the last one ended.
    distance = index.diff(dim=1)
    if (at := _first_wrong_step(distance < 1 if holes else distance != 1)) is not None:
        sample, step = at
        raise ValueError(
            f"the window of sample {sample} goes from schedule entry {int(index[sample, step])} to "
            f"{int(index[sample, step + 1])}; its steps must follow one another, or the batch needs next_latents"
        )


def _check_averaged(log_probs: Tensor, std: Tensor, dimensions: int | None) -> None:
    """Raise if log-probs look like sums over D: E[mean_D log p] = −1/2 − log s − log sqrt(2π), a sum is D times it."""
    if dimensions is None or dimensions < 8:
        return  # not enough dimensions to distinguish a sum from a mean

    # Use the median, because a few steps may be far from their mean.
    expected = -0.5 - std.double().log() - math.log(math.sqrt(2 * math.pi))
    seen = log_probs.double()
    ratio = (seen / expected)[seen.isfinite() & (expected.abs() > 0.05)]
    if len(ratio) and 0.5 < float(ratio.median()) / dimensions < 2:
        raise ValueError(
            f"rollout_log_probs are about {float(ratio.median()):.0f} times −1/2 − log s − log sqrt(2π), and D is "
            f"{dimensions}: they look like sums over the latent dimensions. Store means (reduction='mean'); "
            "DiffusionActorConfig.reduction chooses what the correction acts on"
        )
