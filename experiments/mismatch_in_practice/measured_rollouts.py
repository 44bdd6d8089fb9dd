"""Fixed rollouts of real engines, and the trainer's log-probs of their tokens.

An engine samples streams that do not end: the token that would end a response is a token like any other. So all streams
have the same length, and a response of T tokens is a window of one; the tokens before the window are its prompt.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.core import KeptSets
from rollcorr.core.logprobs import kept_log_prob
from rollcorr.core.sampling import sequential_support, top_k_support, top_p_support, with_sampled
from rollcorr.engines import (
    CTranslate2Engine,
    Engine,
    GenerationSettings,
    Rollout,
    TokenBatch,
    TransformersEngine,
    VllmEngine,
    VllmOptions,
)
from rollcorr.engines.response_scoring import response_logits
from rollcorr.train import load_config, train
from rollcorr.train.grpo import ArithmeticTask, Policy, load_policy

DEMO = Path("examples") / "train" / "demo.yaml"
MODES = ("raw", "processed", "replayed")
ROWS_AT_A_TIME = 4
LONGEST = 4096
"""Positions that the copy of the policy claims to have; rotary positions need no table."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What an engine sampled, (B, T), and what it says of it.

    Attributes:
        tokens: prompts and streams.
        raw: log μ at temperature 1 over the whole vocabulary; None if the engine does not tell.
        processed: log μ of what was sampled: at the temperature, over the kept tokens. None as above.
        kept: the kept sets, one for each entry of a (B, T) tensor; None if nothing was cut or the engine does not tell.
        temperature: of the sampling, as are the next two.
        top_p: 1 for none.
        top_k: -1 for none.
        engine: the engine's name and version.
        digest: SHA-256 of tokens and log-probs.
    """

    tokens: TokenBatch
    raw: Tensor | None
    processed: Tensor | None
    kept: KeptSets | None
    temperature: float
    top_p: float
    top_k: int
    engine: str
    digest: str

    def cuts(self) -> list[Callable[[Tensor], Tensor]]:
        """Top-k, then top-p, as transformers and vLLM cut."""
        return [lambda logits: top_k_support(logits, self.top_k), lambda logits: top_p_support(logits, self.top_p)]


def policy_at(path: str) -> Policy:
    """The policy of the study, with room for the longest stream."""
    policy = load_policy(path)
    policy.model.config.max_position_embeddings = max(LONGEST, policy.model.config.max_position_embeddings)
    policy.model.eval()
    return policy


def unavailable(engine: Mapping[str, Any]) -> str | None:
    """Why an engine cannot run here; None if it can."""
    if engine["kind"] == "vllm":
        if not Path(engine["python"]).exists():
            return f"vLLM is not installed: {engine['python']} does not exist; `make test-vllm` installs it"
        return None
    if engine["kind"] == "ctranslate2":
        try:
            import ctranslate2
        except ImportError:
            return "ctranslate2 is not installed: pip install 'rollcorr[ctranslate2]'"
        usable = ctranslate2.get_supported_compute_types("cpu")
        if engine["compute_type"] not in usable:
            return f"CTranslate2 has no {engine['compute_type']} on this processor (int16 needs Intel's)"
    return None


def record(
    path: str, engine: Mapping[str, Any], sampling: Mapping[str, Any], *, rows: int, tokens: int, seed: int
) -> Recording:
    """Sample `rows` streams of `tokens` tokens."""
    policy = policy_at(path)
    problems = ArithmeticTask(max_operand=99).problems(rows, seed=seed, step=0)
    prompts = [policy.encode(problem.prompt) for problem in problems]

    reported = "raw" if engine["kind"] == "ctranslate2" else "processed"
    settings = GenerationSettings(
        sampling=SamplingSpec(logprobs=reported, **sampling),
        max_new_tokens=tokens,
        eos_token_id=policy.pad_token_id,  # never sampled in practice, so that streams do not end
        pad_token_id=policy.pad_token_id,
    )
    sampler = _engine(rounded(policy.model, engine.get("bits")), settings, engine)
    rollout = sampler.generate(prompts, seed=seed)
    raw, processed = _both_kinds(sampler, rollout)

    kept = None if rollout.kept is None else rollout.kept.padded(rollout.tokens.response_mask)
    named = f"{rollout.sampling.engine} {rollout.sampling.engine_version}"
    digest = hashlib.sha256()
    for tensor in (rollout.tokens.response_ids, raw, processed):
        if tensor is not None:
            digest.update(tensor.contiguous().numpy().tobytes())
    return Recording(
        tokens=rollout.tokens,
        raw=raw,
        processed=processed,
        kept=kept,
        temperature=sampling["temperature"],
        top_p=sampling.get("top_p", 1.0),
        top_k=sampling.get("top_k", -1),
        engine=named,
        digest=digest.hexdigest(),
    )


def recorded(path: Path, *arguments: Any, **settings: Any) -> Recording:  # noqa: ANN401 (those of `record`)
    """The recording in a file, or a new one that is then kept there."""
    if path.exists():
        return torch.load(path, weights_only=False)  # type: ignore[no-any-return]
    recording = record(*arguments, **settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    torch.save(recording, partial)
    partial.replace(path)
    return recording


@torch.no_grad()
def train_log_probs(model: nn.Module, recording: Recording) -> dict[str, Tensor]:
    """log π of the recorded tokens in the trainer, (B, T): over the whole vocabulary and, if there are any, kept sets.

    Returns:
        "full" and "kept" at the sampling temperature; "outside": the sampled token is not in the set that the trainer
        would keep by itself (bool). The last two only with kept sets.
    """
    full, kept, outside = [], [], []
    for rows, logits in logits_in_chunks(model, recording.tokens):
        ids = recording.tokens.response_ids[rows]
        scaled = (logits / recording.temperature).log_softmax(-1)
        full.append(scaled.gather(-1, ids[..., None]).squeeze(-1))
        if recording.kept is not None:
            width = ids.shape[1]
            sets = recording.kept.select(torch.arange(int(rows[0]) * width, (int(rows[-1]) + 1) * width))
            kept.append(kept_log_prob(logits, ids, sets, temperature=recording.temperature).log_prob)
            support = sequential_support(logits / recording.temperature, recording.cuts())
            outside.append(with_sampled(support, ids)[1])
    found = {"full": torch.cat(full)}
    return found | ({"kept": torch.cat(kept), "outside": torch.cat(outside)} if kept else {})


def sides(recording: Recording, scores: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(mode, log π, log μ) of every mode that this recording has.

    raw: the engine reports what it knew before temperature and cut; the trainer divides by the temperature.
    processed: the engine reports what it sampled from; the trainer divides by the temperature, over all tokens.
    replayed: the trainer also renormalizes over the engine's kept sets.
    """
    if recording.raw is not None:
        yield "raw", scores["full"], recording.raw
    if recording.processed is not None:
        yield "processed", scores["full"], recording.processed
        if "kept" in scores:
            yield "replayed", scores["kept"], recording.processed


