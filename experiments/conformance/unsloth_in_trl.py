"""Unsloth's loss in TRL's trainer with the adapter attached: does the correction reach it?

    .venv-trl/bin/python experiments/conformance/unsloth_in_trl.py SOURCES

SOURCES holds checkouts of unsloth and unsloth-zoo. Unsloth imports on a GPU only, so its `compute_loss` and
`grpo_compute_loss` run from its files, unchanged and not compiled, as methods of TRL's GRPOTrainer on a tiny model and
the CPU. The path that computes log-probs in chunks (`grpo_accumulated_loss`) is not run.
"""

from __future__ import annotations

import ast
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peers import definitions, run_nodes
from trl import GRPOTrainer
from trl.trainer.utils import nanmax, nanmin

from rollcorr.integrations.trl import attach

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "integrations"))
from trl_cases import completions, grpo_trainer, loss_and_gradient, prompts, replayed

CONFIG = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.5,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.6_1.6",
}
STEPS = 20


def unsloth_trainer(sources: Path) -> type[GRPOTrainer]:
    """Return TRL's trainer with Unsloth's loss."""
    file = sources / "unsloth/unsloth/models/rl_replacements.py"
    [outer] = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if getattr(node, "name", "") == "grpo_trainer_compute_loss"
    ]
    loss = definitions(sources / "unsloth-zoo/unsloth_zoo/rl_replacements.py", "grpo_compute_loss")["grpo_compute_loss"]
    helpers = definitions(file, "_unsloth_get_model_config _unsloth_get_final_logit_softcapping")
    method = [node for node in outer.body if getattr(node, "name", "") == "compute_loss"]
    names = {name: helpers[name] for name in helpers if name.startswith("_unsloth")}
    space = run_nodes(list(method), file, grpo_compute_loss_slow=loss, nanmin=nanmin, nanmax=nanmax, **names)
    methods = {"compute_loss": space["compute_loss"], "_get_per_token_logps_and_entropies": log_probs_of_trl}
    return type("UnslothGRPOTrainer", (GRPOTrainer,), methods)


def log_probs_of_trl(
    self: GRPOTrainer,
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_efficient: bool = False,
    **options: object,
) -> tuple[Any, ...]:
    """Compute log-probs with TRL's method; Unsloth's has one more option, `compute_efficient`, which is left out."""
    arguments = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
    return GRPOTrainer._get_per_token_logps_and_entropies(self, *arguments, **options)


def sampled(trainer: GRPOTrainer) -> GRPOTrainer:
    """Return the trainer, sampling by replay; every completion has log-probs."""
    ids, log_probs = completions()
    log_probs[1][0] = log_probs[1][1]
    return replayed(trainer, ids, log_probs)


def main() -> int:
    """Print what was compared; an assertion fails where a number differs."""
    kind, lines = unsloth_trainer(Path(sys.argv[1])), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rollcorr").addHandler(handler)
    with tempfile.TemporaryDirectory() as folder:
        # Unsloth's default leaves TRL's correction off, so weights are in the advantages.
        options = {"vllm_importance_sampling_correction": False, "loss_type": "bnpo", "max_steps": STEPS}
        trainer = attach(sampled(grpo_trainer(folder, kind, **options)), CONFIG)
        batch = trainer._generate_and_score_completions(prompts())
        assert trainer._loss_was_checked
        assert not any("could not check" in line for line in lines), lines
        theirs, gradient = loss_and_gradient(trainer, batch)
        trainer.compute_loss = lambda model, inputs: GRPOTrainer.compute_loss(trainer, model, inputs)
        of_trl, gradient_of_trl = loss_and_gradient(trainer, batch)
        torch.testing.assert_close(theirs, of_trl, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, gradient_of_trl, rtol=1e-6, atol=1e-6)
        del trainer.compute_loss
        print("Unsloth's loss and gradient of a corrected batch equal TRL's to 1e-6")

        trainer.train()
        assert trainer.state.global_step == STEPS
        kept = [line["rollout_corr/rollout_rs_masked_fraction"] for line in trainer.state.log_history[:-1]]
        assert all(share > 0 for share in kept)
        print(f"{STEPS} steps train; every step rejects tokens, {min(kept):.2f} to {max(kept):.2f} of them")

        # With TRL's correction on, the weights are in a tensor that Unsloth's loss does not read.
        options["vllm_importance_sampling_correction"] = True
        trainer = attach(sampled(grpo_trainer(folder, kind, **options)), CONFIG)
        try:
            trainer._generate_and_score_completions(prompts())
        except ValueError as error:
            print(f"with vllm_importance_sampling_correction=True: {str(error)[:150]}")
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
