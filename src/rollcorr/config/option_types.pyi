# Written by tools/generate_docs.py from the fields of RolloutCorrectionConfig and the table of presets.

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

from typing_extensions import Self

from .correction_options import Implementation, Level, LossType, NonfinitePolicy, NormalizedUnits, Normalizer
from .criteria import Threshold

PresetName: TypeAlias = Literal[
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "disabled",
    "measure",
    "decoupled_horizon_is",
    "bypass_pg_horizon_is",
    "tis",
    "seq_tis",
    "mis",
    "icepop",
    "token_is",
    "token_tis",
    "seq_is",
    "seq_is_rs",
    "seq_mis",
    "geo_rs",
    "geo_mis",
    "ppo_is_bypass",
    "pure_is",
    "bypass_pg_rs",
]

class CorrectionOptions(TypedDict, total=False):
    rollout_is: Level | None
    rollout_is_threshold: Threshold | None
    rollout_is_batch_normalize: bool
    rollout_rs: str | Sequence[str] | None
    rollout_rs_threshold: Threshold | None
    bypass_mode: bool
    loss_type: LossType
    rollout_token_veto_threshold: float | None
    apply_is: bool
    nonfinite: NonfinitePolicy
    safety_bound: float
    normalizer: Normalizer
    batch_normalize_over: NormalizedUnits
    rollout_is_floor: float | None
    rollout_is_horizon: float | Literal["auto"] | None
    rollout_is_horizon_per_turn: bool

class ConfigOptions(CorrectionOptions, total=False):
    impl: Implementation

class NamedPresets:
    @classmethod
    def decoupled_token_is(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def decoupled_seq_is(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def decoupled_token_icepop(cls, threshold: Threshold | None = "0.5_5.0") -> Self: ...
    @classmethod
    def decoupled_seq_is_rs(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = "0.5_2.0"
    ) -> Self: ...
    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self: ...
    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self: ...
    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self: ...
    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: Threshold | None = 0.01) -> Self: ...
    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = 0.01
    ) -> Self: ...
    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = 0.01
    ) -> Self: ...
    @classmethod
    def bypass_ppo_clip(cls) -> Self: ...
    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self: ...
    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: Threshold | None = 0.01) -> Self: ...
    @classmethod
    def bypass_pg_is(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def bypass_pg_token_icepop(cls, threshold: Threshold | None = "0.5_5.0") -> Self: ...
    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self: ...
    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self: ...
    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self: ...
    @classmethod
    def disabled(cls) -> Self: ...
    @classmethod
    def measure(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def decoupled_horizon_is(
        cls, threshold: Threshold | None = 4.0, horizon: float | Literal["auto"] | None = 0.9
    ) -> Self: ...
    @classmethod
    def bypass_pg_horizon_is(
        cls, threshold: Threshold | None = 4.0, horizon: float | Literal["auto"] | None = 0.9
    ) -> Self: ...
    @classmethod
    def tis(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def seq_tis(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def mis(cls, is_threshold: Threshold | None = 2.0, rs_threshold: Threshold | None = "0.5_2.0") -> Self: ...
    @classmethod
    def icepop(cls, threshold: Threshold | None = "0.5_5.0") -> Self: ...
    @classmethod
    def token_is(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def token_tis(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def seq_is(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def seq_is_rs(
        cls,
        is_threshold: Threshold | None = 2.0,
        rs_threshold: Threshold | None = 2.0,
        rs_threshold_lower: float | None = None,
    ) -> Self: ...
    @classmethod
    def seq_mis(cls, threshold: Threshold | None = 2.0, lower: float | None = None) -> Self: ...
    @classmethod
    def geo_rs(
        cls,
        rs_threshold: Threshold | None = 1.001,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = 0.0001,
    ) -> Self: ...
    @classmethod
    def geo_mis(
        cls,
        rs_threshold: Threshold | None = 1.001,
        rs_threshold_lower: float | None = 0.999,
        veto_threshold: float | None = 0.0001,
    ) -> Self: ...
    @classmethod
    def ppo_is_bypass(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def pure_is(cls, threshold: Threshold | None = 2.0) -> Self: ...
    @classmethod
    def bypass_pg_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self: ...
