"""A fake trainer with TRL's names, batch and losses, and TRL's recorded results for that batch.

`test_trl.py` compares these losses with the recorded ones, so that they may replace TRL's.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "trl_1.16.0_losses.json").read_text(encoding="utf-8"))
OPTIONS = SimpleNamespace(**RECORDED["options"])


def tensor(numbers):
    """The numbers as a tensor; None is NaN."""
    if isinstance(numbers, list) and numbers and isinstance(numbers[0], list):
        return torch.stack([tensor(row) for row in numbers])
    return torch.tensor([float("nan") if number is None else number for number in numbers])


def recorded_batch(*, old=True):
    """TRL's generation batch, without its ratio."""
    batch = {name: tensor(value) for name, value in RECORDED["batch"].items() if isinstance(value, list)}
    batch["num_items_in_batch"] = torch.tensor(RECORDED["batch"]["num_items_in_batch"])
    batch["prompt_ids"] = torch.ones(len(batch["advantages"]), 2, dtype=torch.long)
    batch["prompt_mask"] = batch["prompt_ids"]
    batch["completion_ids"] = batch["completion_mask"]
    del batch["log_prob"]
    if not old:
        del batch["old_per_token_logps"]
    return batch


def current_log_prob():
    return tensor(RECORDED["batch"]["log_prob"]).requires_grad_()


