"""Lines that put this library's correction into other frameworks, and one run of each in the framework's own code.

    make conformance SOURCES=DIR

DIR holds checkouts: prime-rl, ms-swift, AReaL, ROLL, OpenRLHF, rllm. Each entry's lines are inserted at its place
in the framework's file, and the framework's function, otherwise unchanged, runs on a batch whose weights and rejected
tokens are known. lines.json records the commits and what was compared; docs/coming_from/other_frameworks.md shows both.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from grade_peers import commit_of
from peers import Names, definitions, run_nodes

from rollcorr import correct

RESULTS = Path(__file__).with_name("lines.json")
PRESET = "decoupled_k3_rs_token_tis"


class Lines(NamedTuple):
    """A framework's entry.

    Attributes:
        framework: its name.
        folder: of its checkout in DIR.
        web: address of its repository.
        file: the file that has the hook, or that takes the lines.
        place: where the lines stand, in words.
        needs: settings that the lines need.
        code: the lines.
        run: runs them in the framework's code, given its folder; raises `AssertionError` if a number differs.
        compared: what the run compared.
        limits: what a user must know.
    """

    framework: str
    folder: str
    web: str
    file: str
    place: str
    needs: str
    code: str
    run: Callable[[Path, Lines], None]
    compared: str
    limits: str


def example() -> tuple[torch.Tensor, ...]:
    """log π_old, log μ, mask and advantages, (2, 4): a weight above 2, and a second row that k3 rejects."""
    old = torch.tensor([[-1.0, -0.2, -0.5, -0.3], [-0.5, -0.4, -0.6, -1.0]])
    rollout = old - torch.tensor([[0.05, -0.03, 0.02, 0.0], [0.9, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    return old, rollout, mask, torch.tensor([[0.5], [-1.5]]).expand(2, 4)


def expected(count: float) -> torch.Tensor:
    """∂loss/∂log π_θ at π_θ = π_old, (2, 4): −w A / count on kept tokens, 0 elsewhere."""
    old, rollout, mask, advantages = example()
    correction = correct(old, rollout, mask, PRESET)
    assert correction.weights is not None
    assert correction.loss_mask.sum() == 3, "the second row is rejected"
    return torch.where(correction.loss_mask, -correction.weights * advantages / count, 0.0)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare two tensors to 1e-6."""
    torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=1e-6, atol=1e-7)


def edited(entry: Lines, root: Path, start: str, *, replace: bool) -> Path:
    """Return a copy of the entry's file with its lines above the statement that starts so, or in its place."""
    file = root / entry.file
    text = file.read_text(encoding="utf-8")
    rows = text.splitlines(keepends=True)
    statements = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    [node] = [node for node in statements if rows[node.lineno - 1].lstrip().startswith(start)]
    code = textwrap.indent(entry.code + "\n", " " * node.col_offset)
    last = node.end_lineno if replace else node.lineno - 1
    rows[node.lineno - 1 : last] = [code]
    copy = Path(__file__).parents[2] / "build" / "lines" / f"{entry.folder}_{file.name}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text("".join(rows), encoding="utf-8")
    return copy


def run_prime_rl(root: Path, entry: Lines) -> None:
    """prime-rl's loss over two sequences, with the custom loss."""
    names = "LossInputs LossOutputs _safe_mean setup_rl_loss_fn compute_loss"
    custom = type("CustomLossConfig", (), {"import_path": "", "kwargs": {}})
    own: Names = {}
    imported = {"import_object": lambda path: own["corrected_loss"], "CustomLossConfig": custom}
    theirs = definitions(root / entry.file, names, Bool=defaultdict, Float=defaultdict, **imported)
    module = ModuleType("prime_rl.trainer.rl.loss")
    vars(module).update({name: theirs[name] for name in ("LossInputs", "LossOutputs")})
    parents = {"prime_rl": ModuleType("prime_rl"), "prime_rl.trainer": ModuleType("t"), "prime_rl.trainer.rl": module}
    sys.modules.update({**parents, "prime_rl.trainer.rl.loss": module})
    exec(entry.code, own)

    old, rollout, mask, advantages = example()
    current = old.clone().requires_grad_()
    function = theirs["setup_rl_loss_fn"](custom())
    lists = [list(tensor) for tensor in (current, rollout)]
    scales = {"rl_scale": 7, "ce_scale": 1, "ref_kl_scale": 1}
    components = {"rl_weights": None, "ce_weights": None, "ref_kl_weights": None}
    options = {"rl_loss_fn": function, **components, **scales}
    loss, metrics = theirs["compute_loss"](*lists, None, list(advantages), list(mask.bool()), **options)
    loss.backward()
    same(current.grad, expected(7))
    same(metrics["rollcorr/kept"], torch.tensor([1.0, 0.0]))


