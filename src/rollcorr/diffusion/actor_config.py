"""The actor's configuration: which loss of denoising steps, and which rollout correction."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from rollcorr.config import InertOptionWarning, Normalizer, RolloutCorrectionConfig
from rollcorr.config.checks import check_choice, check_number, names_unknown_options, warn_inert
from rollcorr.config.conversion import resolve
from rollcorr.config.criteria import without_criterion
from rollcorr.core.diffusion import Reduction, power_of
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.diffusion.batch_checks import Batch
from rollcorr.diffusion.denoising_loss import diffusion_loss
from rollcorr.diffusion.step_correction import STEP_KL

LossMode = Literal["flow_grpo", "grpo_guard", "flow_dppo"]
RsDenominator = Literal["all", "kept", "weights"]

_NORMALIZERS: dict[RsDenominator, Normalizer] = {"all": "original", "kept": "kept", "weights": "weights"}


@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class DiffusionActorConfig:
    """Configuration of the denoising loss and of the correction of the rollout mismatch.

    The log-probs of a batch are averaged over the D latent dimensions. PPO's ratio is computed from these averages, so
    it is the true likelihood ratio to the power 1/D. The correction acts on the power set by `reduction`.

    Attributes:
        loss_mode: "flow_grpo", "grpo_guard" or "flow_dppo" (`rollcorr.core.diffusion_losses`).
        clip_ratio: ε of the clip, > 0. Useful values are proportional to 1/D.
        kl_mask_threshold: largest KL/D of a step, nats, > 0; only for flow_dppo.
        adv_clip_max: advantages are clipped to ± this, > 0.
        kl_coef: weight of KL(π_θ‖π_ref) / D, ≥ 0. It includes rejected steps, and no rejection rescales it.
        reduction: power of the likelihood ratio that importance weights and rejection use: "mean" (1/D), "sum" (1, so
            thresholds have the same meaning as for language models), or a number.
        rollout_correction: a configuration, a preset's name or a dictionary of any generation; optional, no correction
            by default. `rollout_rs` may contain `step_kl`: the exact KL of a step, over all D dimensions, in nats.
        rs_denominator: divisor of the policy gradient: the number of "all" steps, of "kept" steps, or the sum of their
            "weights"; optional, the correction's `normalizer` by default.
        min_keep_fraction: in [0, 1]. An optimizer step is skipped if a smaller share of its steps is kept, and always
            if no step is kept.

    Raises:
        TypeError: a value has an invalid type.
        ValueError: a value is outside its limits.
    """

    loss_mode: LossMode = "flow_grpo"
    clip_ratio: float = 1e-4
    kl_mask_threshold: float = 1e-5
    adv_clip_max: float = 5.0
    kl_coef: float = 0.0
    reduction: Reduction = "mean"
    rollout_correction: RolloutCorrectionConfig | Mapping[str, Any] | str | None = None
    rs_denominator: RsDenominator | None = None
    min_keep_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "kl_mask_threshold", "adv_clip_max"):
            check_number(name, getattr(self, name), above=0)
        check_number("kl_coef", self.kl_coef, at_least=0)
        check_number("min_keep_fraction", self.min_keep_fraction, at_least=0, at_most=1)
        power_of(self.reduction, 1)  # raises if it is no power
        check_choice("loss_mode", self.loss_mode, ("flow_grpo", "grpo_guard", "flow_dppo"))
        check_choice("rs_denominator", self.rs_denominator, tuple(_NORMALIZERS), optional=True)

        correction = resolve(self.rollout_correction)
        object.__setattr__(self, "rollout_correction", correction)
        if correction is not None and self.step_kl is not None and correction.batch_normalize_over == "kept":
            raise ValueError(
                "batch_normalize_over='kept' and step_kl do not go together: the mean weight is taken before the exact "
                "KL rejects; set batch_normalize_over='valid', or rs_denominator='weights'"
            )

        warn_inert(self, self._inert_options())

    @property
    def correction(self) -> RolloutCorrectionConfig | None:
        """Return `rollout_correction` as a typed configuration."""
        config = self.rollout_correction
        return config if isinstance(config, RolloutCorrectionConfig) else None

    @property
    def bypass_mode(self) -> bool:
        """Return whether π_old is μ itself."""
        return self.correction is not None and self.correction.bypass_mode

    @property
    def denominator(self) -> Normalizer:
        """Return the divisor of the policy gradient, as a value of `RolloutCorrectionConfig.normalizer`."""
        if self.rs_denominator is not None:
            return _NORMALIZERS[self.rs_denominator]
        return "kept" if self.correction is None else self.correction.normalizer

    @property
    def step_kl(self) -> float | None:
        """Return the largest exact KL of a kept step, nats; None without that criterion."""
        criteria = () if self.correction is None else self.correction.criteria
        return next((criterion.upper for criterion in criteria if criterion.name == STEP_KL), None)

    @cached_property
    def log_prob_correction(self) -> RolloutCorrectionConfig | None:
        """Return the part of the correction that reads log-probs: all criteria except `step_kl`."""
        config = self.correction
        if config is None or self.step_kl is None:
            return config

        # Inert options were reported when the full configuration was created.
        names, threshold = without_criterion(str(config.rollout_rs), config.rollout_rs_threshold or "", STEP_KL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InertOptionWarning)
            return replace(config, rollout_rs=names, rollout_rs_threshold=threshold)

    def micro_batch_loss(
        self, model_output: Batch, data: Batch, *, schedule: Sequence[float] | None = None
    ) -> PolicyLossOutput:
        """Compute the loss of b samples and w steps for `TrainingStep`, which sums the counts of its micro-batches.

        Args:
            model_output: tensors (b, w, …), as in `rollcorr.diffusion.diffusion_loss`.
            data: this micro-batch's slices of the batch, likewise.
            schedule: timestep values to break down the mismatch by (bypass mode); default: none.

        Returns:
            The loss and its counts, as if this call were the full optimizer step.

        Raises:
            KeyError, ValueError: as `rollcorr.diffusion.diffusion_loss`.
        """
        return diffusion_loss(self, model_output, data, whole_step=True, schedule=schedule)

    def _inert_options(self) -> list[tuple[str, str]]:
        """Return the changed options that can have no effect in this configuration, and why."""
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        correction, dppo = self.correction, self.loss_mode == "flow_dppo"
        reinforce = correction is not None and correction.loss_type == "reinforce"
        unweighted = correction is not None and self.rs_denominator == "weights" and not correction.weights_reach_loss

        # Each row: an option, the condition under which it is inert, and why.
        rows = (
            (
                ("loss_mode", "clip_ratio", "kl_mask_threshold"),
                reinforce,
                "has no effect with loss_type='reinforce', which has no ratio to clip",
            ),
            (
                ("clip_ratio",),
                dppo and not reinforce,
                "has no effect with loss_mode='flow_dppo'; set kl_mask_threshold",
            ),
            (
                ("kl_mask_threshold",),
                not dppo and not reinforce,
                f"has no effect with loss_mode={self.loss_mode!r}; set clip_ratio",
            ),
            (
                ("reduction", "rs_denominator", "min_keep_fraction"),
                correction is None,
                "has no effect without rollout_correction; set that, or leave this out",
            ),
            (
                ("rs_denominator",),
                unweighted,
                "is the same as 'kept', because no weights are applied to the loss",
            ),
        )
        return [(name, why) for names, inert, why in rows if inert for name in names if name in changed]
