"""The rollout policy: the window, the model copy, and the sampler of trajectories.

A trajectory of S steps visits σ_0 = 1 > σ_1 > … > σ_S = 0, along diffusers' own schedule. Inside the window of W steps
the sampler uses SDE steps, which are trained on; outside it, and in the holes of a window, it follows the ODE.

The copy of the transformer computes in the precision that an inference engine would use:

    float32    the trainer's precision, as a control: log-ratios are 0
    bfloat16   parameters and activations in bfloat16
    float16    parameters and activations in float16: 8 times the precision, but nothing above 65,504
    fp8        weights of linear layers rounded to e4m3 with a scale, activations in bfloat16
    fp8_matmul the same weights, multiplied in e4m3 with each row of the activations

fp8 is emulated: w → s · e4m3(w / s) with s = max |w| / 448 over each output channel, kept in bfloat16. It has the
rounding of a weight-only fp8 engine on any device, not its speed. fp8_matmul needs a device that multiplies e4m3. LoRA
adapters stay in bfloat16, as engines keep them.

The latents, the step and its log-prob are always float32, because rounding them would add a mismatch. Steps outside the
window follow the ODE on the copy as well. This shifts the distribution of pictures, and no importance weight of the
window's steps corrects it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
from torch import Tensor, nn

from rollcorr.core.diffusion import gaussian_log_prob, take_step
from rollcorr.engines.diffusion_engine import DiffusionRollout
from rollcorr.train.flow_grpo.diffusion_policy import DiffusionPolicy
from rollcorr.train.flow_grpo.family import Prompts, predict
from rollcorr.train.flow_grpo.schedule import Schedule
from rollcorr.train.steps import derived_generator, derived_seed

if TYPE_CHECKING:
    from rollcorr.train.flow_grpo.flow_grpo_config import DiffusionRolloutConfig

RolloutDtype = Literal["bfloat16", "float16", "fp8", "fp8_matmul", "float32"]
LARGEST_E4M3 = 448.0


def make_schedule(policy: DiffusionPolicy, steps: int, *, noise_level: float = 0.7) -> Schedule:
    """Return the schedule of this model's pipeline, from diffusers' scheduler.

    Raises:
        ValueError: the scheduler's noise does not fall (`invert_sigmas`, for instance), or an option is unsupported.
    """
    # Setting the steps modifies a scheduler, so copy the policy's.
    scheduler = copy.deepcopy(policy.scheduler)
    return policy.family.schedule(
        scheduler, policy.transformer.config, policy.size, steps=steps, noise_level=noise_level
    )


def draw_windows(rollout: DiffusionRolloutConfig, *, seed: int, step: int) -> Tensor:
    """Return the step numbers of each sample's window: (rows, W) integers.

    Args:
        rollout: size, range, spacing and kind of the windows.
        seed: seed of the run.
        step: training step, from 1. A moving window starts (step − 1) // `sde_window_interval` steps after the lowest.

    Source: Li et al. (2025), "MixGRPO", arXiv:2507.21802, for windows that move.
    """
    rng = random.Random(derived_seed(seed, "window", step))
    low, high = rollout.window_range
    last = high - rollout.window_extent
    if rollout.sde_window == "moving":
        starts = [min(low + (step - 1) // rollout.sde_window_interval, last)]
    else:
        starts = [rng.randint(low, last) for _ in range(rollout.rows if rollout.sde_window == "per_sample" else 1)]
    size = rollout.sde_window_size
    steps = torch.tensor(starts, device="cpu")[:, None] + rollout.sde_window_spacing * torch.arange(size, device="cpu")
    return steps.expand(rollout.rows, size)


class RolloutModel:
    """Frozen copy of the transformer for sampling, updated on request.

    Args:
        model: the trained transformer, float32.
        dtype: precision of the copy.
    """

    def __init__(self, model: nn.Module, *, dtype: RolloutDtype) -> None:
        self.dtype = dtype
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        if dtype != "float32":
            own = torch.float16 if dtype == "float16" else torch.bfloat16
            nn.Module.to(self.module, own)  # diffusers' own method would log a remark
        if dtype == "fp8_matmul":
            _multiply_in_e4m3(self.module)
        self.update_weights(model, version=0)

    @torch.no_grad()
    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Copy the trainer's weights, rounded.

        Raises:
            ValueError: the tensors of copy and model differ; no tensor is skipped silently.
        """
        source, target = model.state_dict(), self.module.state_dict()
        if source.keys() != target.keys():
            different = sorted(source.keys() ^ target.keys())
            raise ValueError(f"weight sync incomplete: {', '.join(different[:3])} on one side only")

        # Round from the trainer's float32, never from the copy: rounding errors must not accumulate.
        modules = model.named_modules() if self.dtype.startswith("fp8") else ()
        linear = {f"{name}.weight" for name, layer in modules if _is_plain_linear(name, layer)}
        for name, value in source.items():
            target[name].copy_(round_to_e4m3(value) if name in linear else value)
        self.weight_version = version

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the copy's weights for a checkpoint; with adapters only theirs, because the rest never changes."""
        weights = self.module.state_dict()
        adapters = {name: value for name, value in weights.items() if "lora_" in name}
        return {name: value.detach().cpu().contiguous() for name, value in (adapters or weights).items()}

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Load already rounded weights from a checkpoint; missing ones keep their initial value.

        Raises:
            ValueError: the names differ from `export_weights`.
        """
        different = sorted(weights.keys() ^ self.export_weights().keys())
        if different:
            raise ValueError(
                f"the engine's weights do not fit model.lora: {different[0]} and {len(different) - 1} more are on one "
                "side only; set model.lora as it was when they were saved"
            )
        self.module.load_state_dict(dict(weights), strict=False)
        self.weight_version = version


def round_to_e4m3(weight: Tensor) -> Tensor:
    """Compute s · e4m3(w / s), s = max |w| / 448: the weight of a weight-only fp8 layer, in the input's dtype.

    Args:
        weight: (out, in); each output channel has one scale s.

    Source: Micikevicius et al. (2022), "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """
    rounded, scale = _quantize(weight)
    return rounded.to(weight.dtype) * scale


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3(x / s) and s = max |x| / 448 of each row, (rows, 1), in the input's dtype."""
    scale = (rows.abs().amax(dim=1, keepdim=True) / LARGEST_E4M3).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scale).to(torch.float8_e4m3fn), scale