def run_ms_swift(root: Path, entry: Lines) -> None:
    """ms-swift's loss in a subclass of its trainer."""
    names = "compute_loss _compute_loss _compute_loss_single _compute_loss_and_metrics"
    given = {"profiling_decorator": lambda method: method, "gather_object": lambda values: values}
    given |= {"nanmax": torch.max, "nanmin": torch.min, "Tuple": tuple, "Dict": dict}
    theirs = definitions(root / entry.file, " ".join(f"GRPOTrainer.{name}" for name in names.split()), **given)
    batch_type = definitions(root / "swift/rl_core/data.py", "GRPOBatch", fields=dataclasses.fields)["GRPOBatch"]
    base = type("GRPOTrainer", (), {name: theirs[name] for name in names.split()})
    factory = SimpleNamespace(TRAINER_MAPPING={})
    modules = {"swift": ModuleType("swift"), "swift.rlhf_trainers": ModuleType("r"), "swift.trainers": ModuleType("t")}
    vars(modules["swift.rlhf_trainers"])["GRPOTrainer"] = base
    vars(modules["swift.trainers"])["TrainerFactory"] = factory
    sys.modules.update(modules)
    own: Names = {}
    exec(entry.code, own)
    assert factory.TRAINER_MAPPING["grpo"] == "my_plugin.CorrectedTrainer"

    old, rollout, mask, advantages = example()
    current = old.clone().requires_grad_()
    off = dict.fromkeys(("use_liger_loss", "dynamic_num_samples", "compute_entropy", "overlong_filter", "_has_teacher"))
    off |= dict.fromkeys(("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "chord_sft_iterator"))
    off |= {"disable_rollout_importance_sampling": False, "log_rollout_offpolicy_metrics": False, "beta": 0.0}
    trainer = own["CorrectedTrainer"]()
    vars(trainer).update(off, epsilon_low=0.2, epsilon_high=0.2, sdar_loss_coef=0, loss_type="bnpo")
    trainer.importance_sampling_level = "token"
    trainer.model, trainer.template = SimpleNamespace(training=True), SimpleNamespace(padding_free=False)
    trainer.args = SimpleNamespace(per_device_train_batch_size=2, delta=None)
    trainer.accelerator = SimpleNamespace(gather_for_metrics=lambda tensor: tensor)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (current, None)
    trainer._update_metrics = lambda metrics: None
    batch = batch_type(mask.bool(), torch.zeros(2, dtype=torch.bool), mask.sum(1), old)
    batch.rollout_per_token_logps, batch.advantages = rollout, advantages
    inputs = {"model_inputs": {"input_ids": torch.zeros(2, 4)}, "grpo_batch": batch}
    for _ in range(2):  # ms-swift passes a batch again with num_iterations
        current.grad = None
        trainer.compute_loss(None, inputs).backward()
        same(current.grad, expected(3))


def run_areal(root: Path, entry: Lines) -> None:
    """AReaL's loss with the edited function."""
    names = "RejectionSamplingResult apply_rejection_sampling ppo_actor_loss_fn"
    file = edited(entry, root, "if proximal_logprobs.shape != old_logprobs.shape:", replace=False)
    old, rollout, mask, advantages = example()
    theirs = definitions(file, names)
    for packed in (False, True):
        current = old.clone().requires_grad_()
        tensors = [current, old, rollout, advantages, mask.bool()]
        offsets = torch.tensor([0, 4, 8], dtype=torch.int32) if packed else None
        logprobs, proximal, sampled, own, valid = (x.flatten() for x in tensors) if packed else tensors
        options = {"eps_clip": 0.2, "loss_mask": valid, "cu_seqlens": offsets, "rejection_sampling": object()}
        loss, _ = theirs["ppo_actor_loss_fn"](logprobs, proximal, sampled, own, **options)
        loss.backward()
        same(current.grad, expected(7))


def run_roll(root: Path, entry: Lines) -> None:
    """ROLL's correction of a batch, edited."""
    file = edited(entry, root, "is_w, filter_mask, corr_metrics =", replace=True)
    theirs = definitions(file, "apply_train_infer_correction_to_batch")
    old, rollout, mask, advantages = example()
    whole = torch.nn.functional.pad(mask, (1, 0))
    tensors = {"response_mask": whole, "old_log_probs": old, "infer_logprobs": rollout}
    config = SimpleNamespace(train_infer_correction=None)
    batch, metrics = theirs["apply_train_infer_correction_to_batch"](config, SimpleNamespace(batch=tensors))
    kept = batch.batch["response_mask"][:, 1:]
    same(-batch.batch["train_infer_is_weight"] * kept * advantages, expected(1))
    assert metrics["rollout_corr/token_count"] == 7


def run_openrlhf(root: Path, entry: Lines) -> None:
    """OpenRLHF's loss, edited."""
    start = 'if self.enable_vllm_is_correction and self.policy_loss_type == "ppo":'
    masked_mean = definitions(root / "openrlhf/models/utils.py", "masked_mean")["masked_mean"]
    file = edited(entry, root, start, replace=True)
    theirs = definitions(file, "aggregate_loss PolicyLoss", masked_mean=masked_mean)
    old, rollout, mask, advantages = example()
    current = old.clone().requires_grad_()
    loss = theirs["PolicyLoss"]()(current, old, advantages, mask.float(), rollout)[0]
    loss.backward()
    same(current.grad, expected(3))


def run_rllm(root: Path, entry: Lines) -> None:
    """The block of rllm's verl backend, edited."""
    file = edited(entry, root, 'with simple_timer("rollout_correction", timing_dict):', replace=True)
    start = "if tis_mode is not None and has_rollout_log_probs:"
    text = file.read_text(encoding="utf-8")
    statements = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If))
    [block] = [node for node in statements if ast.unparse(node).startswith(start)]
    old, rollout, mask, advantages = example()
    tensors = {"response_mask": mask, "old_log_probs": old, "rollout_log_probs": rollout}
    batch, metrics = SimpleNamespace(batch=tensors), {}
    run_nodes([block], file, tis_mode="token", has_rollout_log_probs=True, batch=batch, metrics=metrics)
    same(-tensors["rollout_is_weights"] * tensors["response_mask"] * advantages, expected(1))
    assert metrics["rollout_corr/token_count"] == 7


