"""Options for clipping and aggregation of the policy loss: `LossConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rollcorr.config.checks import check_choice, check_number, names_unknown_options, warn_inert

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)


@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Configuration of clipping and aggregation of the policy loss.

    Attributes:
        clip_ratio_low: ε_lo, in [0, 1]: the ratio's lower clip is 1 − ε_lo.
        clip_ratio_high: ε_hi, ≥ 0: the ratio's upper clip is 1 + ε_hi.
        clip_ratio_c: c > 1 of the dual clip: for A < 0 the loss is at most −c A. Defaults to 3; None disables it.
        loss_agg_mode: aggregation of token losses into one number. Defaults to "token-mean" for ppo_clip and to
            "seq-mean-token-sum" for reinforce.
        loss_scale_factor: divisor for "seq-mean-token-sum-norm", in tokens. This mode requires it, because a division
            by the padded length would make the gradient depend on padding.
        kl_coef: weight of the divergence from the reference policy, ≥ 0.
        kl_estimator: per-token estimator of this divergence: "k1", "k2" or "k3" (`rollcorr.core.losses.reference_kl`).
        entropy_coef: weight of the entropy bonus, ≥ 0.

    Raises:
        TypeError: a value has an invalid type.
        ValueError: a value is outside its limits.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    loss_agg_mode: LossAggMode | None = None
    loss_scale_factor: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        check_number("clip_ratio_low", self.clip_ratio_low, at_least=0, at_most=1)
        for option in ("clip_ratio_high", "kl_coef", "entropy_coef"):
            check_number(option, getattr(self, option), at_least=0)
        if self.clip_ratio_c is not None:
            check_number("clip_ratio_c (None for no dual clip)", self.clip_ratio_c, above=1)
        check_choice("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES, optional=True)
        check_choice("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        if self.loss_scale_factor is not None:
            check_number("loss_scale_factor", self.loss_scale_factor, above=0)
            if self.loss_agg_mode != "seq-mean-token-sum-norm":
                warn_inert(
                    self,
                    [
                        (
                            "loss_scale_factor",
                            f"has no effect with loss_agg_mode={self.loss_agg_mode!r}; it divides in "
                            "'seq-mean-token-sum-norm' only",
                        )
                    ],
                )
