"""Record the installed TRL's results for one batch: `python tests/integrations/record_trl.py`. Needs TRL.

Writes `tests/data/trl_VERSION_losses.json`: the batch, and for each loss, mode and pair of bounds TRL's ratio, loss and
gradient with respect to the log-probs of the tokens. tests/data/README.md describes the file.
"""

import hashlib
import json
import math
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import trl
from trl_cases import LOSSES, MODES, completions, grpo_trainer, prompts, replayed, with_options

DATA = Path(__file__).parents[1] / "data"
SOURCES = ("trainer/grpo_trainer.py", "trainer/grpo_config.py", "trainer/utils.py", "generation/vllm_generation.py")
BOUNDS = [(3.0, None), (1.3, 0.6), (None, 0.8)]
KEPT = ("completion_mask", "old_per_token_logps", "sampling_per_token_logps", "advantages", "num_items_in_batch")
OPTIONS = ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos")
OPTIONS += ("vespo_lambda_neg", "max_completion_length")


def numbers(tensor):
    """Nine digits represent every float32. NaN is None, because JSON has no NaN."""
    if tensor.dim():
        return [numbers(part) for part in tensor]
    value = tensor.item()
    if isinstance(value, int):
        return value
    return None if math.isnan(value) else float(f"{value:.9g}")


def loss_and_gradient(trainer, batch, log_prob):
    """TRL's loss of given log-probs, and its gradient."""
    leaf = log_prob.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(log_prob), None)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch)
    del trainer._get_per_token_logps_and_entropies
    loss.backward()
    return loss.detach(), leaf.grad


def record(folder):
    trainer = replayed(grpo_trainer(folder), *completions())
    trainer.model.train()
    cases = []
    for mode in MODES:
        for upper, lower in BOUNDS:
            with_options(trainer, mode, upper, lower)
            batch = trainer._generate_and_score_completions(prompts())
            losses = {}
            old = batch["old_per_token_logps"]
            log_prob = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(5))
            for loss_type in LOSSES:
                if loss_type == "vespo" and mode.startswith("sequence"):
                    continue  # TRL refuses it
                trainer.loss_type = loss_type
                loss, gradient = loss_and_gradient(trainer, batch, log_prob)
                losses[loss_type] = {"loss": numbers(loss), "gradient": numbers(gradient)}
            ratio = numbers(batch["importance_sampling_ratio"])
            cases.append({"mode": mode, "upper": upper, "lower": lower, "ratio": ratio, "losses": losses})
    options = {name: getattr(trainer.args, name) for name in OPTIONS}
    options |= {"epsilon_low": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high}
    return {
        "trl": version("trl"),
        "sha256": {
            name: hashlib.sha256((Path(trl.__file__).parent / name).read_bytes()).hexdigest() for name in SOURCES
        },
        "options": options,
        "batch": {name: numbers(batch[name]) for name in KEPT} | {"log_prob": numbers(log_prob)},
        "cases": cases,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(folder)
    path = DATA / f"trl_{recorded['trl']}_losses.json"
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}: {len(recorded['cases'])} cases, {path.stat().st_size:,} bytes\n")
