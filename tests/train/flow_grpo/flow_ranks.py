"""Program of one rank of the distributed test; `results()` without a group computes the expected result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 2
BAND = "rollout_rs: token_k1, rollout_rs_threshold: 0.9999_1.0001"
MODES = {
    "decoupled": (f"algorithm.rollout_correction={{rollout_is: token, {BAND}}}",),
    "bypass": (f"algorithm.rollout_correction={{bypass_mode: true, {BAND}}}", "algorithm.loss.kl_coef=0.1"),
    "nothing kept": ("algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: 2.0_3.0}",),
}


def trainer(model: Path, overrides: tuple[str, ...], group: Any = None) -> Any:
    from rollcorr.train import load_config
    from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
    from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer
    from rollcorr.train.flow_grpo.rewards import make_reward

    options = (
        "recipe=flow_grpo", f"model.path={model}", "reward.name=color", "rollout.prompts_per_step=2",
        "rollout.group_size=4", "rollout.num_steps=4", "rollout.dtype=fp8", "optim.mini_batch_size=5",
        "optim.micro_batch_size=2",
    )  # fmt: skip
    config = load_config(None, [*options, *overrides])
    policy = make_policy(config, config.model.path)
    reference = make_policy(config, config.model.path).transformer if config.algorithm.loss.kl_coef else None
    texts, _ = make_prompts(config)
    made = FlowGrpoTrainer(config, policy, texts, make_reward("color"), reference=reference, group=group)
    made.optimizer = torch.optim.SGD(made.parameters, lr=1.0)  # Adam would blow up rounding errors
    return made


def results(model: Path, group: Any = None) -> dict[str, Any]:
    """Two training steps in each mode, in mini-batches of 5 and 3."""
    found: dict[str, Any] = {}
    for mode, overrides in MODES.items():
        made = trainer(model, overrides, group)
        metrics = [made.step(step).metrics for step in (1, 2)]
        found[mode] = {
            "parameters": torch.cat([p.detach().flatten() for p in made.policy.transformer.parameters()]),
            "metrics": [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics],
            "passes": made.forward_passes,
        }
    try:
        trainer(model, ("optim.mini_batch_size=1",), group)
    except ValueError as error:
        found["error"] = str(error)
    return found


def run(rank: int, path: str, model: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/init", rank=rank, world_size=SIZE)
    torch.save(results(Path(model), dist.group.WORLD), f"{path}/{rank}.pt")
    dist.destroy_process_group()