GRADIENT = "the gradient with respect to log π_θ at π_θ = π_old, in float32, to 1e-6"
ORIGINAL_COUNT = "Rejected tokens add 0 to the loss, but {name} still counts them in the divisor."
LINES = (
    Lines(
        "prime-rl",
        "prime-rl",
        "https://github.com/PrimeIntellect-ai/prime-rl",
        "src/prime_rl/trainer/rl/loss.py",
        "a module of yours, my_module.py, which prime-rl imports as a custom loss",
        'in the configuration: `[trainer.loss]` with `type = "custom"` and `import_path = "my_module.corrected_loss"`',
        """\
import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs
from rollcorr import PolicyLogProbs, policy_loss
from rollcorr.core import Denominators

CONFIG = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
CONFIG |= {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}


def corrected_loss(inputs: LossInputs) -> LossOutputs:
    advantages = inputs.advantages if inputs.loss_weights is None else inputs.advantages * inputs.loss_weights
    output = policy_loss(
        PolicyLogProbs(log_prob=inputs.trainer_logprobs, rollout_log_prob=inputs.inference_logprobs),
        advantages,
        inputs.loss_mask,
        config=CONFIG,
        denominators=Denominators(1.0, 1.0),  # prime-rl divides the sum itself
        cu_seqlens=torch.tensor([0, len(advantages)], device=advantages.device),
    )
    kept = output.loss_mask.sum() / inputs.loss_mask.sum().clamp(min=1)
    return LossOutputs(loss=output.loss, metrics={"rollcorr/kept": kept})""",
        run_prime_rl,
        f"`compute_loss` with the loss of `setup_rl_loss_fn`, by {GRADIENT}",
        ORIGINAL_COUNT.format(name="prime-rl") + " prime-rl computes no π_old, so the lines use bypass mode.",
    ),
    Lines(
        "ms-swift",
        "ms-swift",
        "https://github.com/modelscope/ms-swift",
        "swift/rlhf_trainers/grpo_trainer.py",
        "a module of yours, my_plugin.py",
        "`--external_plugins my_plugin.py --use_vllm true`, without `--rollout_importance_sampling_mode`",
        f"""\
from dataclasses import replace

from rollcorr import correct
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory


class CorrectedTrainer(GRPOTrainer):
    def compute_loss(self, model, inputs, **options):
        inputs = inputs[0] if isinstance(inputs, list) else inputs
        batch = inputs["grpo_batch"]
        tensors = (batch.old_per_token_logps, batch.rollout_per_token_logps, batch.completion_mask)
        correction = correct(*tensors, "{PRESET}")
        advantages = batch.advantages * correction.weights
        batch = replace(batch, advantages=advantages, completion_mask=correction.loss_mask)
        return super().compute_loss(model, {{**inputs, "grpo_batch": batch}}, **options)


TrainerFactory.TRAINER_MAPPING["grpo"] = "my_plugin.CorrectedTrainer\"""",
        run_ms_swift,
        f"`compute_loss` with `loss_type` bnpo, twice on one batch, by {GRADIENT}",
        "The losses dapo and cispo still divide by the original count. `TRAINER_MAPPING` is a public name that "
        "ms-swift's pages do not describe. ms-swift records log-probs of vLLM only.",
    ),
    Lines(
        "AReaL",
        "AReaL",
        "https://github.com/inclusionAI/AReaL",
        "areal/utils/functional/functional.py",
        "`apply_rejection_sampling`, as the first statements",
        "`actor.use_decoupled_loss=true`, and `actor.rejection_sampling` to any value (then ignored)",
        f"""\
from rollcorr import correct

tensors = (proximal_logprobs.detach(), old_logprobs.detach(), loss_mask)
result = correct(*tensors, "{PRESET}", cu_seqlens=cu_seqlens)
weights = torch.where(result.loss_mask, result.weights, 0.0)
return RejectionSamplingResult(result.loss_mask.to(loss_mask.dtype), weights, 0.0)""",
        run_areal,
        f"`ppo_actor_loss_fn`, padded and packed, by {GRADIENT}",
        ORIGINAL_COUNT.format(name="AReaL"),
    ),
    Lines(
        "ROLL",
        "ROLL",
        "https://github.com/alibaba/ROLL",
        "roll/utils/train_infer_corrections.py",
        "`apply_train_infer_correction_to_batch`, instead of `is_w, filter_mask, corr_metrics = …`",
        "`enable_old_logprobs_recompute: true`",
        f"""\
from rollcorr import correct

correction = correct(old_lp, infer_lp, stat_mask, "{PRESET}")
is_w, filter_mask, corr_metrics = correction.weights, correction.loss_mask, correction.metrics()""",
        run_roll,
        "the weights and masks that the function writes into the batch, to 1e-6",
        "The configuration `train_infer_correction` is then ignored.",
    ),
    Lines(
        "OpenRLHF",
        "OpenRLHF",
        "https://github.com/OpenRLHF/OpenRLHF",
        "openrlhf/models/loss.py",
        "`PolicyLoss.forward`, instead of the block `if self.enable_vllm_is_correction and …`",
        "`--algo.advantage.is_correction_enable`, so that the sampler's log-probs are recorded",
        f"""\
from rollcorr import correct

correction = correct(old_log_probs, rollout_log_probs, action_mask, "{PRESET}")
loss, action_mask = loss * correction.weights, correction.loss_mask
vllm_kl = masked_mean(rollout_log_probs - old_log_probs, action_mask, dim=None)""",
        run_openrlhf,
        f"`PolicyLoss`, by {GRADIENT}",
        "With `batch_num_tokens` the loss divides by the original count.",
    ),
    Lines(
        "rllm",
        "rllm",
        "https://github.com/rllm-org/rllm",
        "rllm/trainer/verl/verl_backend.py",
        'the verl backend, instead of the block `with simple_timer("rollout_correction", …)`',
        "`rllm.algorithm.rollout_correction.tis_mode=token`",
        f"""\
from rollcorr import correct

tensors = [batch.batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")]
correction = correct(*tensors, "{PRESET}")
batch.batch["rollout_is_weights"] = correction.weights
batch.batch["response_mask"] = correction.loss_mask.to(batch.batch["response_mask"].dtype)
metrics.update(correction.metrics())""",
        run_rllm,
        "the weights and the mask that the block writes into the batch, to 1e-6",
        "Alternatively `ROLLCORR_VERL=1` replaces the functions of verl that the backend calls.",
    ),
)


def record(entry: Lines, root: Path) -> dict[str, Any]:
    """Run an entry, and return its part of lines.json."""
    entry.run(root, entry)
    text = {name: value for name, value in entry._asdict().items() if name not in ("run", "folder")}
    source = hashlib.sha256((root / entry.file).read_bytes()).hexdigest()
    return {**text, "commit": commit_of(root), "sha256": source, "run": inspect.getsource(entry.run)}


def main() -> int:
    """Run every entry whose checkout is there; exit 1 if a number differs."""
    sources = Path(sys.argv[1])
    before = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    entries = {found["framework"]: found for found in before}
    code = 0
    for entry in LINES:
        root = sources / entry.folder
        if not root.is_dir():
            print(f"{entry.framework}: not run, no {root}")
            continue
        try:
            entries[entry.framework] = record(entry, root)
            print(f"{entry.framework} {entries[entry.framework]['commit']}: {entry.compared}")
        except (AssertionError, ValueError, ImportError) as error:
            print(f"{entry.framework}: {error}")
            code = 1
    order = [entries[entry.framework] for entry in LINES if entry.framework in entries]
    RESULTS.write_text(json.dumps(order, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
