from .diffusion_policy import load_policy as load_policy
from .diffusion_policy import save_policy as save_policy
from .flow_grpo_config import FlowGrpoConfig as FlowGrpoConfig
from .flow_grpo_trainer import FlowGrpoTrainer as FlowGrpoTrainer