def _multiply_in_e4m3(module: nn.Module) -> None:
    """Replace the product of every linear layer whose sizes are multiples of 16 by one in e4m3.

    Raises:
        ValueError: the device cannot multiply e4m3.
    """
    # Try a layer without initial values, because those would draw from the global generator.
    device = next(module.parameters()).device
    try:
        tried = nn.utils.skip_init(nn.Linear, 16, 16, device=device, dtype=torch.bfloat16)
        linear_e4m3(tried, torch.zeros(16, 16, device=device, dtype=torch.bfloat16))
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"rollout.dtype=fp8_matmul: {device} cannot multiply e4m3 ({error}); use fp8, which emulates its weights"
        ) from error
    for name, layer in module.named_modules():
        if _is_plain_linear(name, layer) and not any(n % 16 for n in layer.weight.shape):
            layer.forward = partial(linear_e4m3, layer)  # type: ignore[method-assign]


def linear_e4m3(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute y = s_x (e4m3(x / s_x) · e4m3(W / s_w)ᵀ) s_w + b on the device's fp8 units.

    Args:
        layer: W (out, in), both multiples of 16, and b (out,) or None. each output channel has one s_w.
        x: (…, in). s_x is one for each row.

    Returns:
        (…, out), in the dtype of x.
    """
    (rows, row_scale), (columns, column_scale) = (_quantize(t) for t in (x.flatten(0, -2), layer.weight))
    product = torch._scaled_mm(
        rows, columns.t(), scale_a=row_scale.float(), scale_b=column_scale.float().t(), out_dtype=x.dtype
    )
    return (product if layer.bias is None else product + layer.bias).unflatten(0, x.shape[:-1])


def _is_plain_linear(name: str, layer: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(layer, nn.Linear) and "lora_" not in name


@dataclass(frozen=True, eq=False, kw_only=True)
class Trajectories(DiffusionRollout):
    """B trajectories, W steps in the window, with what the trainer needs to score them.

    Attributes:
        schedule: σ of every step.
        prompts: B rows.
    """

    schedule: Schedule
    prompts: Prompts


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Sampler of trajectories with a rollout model.

    Attributes:
        policy: family and sizes; its transformer is not used.
        model: the copy that samples.
        schedule: σ of every step.
        batch_size: rows at a time; defaults to all at once.
    """

    policy: DiffusionPolicy
    model: RolloutModel
    schedule: Schedule
    batch_size: int | None = None

    @torch.no_grad()
    def sample(self, prompts: Prompts, steps: Tensor, *, seed: int, step: int) -> Trajectories:
        """Sample one trajectory per row: SDE steps inside its window, ODE steps outside.

        Args:
            prompts: B rows.
            steps: rising step numbers of each row's window, (B, W).
            seed: seed of the run.
            step: training step; seeds the noise, with `seed`.

        Raises:
            ValueError: a latent is not finite.
        """
        rows, window = steps.shape
        x = self._draw_noise(rows, seed, step, "start")
        steps = steps.to(x.device)
        latents = x.new_empty(rows, window + 1, *x.shape[1:])
        means = x.new_empty(rows, window, *x.shape[1:])
        stds, log_probs = x.new_empty(rows, window), x.new_empty(rows, window)

        # Without holes, x after a step is x before the next one.
        has_holes = bool((steps.diff(dim=1) > 1).any())
        following = torch.empty_like(means) if has_holes else latents[:, 1:]

        for number in range(self.schedule.steps):
            v, at = self._predict(x, number, prompts)
            straight = self.schedule.straight(v, x, at)

            # Rows whose window contains this step add noise; the rest follow the ODE.
            row, column = (steps == number).nonzero(as_tuple=True)
            if not len(row):
                x = straight
                continue
            mean, std = self.schedule.moments(v, x, at)
            wide = std.view(-1, *[1] * (x.dim() - 1))
            taken = take_step(mean, wide, self._draw_noise(rows, seed, step, f"noise {number}")).prev_sample
            log_prob = gaussian_log_prob(taken, mean, wide)

            latents[row, column], latents[row, column + 1] = x[row], taken[row]
            following[row, column] = taken[row]
            means[row, column], stds[row, column] = mean[row], std[row]
            log_probs[row, column] = log_prob[row]
            x = straight.index_copy(0, row, taken[row])

        _check_finite(x, self.model.dtype)
        sigma, sigma_next = self.schedule.at(steps)
        data = {
            "rollout_log_probs": log_probs,
            "latents": latents,
            "timesteps": self.schedule.timestep(steps),
            "prev_sample_mean": means,
            "std": stds,
            "dt": sigma_next - sigma,
        }
        if has_holes:
            data["next_latents"] = following
        return Trajectories(
            sigmas=self.schedule.sigmas,
            schedule=self.schedule,
            prompts=prompts,
            steps=steps,
            final=x,
            version=self.model.weight_version,
            data=data,
        )

    @torch.no_grad()
    def draw(self, prompts: Prompts, *, seed: int, step: int) -> Tensor:
        """Compute x at σ = 0 along the ODE, without exploration noise, (B, …)."""
        x = self._draw_noise(len(prompts), seed, step, "start")
        for number in range(self.schedule.steps):
            v, at = self._predict(x, number, prompts)
            x = self.schedule.straight(v, x, at)
        _check_finite(x, self.model.dtype)
        return x

    def _predict(self, x: Tensor, number: int, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Return the model's prediction for all rows at a step, and the step number of each row."""
        at = torch.full((len(x),), number, device=x.device)
        timestep = self.schedule.timestep(at)
        rows = torch.arange(len(x), device=x.device)
        parts = [
            predict(
                self.model.module,
                self.policy.family,
                x[part],
                timestep[part],
                prompts.select(part),
                size=self.policy.size,
            )
            for part in rows.split(self.batch_size or len(x))
        ]
        return torch.cat(parts), at

    def _draw_noise(self, rows: int, seed: int, step: int, purpose: str) -> Tensor:
        """Draw standard normal latents on the CPU, so that they are the same for every device."""
        generator = derived_generator(seed, f"latents {purpose}", step)
        noise = torch.randn((rows, *self.policy.latent_shape), generator=generator, device="cpu")
        return noise.to(next(self.model.module.parameters()).device)


def _check_finite(x: Tensor, dtype: str) -> None:
    bad = int((~x.flatten(1).isfinite().all(1)).sum())
    if bad:
        raise ValueError(
            f"{bad} of {len(x)} sampled latents are NaN or inf (rollout.dtype={dtype}): the weights are broken, or the "
            "model leaves the range of its dtype; try rollout.dtype=float32, a lower optim.lr or a smaller guidance"
        )