class StandInTrainer:
    """The parts of a `GRPOTrainer` that the adapter uses."""

    def __init__(self, batch=None, loss_type="grpo", *, use_vllm=True, **options):
        self.batch = recorded_batch() if batch is None else batch
        self.model = torch.nn.Linear(1, 1)
        self.accelerator = SimpleNamespace(
            is_main_process=True, unwrap_model=lambda model: model, process_index=0, num_processes=1
        )
        self.state = SimpleNamespace(global_step=3, log_history=[])
        self.callbacks, self.num_generations, self.reward_weights = [], 4, torch.tensor([1.0, 0.5])
        self.temperature, self.loss_type = 1.0, loss_type
        self.use_vllm, self.vllm_generation = use_vllm, None
        self.vllm_importance_sampling_correction = options.get("correction", True)
        self.args = SimpleNamespace(
            seed=42,
            report_to=options.get("report_to", ["tensorboard"]),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=2,
            vllm_importance_sampling_correction=options.get("correction", True),
            vllm_importance_sampling_mode=options.get("mode", "sequence_mask"),
            vllm_importance_sampling_clip_max=options.get("upper", 3.0),
            vllm_importance_sampling_clip_min=options.get("lower"),
        )
        self.forward_passes = []
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.logged, self.printed = [], []

    def _generate_and_score_completions(self, inputs):
        return dict(self.batch)

    def _get_per_token_logps_and_entropies(self, model, ids, mask, width, batch_size=None, **inputs):
        self.forward_passes.append((ids.shape, mask.shape, width, batch_size, inputs))
        return tensor(RECORDED["batch"]["old_per_token_logps"]), None, None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Rewards of two functions; the second scores even rows only, and neither scores the last one."""
        rewards = torch.arange(2.0 * len(prompts)).reshape(-1, 2) + self.state.global_step
        rewards[1::2, 1] = rewards[-1] = float("nan")
        return rewards

    def compute_loss(self, model, inputs):
        log_prob = self._get_per_token_logps_and_entropies(
            model, inputs["completion_ids"], inputs["completion_mask"], inputs["completion_ids"].shape[1]
        )[0]
        self._metrics["train"]["entropy"].append(1.0)
        multiplies = self.use_vllm and self.vllm_importance_sampling_correction
        return trl_loss(self.loss_type, inputs, log_prob, multiplies=multiplies)

    def training_step(self, model, inputs, num_items_in_batch=None):
        return torch.tensor(0.25)

    def log(self, logs, start_time=None):
        logs.update({name: sum(values) / len(values) for name, values in self._metrics["train"].items()})
        self._metrics["train"].clear()
        self.printed.append(dict(logs))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.logged.append(logs)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def remove_callback(self, callback):
        self.callbacks.remove(callback)

    def train(self, steps, *, first=0, generate_every=1, log_every=1):
        """The calls of transformers' and TRL's trainers, in their order: two micro-batches for each step."""
        self.state.global_step = first
        for callback in self.callbacks:
            callback.on_train_begin(self.args, self.state, None)
        for step in range(first, first + steps):
            if step % generate_every == 0:
                self._calculate_rewards([], ["prompt"] * len(self.batch["advantages"]), [], [])
                self._generate_and_score_completions([])
                self._metrics["train"]["kl"].append(float(step))
            self._metrics["train"]["num_tokens"] = [100.0 * step]
            for _ in range(2):
                self.training_step(self.model, {})
            self.state.global_step = step + 1
            for callback in self.callbacks:
                callback.on_step_end(self.args, self.state, None)
            if self.state.global_step % log_every == 0:
                self.log({})


class StandInRLOOTrainer(StandInTrainer):
    """The parts of an `RLOOTrainer`: no choice of losses, sums as old log-probs, and no options of its own."""

    def __init__(self, generation=None):
        super().__init__(use_vllm=generation is not None)
        del self.loss_type, self.vllm_importance_sampling_correction
        self.args = SimpleNamespace(seed=42, report_to=[], per_device_train_batch_size=4, per_device_eval_batch_size=2)
        self.vllm_generation = generation

    def _generate_and_score_completions(self, inputs):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        batch = {name: self.batch[name] for name in names}
        if self.use_vllm:
            self.vllm_generation.generate([[1]], None, 4)
        old, _, _ = self._get_per_token_logps_and_entropies(
            self.model, batch["completion_ids"], batch["completion_mask"], 7
        )
        return batch | {"old_logps": (old * batch["completion_mask"]).sum(1)}

    def compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        log_prob = self._get_per_token_logps_and_entropies(model, inputs["completion_ids"], mask, mask.shape[1])[0]
        ratio = ((log_prob * mask).sum(1) - inputs["old_logps"]).exp()
        clipped = ratio.clamp(1 - OPTIONS.epsilon_low, 1 + OPTIONS.epsilon_high)
        return -torch.min(ratio * inputs["advantages"], clipped * inputs["advantages"]).mean()


def trl_loss(loss_type, batch, log_prob, *, multiplies):
    """TRL 1.16.0's loss of a batch, at its default `importance_sampling_level`, with one micro-batch per step."""
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    advantages = batch["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    log_ratio = log_prob - batch["old_per_token_logps"]
    ratio = log_ratio.exp()

    if loss_type == "cispo":
        per_token = -ratio.clamp(max=OPTIONS.epsilon_high).detach() * advantages * log_prob
    elif loss_type == "sapo":
        temperature = torch.where(advantages > 0, OPTIONS.sapo_temperature_pos, OPTIONS.sapo_temperature_neg)
        per_token = -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages
    elif loss_type == "vespo":
        per_token = -vespo_factor(batch, log_ratio.detach(), advantages, mask) * advantages * log_prob
    else:
        clipped = ratio.clamp(1 - OPTIONS.epsilon_low, 1 + OPTIONS.epsilon_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
    if multiplies and loss_type != "vespo":
        per_token = per_token * batch["importance_sampling_ratio"]

    # Most of these losses differ only by the divisor.
    total = (per_token * mask).sum()
    of_sequence = (per_token * mask).sum(-1)
    return {
        "grpo": lambda: (of_sequence / mask.sum(-1).clamp(min=1)).mean(),
        "sapo": lambda: (of_sequence / mask.sum(-1).clamp(min=1)).mean(),
        "bnpo": lambda: total / mask.sum(),
        "dr_grpo": lambda: total / (len(mask) * OPTIONS.max_completion_length),
        "luspo": lambda: of_sequence.mean(),
        "cispo": lambda: total / batch["num_items_in_batch"],
        "dapo": lambda: total / batch["num_items_in_batch"],
        "vespo": lambda: total / batch["num_items_in_batch"],
    }[loss_type]()


def vespo_factor(batch, log_ratio, advantages, mask):
    """φ(w) = exp(λ + k log w − λ w), w the product of all ratios of a sequence."""
    smallest = torch.tensor(1e-8).log().item()
    log_weight = (log_ratio.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if "importance_sampling_ratio" in batch:
        log_weight = log_weight + batch["importance_sampling_ratio"].log().clamp(smallest, 20).sum(-1, keepdim=True)
    log_weight = log_weight.clamp(smallest, 20)
    power = torch.where(advantages >= 0, OPTIONS.vespo_k_pos, OPTIONS.vespo_k_neg)
    rate = torch.where(advantages >= 0, OPTIONS.vespo_lambda_pos, OPTIONS.vespo_lambda_neg)
    return (rate + power * log_weight - rate * log_weight.exp()).exp()
