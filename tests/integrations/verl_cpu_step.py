"""Two policy updates in verl's own engine on a CPU, printed as JSON: `python verl_cpu_step.py MODEL FOLDER`.

A bfloat16 copy of the policy samples, in the place of a server; all else is verl's: its FSDP engine scores and trains,
its registry names the loss, its functions correct and estimate advantages. test_verl_cpu_step.py asserts the
results. MODEL is a folder of Hugging Face, FOLDER an empty one.
"""

import functools
import json
import logging
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PROMPTS, LENGTH = 6, 8
DECOUPLED = {"rollout_is": "token", "rollout_is_threshold": 1.0, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.02}
BYPASS = DECOUPLED | {"bypass_mode": True, "loss_type": "reinforce"}


def sampled(path):
    """Prompts of one token and their continuations by a bfloat16 copy, with the log-probs that it reports."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 500, (PROMPTS // 2, 1), generator=generator).repeat_interleave(2, 0)
    log_probs = []
    with torch.no_grad():
        for _ in range(LENGTH):
            distribution = model(ids).logits[:, -1].float().log_softmax(-1)
            token = distribution.exp().multinomial(1, generator=generator)
            log_probs.append(distribution.gather(1, token))
            ids = torch.cat([ids, token], dim=1)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return DataProto.from_single_dict(
        {
            "input_ids": ids,
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "attention_mask": mask,
            "position_ids": torch.arange(1 + LENGTH).expand(PROMPTS, -1).clone(),
            "response_mask": mask[:, 1:],
            "rollout_log_probs": torch.cat(log_probs, dim=1),
        },
        meta_info={"temperature": 1.0, "global_token_num": mask.sum(-1).tolist(), "compute_loss": False},
    )


def built_worker(path):
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        fsdp_size=1,
        forward_only=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=PROMPTS,
        infer_micro_batch_size_per_gpu=PROMPTS,
        model_dtype="fp32",
        mixed_precision=single,
        use_torch_compile=False,
    )
    model = HFModelConfig(
        path=path,
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        )
    )
    worker.reset()
    return worker


def log_probs_of(worker, batch):
    data = left_right_2_no_padding(batch.to_tensordict())
    return no_padding_2_padding(tensordict_utils.get(worker.infer_batch(data), "log_probs").cpu(), data)


def parameters(worker):
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in worker.engine.module.parameters()])


def step(worker, batch, correction):
    """One update: score, correct, estimate advantages, train; with the loss as it follows from the numbers."""
    current = log_probs_of(worker, batch)
    valid, rollout = batch.batch["response_mask"].bool(), batch.batch["rollout_log_probs"]
    policy_loss = {"loss_mode": "vanilla"}
    if correction.get("bypass_mode"):
        rollout_corr_helper.apply_bypass_mode(batch, correction, policy_loss)
    else:
        batch.batch["old_log_probs"] = current
    rewards = torch.zeros_like(rollout)
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5])
    advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, valid.float(), [0, 0, 1, 1, 2, 2])
    batch.batch["advantages"] = advantages
    if not correction.get("bypass_mode"):
        batch, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, correction)

    # Mean of −w A, in bypass mode of −w log π A, by the definitions: π_θ is π_old here. verl divides by the tokens of
    # the mask that the actor gets: those kept on the driver, or all of them where the actor itself rejects.
    ratio = (current - rollout).exp()
    kept = valid & (ratio >= 1 / 1.02) & (ratio <= 1.02)
    term = current if correction.get("bypass_mode") else torch.ones_like(current)
    total = -(ratio.clamp(max=1.0) * term * advantages)[kept].sum()

    actor = ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=PROMPTS, policy_loss=PolicyLossConfig(**policy_loss)
    )
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    before, data = parameters(worker), left_right_2_no_padding(batch.to_tensordict())
    tensordict_utils.assign_non_tensor(data, global_batch_size=PROMPTS)
    metrics = tensordict_utils.get(worker.train_batch(data), "metrics")
    return {
        "loss": metrics["loss"],
        "expected": (total / (valid if correction.get("bypass_mode") else kept).sum()).item(),
        "grad_norm": metrics["grad_norm"],
        "moved": (parameters(worker) - before).abs().max().item(),
        "tokens": int(valid.sum()),
        "kept": int(kept.sum()),
    }


if __name__ == "__main__":
    logging.disable(logging.INFO)
    path, folder = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    worker = built_worker(path)
    steps = {"decoupled": step(worker, sampled(path), DECOUPLED), "bypass": step(worker, sampled(path), BYPASS)}
    functions = [rollout_corr_helper.apply_bypass_mode, *map(core_algos.get_policy_loss_fn, ("vanilla", "bypass_mode"))]
    names = [function.__module__ for function in functions]
    sys.stdout.write(f"STEPS {json.dumps(steps | {'functions': names})}\n")
    dist.destroy_process_group()
