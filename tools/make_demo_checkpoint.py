"""Make the policy that the demo starts from: `python tools/make_demo_checkpoint.py` (about four minutes on 2 cores).

A random Qwen3 policy imitates solutions of the arithmetic task until two of five sampled answers are right, and is
written to `src/rollcorr_demo_models/demo` (4 MB). It stops while its learning rate is high: reinforcement learning
then has something to improve.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from rollcorr.config import SamplingSpec
from rollcorr.engines import GenerationSettings, TransformersEngine
from rollcorr.train.grpo.policy import DEMO_POLICY, make_tiny_policy, save_policy
from rollcorr.train.grpo.tasks import ArithmeticTask
from rollcorr.train.grpo.warmup import evaluate, warm_up
from rollcorr.train.model_files import demo_model_directory

SEED = 0
STEPS = 1000
TARGET_ACCURACY = 0.40
EVALUATE_EVERY = 20
PROBLEMS = 512


def main() -> None:
    """Warm up, watch the sampled accuracy, stop at the target, save."""
    torch.set_num_threads(2)
    console = Console()
    policy = make_tiny_policy(seed=SEED)
    task = ArithmeticTask(max_operand=99)
    engine = TransformersEngine(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(),
            max_new_tokens=48,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
    )

    def good_enough(step: int, loss: float) -> bool:
        if step % EVALUATE_EVERY:
            return False
        policy.model.eval()
        engine.update_weights(policy.model, version=step)
        result = evaluate(engine, policy, task, problems=PROBLEMS, bonus_length=24, seed=SEED)
        policy.model.train()
        console.print(f"step {step}: loss {loss:.3f} nats, accuracy {result['accuracy']:.3f}")
        return result["accuracy"] >= TARGET_ACCURACY

    warm_up(policy, task, steps=STEPS, batch_size=128, learning_rate=1.5e-3, seed=SEED, good_enough=good_enough)
    folder = demo_model_directory(DEMO_POLICY)
    save_policy(policy, folder)
    _name_tokenizer_class_for_every_version(folder / "tokenizer_config.json")
    console.print(f"wrote {folder}")


def _name_tokenizer_class_for_every_version(path: Path) -> None:
    """transformers 5 writes a class name that 4 does not know; both know this one."""
    values = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
