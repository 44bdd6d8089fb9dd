# `train(load_config(...))` runs a recipe. For a recipe of your own: `Recipe`, `RunConfig`, `read_config`, `run_recipe`.
from .checkpoint import latest_checkpoint as latest_checkpoint
from .config_file import read_config as read_config
from .flow_grpo.family import Condition as Condition
from .flow_grpo.family import Family as Family
from .flow_grpo.flow_grpo_config import FlowGrpoConfig as FlowGrpoConfig
from .flow_grpo.flow_grpo_trainer import FlowGrpoTrainer as FlowGrpoTrainer
from .flow_grpo.schedule import Schedule as Schedule
from .grpo.grpo_config import GrpoConfig as GrpoConfig
from .grpo.grpo_trainer import GrpoTrainer as GrpoTrainer
from .loop import Recipe as Recipe
from .loop import Summary as Summary
from .loop import run_recipe as run_recipe
from .recipes import load_config as load_config
from .recipes import train as train
from .run_config import RunConfig as RunConfig
from .steps import derived_generator as derived_generator