def logits_in_chunks(model: nn.Module, tokens: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and the logits of their streams, float32, a few rows at a time."""
    for rows in torch.arange(len(tokens)).split(ROWS_AT_A_TIME):
        yield rows, response_logits(model, tokens.select(rows)).float()


def rounded(model: nn.Module, bits: int | None) -> nn.Module:
    """A copy whose weight matrices are rounded to 2^bits − 1 levels per row; None: the model itself."""
    if bits is None:
        return model
    twin = copy.deepcopy(model)
    levels = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() == 2:
                step = parameter.abs().amax(1, keepdim=True).clamp(min=1e-12) / levels
                parameter.copy_((parameter / step).round() * step)
    return twin


def policies_ahead(path: str, stale: tuple[int, ...], updates: Mapping[str, Any], seed: int, folder: Path) -> None:
    """Train the policy as the demo does, and keep it after every number of updates that is asked for."""
    last = max(stale)
    if last == 0 or policy_folder(folder, last).is_dir():
        return
    config = load_config(
        DEMO,
        (
            f"run_dir={folder}",
            f"seed={seed}",
            f"model.path={path}",
            f"steps={last // 2}",  # two updates for each batch
            "checkpoint={every: 1, keep: 1000}",
            f"rollout.prompts_per_step={updates['prompts_per_step']}",
            f"optim.mini_batch_size={updates['prompts_per_step'] * 8 // 2}",
            f"optim.lr={updates['lr']}",
            "log={evaluate: 0, rollouts: false, tensorboard: false}",
        ),
    )
    train(config)


def policy_folder(folder: Path, updates: int) -> Path:
    """Where the policy after so many updates is."""
    return folder / "checkpoints" / f"step_{updates // 2:06d}"


def described(recording: Recording) -> dict[str, Any]:
    """What a result tells of its recording."""
    return {"engine_version": recording.engine, "sha256": recording.digest}


def _engine(model: nn.Module, settings: GenerationSettings, engine: Mapping[str, Any]) -> Engine:
    if engine["kind"] == "transformers":
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of every call beyond 2,048 positions
        return TransformersEngine(model, settings, dtype=getattr(torch, engine["dtype"]))
    if engine["kind"] == "ctranslate2":
        threads = torch.get_num_threads()
        return CTranslate2Engine(
            model, settings, compute_type=engine["compute_type"], batch_size=ROWS_AT_A_TIME * 4, threads=threads
        )
    # A share of the memory, so that other programs may run beside it.
    limits = {"max_model_len": LONGEST, "gpu_memory_utilization": 0.4}
    options = VllmOptions(python=engine["python"], engine_args=limits, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    return VllmEngine(model, settings, options)


def _both_kinds(engine: Engine, rollout: Rollout) -> tuple[Tensor | None, Tensor | None]:
    """Raw and processed log-probs, as far as the engine knows them."""
    sampling = rollout.sampling
    if sampling.logprobs == "processed":
        untouched = sampling.temperature == 1 and not sampling.truncates
        return rollout.rollout_log_prob if untouched else rollout.raw_log_prob, rollout.rollout_log_prob

    # An engine with raw log-probs alone can score its tokens again at the temperature, but not over what it kept.
    raw = rollout.rollout_log_prob
    if sampling.truncates:
        return raw, None
    return raw, raw if sampling.temperature == 1 else engine.score(rollout.tokens)
