"""verl's asynchronous trainer on a Ray cluster of this machine, on the CPU: `trainer_mode=separate_async`.

ROLLCORR_VERL=1 ROLLCORR_VERL_ROLLOUTS=$PWD/runs/verl/capture python examples/scale/verl_separate_async.py runs/verl
rollcorr check runs/verl/capture

verl runs as it ships, with two modules at its extension points, because it has no platform and no sampler for a CPU:
verl_cpu_platform.py and verl_cpu_sampler.py. Trainer and sampler are processes of their own: samples are one or more
versions old. The model is tiny and random; the reward is the share of even words.
"""

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]

# One update per version: for more, verl keeps the first weights as `.cpu()`, which copies nothing on a CPU.
SETTINGS = """
    data.train_batch_size=4 data.max_prompt_length=16 data.max_response_length=16 data.dataloader_num_workers=0
    algorithm.adv_estimator=grpo actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
    +actor_rollout_ref.model.override_config.attn_implementation=eager
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    +actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
    actor_rollout_ref.rollout.name=cpu actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.checkpoint_engine.backend=file reward.num_workers=1
    trainer.device=cpu trainer.n_gpus_per_node=1 trainer.logger=[console,file] trainer.val_before_train=False
    trainer.resume_mode=disable trainer.total_epochs=100 trainer.v1.trainer_mode=separate_async
    trainer.v1.separate_async.parameter_sync_step=1
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=2 +ray_kwargs.ray_init.include_dashboard=False
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Return the share of even words: verl calls this function for each response."""
    words = [word for word in solution_str.split() if word[1:].isdigit()]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)


def write_model(folder):
    """Write a random model of two layers and a tokenizer that has one token per word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    LlamaForCausalLM(LlamaConfig(max_position_embeddings=128, **sizes, **ids)).save_pretrained(folder)

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def write_prompts(path):
    """Write 60 prompts in verl's columns."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "even",
            "prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(60)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def main():
    """Train, and print what was corrected."""
    parser = argparse.ArgumentParser(description="Train a tiny model with verl's asynchronous trainer.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("options", nargs="*", help="of verl", default=["algorithm.rollout_correction.rollout_is=token"])
    arguments = parser.parse_intermixed_args()
    run = arguments.run.absolute()
    run.mkdir(parents=True)
    write_model(run / "model")
    write_prompts(run / "prompts.parquet")

    # Before verl is imported: it chooses its platform then. Ray's processes inherit these variables.
    modules = "verl_cpu_platform,verl_cpu_sampler"
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": modules}
    os.environ |= {"VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl"), "HF_HUB_OFFLINE": "1"}
    os.environ["VERL_LOGGING_LEVEL"] = "WARNING"  # verl 0.9.1 ends with a TypeError where it logs hybrid_engine=False
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(HERE))
    paths = [f"data.{kind}_files={run}/prompts.parquet" for kind in ("train", "val")]
    paths += [f"actor_rollout_ref.model.path={run}/model", f"hydra.run.dir={run}/hydra"]
    paths += [f"reward.custom_reward_function.path={Path(__file__).absolute()}"]
    paths += [f"+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.file.folder={run}/weights"]
    sys.argv = [sys.argv[0], *SETTINGS.split(), *paths, f"trainer.total_training_steps={arguments.steps}"]
    sys.argv += arguments.options

    from verl.trainer.main_ppo import main as train

    train()
    steps = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, step in enumerate(steps, 1):
        lag = step["training/off_policy/trajectory_staleness/mean"]
        kl, reward = step["rollout_corr/k3_kl"], step["critic/score/mean"]
        print(f"step {number}: versions behind {lag:.2f}, k3 {kl:.2e}, reward {reward:.2f}")


if __name__ == "__main__":
    main()
