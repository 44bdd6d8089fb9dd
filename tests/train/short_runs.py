"""A run of each recipe that is over in about a second and writes every kind of file: to be killed, cut short, repeated.

    from short_runs import short_run
    train(load_config(None, [*short_run("grpo", tmp_path), f"run_dir={tmp_path / 'run'}"]))

Every checkpoint contains weights of an engine that lags behind, a reference policy and an evaluation before the first
step; the gradient is never 0, for any random weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

TINY_LANGUAGE_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TINY_DIFFUSION_MODEL = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "caption_projection_dim": 16,
}

EVERY_RUN = (
    "threads=1",
    "steps=3",
    "checkpoint.every=1",
    "algorithm.loss.kl_coef=0.1",
    "rollout.refresh_every=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "optim.lr=0.01",
    "log.evaluate=2",
)


def short_run(recipe: str, folder: Path) -> list[str]:
    """The options of a run, for `load_config` and `rollcorr train`; the caller sets `run_dir`.

    Args:
        recipe: "grpo" or "flow_grpo".
        folder: where a model is put that the run starts from, if it is not there yet.
    """
    if recipe == "grpo":
        fields = ", ".join(f"{name}: {value}" for name, value in TINY_LANGUAGE_MODEL.items())
        own = ["model.path=null", f"model.config={{{fields}}}", "rollout.max_new_tokens=4"]
        own += ["log.null=2", "warm_up.steps=2", "warm_up.batch_size=2", "algorithm.loss.entropy_coef=0.01"]
        return ["recipe=grpo", *EVERY_RUN, *own]

    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    from make_shapes_model import make_small_transformer, make_word_table, save_small_model

    model = folder / "tiny_diffusion_model"
    if not model.is_dir():
        save_small_model(make_small_transformer(seed=3, **TINY_DIFFUSION_MODEL), make_word_table(), model)
    own = [f"model.path={model}", "reward.name=color", "rollout.num_steps=4", "log.null=4", "log.null_every=3"]
    return ["recipe=flow_grpo", *EVERY_RUN, *own]
