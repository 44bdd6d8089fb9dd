"""Read verl's older configurations, and see what each option became. `rollcorr convert-config` does it for files.

python examples/convert_old_config.py
"""

from pathlib import Path

from rollcorr.config import convert, load_yaml

configs = Path(__file__).parent / "configs"

for name in ("2025-10/token_mask_veto.yaml", "2025-11/seq_is_rs.yaml"):
    conversion = convert(load_yaml((configs / name).read_text(encoding="utf-8")))
    print(f"{name}: schema {conversion.schema}")
    for row in conversion.report:
        print(f"  {row.field}: {row.value!r} → {row.became}")
    print(f"  {conversion.config}")

# Wherever a configuration is taken, a dictionary of any generation will do.
options = {"rollout_is_threshold": 2.0, "rollout_is": False, "rollout_is_level": "token", "rollout_is_mode": "mask"}
config = convert(options).config
print(f"rejection only: {config.rollout_rs} {config.rollout_rs_threshold}", end=", ")
print(f"weights in the loss: {config.weights_reach_loss}")
