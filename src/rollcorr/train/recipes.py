"""The recipes of `rollcorr train`: the `recipe` of a configuration names one of these.

grpo         a language model: rollcorr.train.grpo.grpo_trainer
flow_grpo    a diffusion model: rollcorr.train.flow_grpo.flow_grpo_trainer
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rollcorr.config.secrets import advice, secret_places
from rollcorr.run_directory.sinks import Sink
from rollcorr.train.config_file import check_stored_config, read_config, recipe_of
from rollcorr.train.loop import Recipe, Summary, run_recipe
from rollcorr.train.run_config import RunConfig

RECIPES = {
    "grpo": "rollcorr.train.grpo.grpo_recipe:GrpoRecipe",
    "flow_grpo": "rollcorr.train.flow_grpo.flow_grpo_recipe:FlowGrpoRecipe",
}
"""Recipe by name → module and class, imported when it is chosen. The first one is the default."""


def load_config(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Any:  # noqa: ANN401 (the recipe's)
    """Return the configuration of the recipe in the file or an override; `recipe` defaults to grpo.

    A default is replaced by the YAML file, then by each `dotted.name=value`; the later one wins. A block of correction
    options after a preset's name changes that preset.

    Args:
        path: the file; optional. Without it, the options keep their default.
        overrides: changes.

    Returns:
        A `GrpoConfig` or a `FlowGrpoConfig`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the recipe or a name is unknown (the message suggests the nearest one), a value is invalid, an
            override has no `=`, or the file is the config.yaml of a run and damaged.
    """
    name = recipe_of(path, overrides) or next(iter(RECIPES))
    config = read_config(path, overrides, _recipe_class(name).config_class)
    if path is not None:
        check_stored_config(Path(path), config, names_run_dir=any(text.startswith("run_dir=") for text in overrides))
    return config


def train(config: RunConfig, *, console: Console | None = None, sinks: str | Sequence[str | Sink] = ()) -> Summary:
    """Run a training configuration; see `rollcorr.train.loop.run_recipe` for arguments and errors.

    Args:
        config: the run's configuration, from `load_config`.
        console: where to show progress.
        sinks: metric sinks in addition to `config.log`: names such as "wandb", or objects.

    Raises:
        ValueError: also when torch cannot use `config.device` on this machine.
    """
    # Each backend raises its own error, so test an allocation.
    try:
        torch.zeros(1, device=config.device).item()
    except (AssertionError, RuntimeError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"device={config.device[:60]!r} cannot be used here: {reason}; write cpu, cuda or cuda:N, or check "
            "`rollcorr info`"
        ) from error

    console = console or Console()
    if places := secret_places(dataclasses.asdict(config)):
        console.print(advice(places), highlight=False, markup=False, soft_wrap=True)
    return run_recipe(_recipe_class(config.recipe), config, console=console, sinks=sinks)


def _recipe_class(name: str) -> type[Recipe]:
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r} is unknown; choose from {', '.join(RECIPES)}")
    found: type[Recipe] = pkgutil.resolve_name(RECIPES[name])
    return found
