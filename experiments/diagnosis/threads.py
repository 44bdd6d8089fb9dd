"""Public threads as logs: each log shows what a thread describes, and the thread's own finding is its answer.

    python experiments/diagnosis/threads.py OUTPUT [--model DIR] [--seed 0]

Written from the text of the threads alone. The author of the first seven had not seen the rules that judge them; the
last three were written later, by someone who had (`written_late`). The cause is the one that the thread established, in
the words of this project.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from live_faults import in_engine
from log_files import write_log
from series_faults import on_line
from small_model import DEFAULT_MODEL, copied, load_model, make_prompts, sample, score, train, with_adapter
from torch import nn
from torch.nn import functional

from rollcorr import SamplingSpec

ROWS = 32
TOKENS = 120


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A public thread, and the log that shows what it reports.

    Attributes:
        repository: owner and name on GitHub.
        number: of the issue or pull request.
        symptom: what was seen.
        cause: what the thread found, as a class of `expected.py`.
        write: writes the log from a model, a path and a seed.
        null_steps: first and last step that the thread's author knew to be right; None where nobody did.
        written_late: by someone who knew the rules.
    """

    repository: str
    number: int
    symptom: str
    cause: str
    write: Callable[[nn.Module, Path, int], None]
    null_steps: tuple[int, int] | None = None
    written_late: bool = False

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.repository.split('/')[-1].lower()}_{self.number}"


def _sampled(
    model: nn.Module, *, seed: int, temperature: float = 1.0, rows: int = ROWS, tokens: int = TOKENS
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Prompts, responses and the sampler's log-probs, in bfloat16."""
    generator = torch.Generator("cpu").manual_seed(seed)
    prompts = make_prompts(model, rows, generator=generator)
    answer = sample(in_engine(model, "bf16"), prompts, tokens=tokens, generator=generator, temperature=temperature)
    return prompts, answer.ids, answer.log_prob


def _raw_log_probs_of_a_tempered_sampler(model: nn.Module, path: Path, seed: int) -> None:
    # The engine samples at 0.6 and reports log-probs at 1; the trainer divides its logits by 0.6. It logs no settings.
    prompts, ids, _ = _sampled(model, seed=seed, temperature=0.6)
    raw = score(in_engine(model, "bf16"), prompts, ids)
    tempered = score(model, prompts, ids, temperature=0.6)
    write_log(path, prompt_ids=prompts, response_ids=ids, rollout_log_prob=raw, old_log_prob=tempered)


def _nucleus_against_the_whole_vocabulary(model: nn.Module, path: Path, seed: int) -> None:
    # Sampled with top-p 0.8, and the log-probs are renormalized over what survived; the trainer knows no truncation.
    prompts, ids, processed = _sampled_nucleus(model, seed=seed, top_p=0.8)
    whole = score(model, prompts, ids)
    write_log(path, prompt_ids=prompts, response_ids=ids, rollout_log_prob=processed, old_log_prob=whole)


@torch.no_grad()
def _sampled_nucleus(
    model: nn.Module, *, seed: int, top_p: float
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    from transformers import DynamicCache

    # Prompts of one length, so that this sampler needs no padding.
    generator = torch.Generator("cpu").manual_seed(seed)
    prompts = [prompt[:4] for prompt in make_prompts(model, ROWS, generator=generator)]
    token = torch.tensor(prompts, device="cpu")
    sampler, cache = in_engine(model, "bf16"), DynamicCache()
    ids: list[torch.Tensor] = []
    log_probs: list[torch.Tensor] = []
    for _ in range(TOKENS):
        logits = sampler(token, past_key_values=cache).logits[:, -1].float()
        values, order = logits.sort(dim=-1, descending=True)
        mass = functional.softmax(values, dim=-1)
        kept = mass.cumsum(-1) - mass < top_p
        values = values.masked_fill(~kept, -torch.inf)
        log_prob = torch.full_like(logits, -torch.inf).scatter(1, order, functional.log_softmax(values, dim=-1))
        token = torch.multinomial(log_prob.exp(), 1, generator=generator)
        ids.append(token)
        log_probs.append(log_prob.gather(1, token))
    return prompts, torch.cat(ids, 1).tolist(), torch.cat(log_probs, 1).tolist()


def _noise_times_length(model: nn.Module, path: Path, seed: int) -> None:
    # Equal weights, two engines: 0.01 to 0.02 nats per token, which a product over the response makes large.
    prompts, ids, rollout = _sampled(model, seed=seed, tokens=200)
    train_log_prob = score(model, prompts, ids)
    write_log(path, prompt_ids=prompts, response_ids=ids, rollout_log_prob=rollout, old_log_prob=train_log_prob)


def _sampler_rolled_back(model: nn.Module, path: Path, seed: int) -> None:
    # In sync for two steps of warm-up; from then on every generation is by the weights of the checkpoint on the disk.
    generator = torch.Generator("cpu").manual_seed(seed)
    *_, later = train(copied(model).requires_grad_(True), 4, generator=generator, learning_rate=1e-3)
    places = [0.0, 0.0, *(0.25 + 0.04 * step for step in range(18))]
    _write_steps(path, model, [on_line(model, later, place) for place in places], seed=seed)


def _adapter_that_never_arrives(model: nn.Module, path: Path, seed: int) -> None:
    # Every sync carries the base weights alone, so the sampler stays at the start while the adapter is trained.
    adapted, parameters, _ = with_adapter(model, rank=4, seed=seed)
    for parameter in parameters:
        parameter.requires_grad_(True)
    generator = torch.Generator("cpu").manual_seed(seed)
    states = train(adapted, 15, generator=generator, parameters=parameters, learning_rate=1e-3)
    _write_steps(path, model, [copied(state) for state in states], seed=seed)


def _write_steps(path: Path, sampler: nn.Module, trainers: list[nn.Module], *, seed: int) -> None:
    """One step per trainer, each with rows of its own; the sampler says that it has the weights of the step."""
    prompts, ids, rollout, train_log_prob, steps = [], [], [], [], []
    for step, trainer in enumerate(trainers):
        its_prompts, its_ids, its_rollout = _sampled(sampler, seed=seed + step, rows=16, tokens=80)
        prompts += its_prompts
        ids += its_ids
        rollout += its_rollout
        train_log_prob += score(trainer, its_prompts, its_ids)
        steps += [step] * len(its_ids)
    write_log(
        path,
        prompt_ids=prompts,
        response_ids=ids,
        rollout_log_prob=rollout,
        old_log_prob=train_log_prob,
        sampling=SamplingSpec(engine="vllm"),
        steps=steps,
        versions=steps,
    )


def _responses_of_other_prompts(model: nn.Module, path: Path, seed: int) -> None:
    # An index of the data is off, so the trainer scores responses after the prompts of other rows: more of them at each
    # step, although the learning rate is 0. That the share grows is how this fixture shows a difference that grows.
    columns: list[list] = [[], [], [], [], []]
    for step in range(20):
        prompts, ids, rollout = _sampled(model, seed=seed + step, rows=16, tokens=80)
        wrong = round(16 * step / 19)
        assigned = [*prompts[1:wrong], *prompts[: min(wrong, 1)], *prompts[wrong:]]
        scored = score(model, assigned, ids)
        for column, values in zip(columns, (assigned, ids, rollout, scored, [step] * 16), strict=True):
            column += values
    prompts, ids, rollout, scored, steps = columns
    write_log(
        path,
        prompt_ids=prompts,
        response_ids=ids,
        rollout_log_prob=rollout,
        old_log_prob=scored,
        steps=steps,
    )


def _cache_that_outlives_a_sync(model: nn.Module, path: Path, seed: int) -> None:
    # Three steps of an asynchronous run. The weights change between the second and the third; the engine then samples
    # with the new weights after prompts whose keys and values are those of the old ones. The first two steps are right.
    generator = torch.Generator("cpu").manual_seed(seed)
    *_, later = train(copied(model).requires_grad_(True), 8, generator=generator, learning_rate=1e-3)
    columns: list[list] = [[], [], [], [], []]
    for step, weights in ((1, model), (2, model), (3, copied(later))):
        prompts = make_prompts(model, 48, generator=generator)
        cached = in_engine(model, "bf16") if weights is not model else None
        drawn = sample(in_engine(weights, "bf16"), prompts, tokens=100, generator=generator, cache_model=cached)
        scored = score(weights, prompts, drawn.ids)
        for column, values in zip(columns, (prompts, drawn.ids, drawn.log_prob, scored, [step] * 48), strict=True):
            column += values
    prompts, ids, rollout, scored, steps = columns
    write_log(
        path,
        prompt_ids=prompts,
        response_ids=ids,
        rollout_log_prob=rollout,
        old_log_prob=scored,
        sampling=SamplingSpec(engine="vllm"),
        steps=steps,
        versions=steps,
    )


def _text_tokenized_again(model: nn.Module, path: Path, seed: int) -> None:
    # The ids are those of the decoded text. Every row loses its last id, and in one of fifty rows two tokens become
    # one: from there on each id stands beside the log-prob of the token before it. The trainer scores what it has.
    prompts, ids, rollout = _sampled(model, seed=seed, rows=150)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    again = []
    for row, tokens in enumerate(ids):
        if row % 50 == 7 and len(tokens) > 8:
            at = int(torch.randint(2, max(3, len(tokens) // 2), (1,), generator=generator, device="cpu"))
            again.append([*tokens[:at], *tokens[at + 1 : -1]])
        else:
            again.append(tokens[: max(1, len(tokens) - 1)])
    write_log(
        path,
        prompt_ids=prompts,
        response_ids=again,
        rollout_log_prob=[row[: len(tokens)] for row, tokens in zip(rollout, again, strict=True)],
        old_log_prob=score(model, prompts, again),
    )


def _one_position_to_the_left(model: nn.Module, path: Path, seed: int) -> None:
    # The trainer's log-prob of a token stands where that of the token before it belongs.
    prompts, ids, rollout = _sampled(model, seed=seed)
    own = score(model, prompts, ids)
    shifted = [[*row[1:], row[-1]] for row in own]
    write_log(path, prompt_ids=prompts, response_ids=ids, rollout_log_prob=rollout, old_log_prob=shifted)


def _missing_values_are_zero(model: nn.Module, path: Path, seed: int) -> None:
    # The engine's list is too short for some responses, and lacks single tokens of others: both stay at 0.0.
    prompts, ids, rollout = _sampled(model, seed=seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    filled = []
    for row in rollout:
        cut = len(row) - int(torch.randint(0, 30, (1,), generator=generator, device="cpu"))
        missing = torch.rand(len(row), generator=generator, device="cpu") < 0.03
        filled.append([0.0 if at >= cut or missing[at] else value for at, value in enumerate(row)])
    write_log(
        path, prompt_ids=prompts, response_ids=ids, rollout_log_prob=filled, old_log_prob=score(model, prompts, ids)
    )


THREADS = (
    Thread(
        repository="huggingface/trl",
        number=4159,
        symptom="at temperature 0.6 the ratio of the first tokens sits at its cap of 2; at temperature 1 it is near 1",
        cause="temperature",
        write=_raw_log_probs_of_a_tempered_sampler,
    ),
    Thread(
        repository="huggingface/trl",
        number=6789,
        symptom="with top-p below 1 the ratio is too small by the kept mass at every token",
        cause="truncation",
        write=_nucleus_against_the_whole_vocabulary,
    ),
    Thread(
        repository="huggingface/trl",
        number=4772,
        symptom="the ratio of whole responses leaves its cap although the log-probs differ by a hundredth per token",
        cause="noise",
        write=_noise_times_length,
    ),
    Thread(
        repository="huggingface/trl",
        number=5312,
        symptom="the mean difference is 0.01 to 0.02 in two steps of warm-up and ten times that from the third on",
        cause="weights",
        write=_sampler_rolled_back,
    ),
    Thread(
        repository="modelscope/ms-swift",
        number=8196,
        symptom="the mean weight starts at 3; the trainer's log-probs are one position to the left of the sampler's",
        cause="shift",
        write=_one_position_to_the_left,
    ),
    Thread(
        repository="NVIDIA-NeMo/RL",
        number=4218,
        symptom="positions that the engine did not return are 0.0, and single tokens dominate the mean ratio",
        cause="placeholder",
        write=_missing_values_are_zero,
    ),
    Thread(
        repository="verl-project/verl",
        number=7495,
        symptom="the KL rises 36-fold over the run whatever the interval of syncs; no sync carries the adapter",
        cause="weights",
        write=_adapter_that_never_arrives,
    ),
    Thread(
        repository="allenai/open-instruct",
        number=1473,
        symptom="the mean difference grows from step to step, also with a learning rate of 0; responses had the "
        "prompts of other rows",
        cause="template",
        write=_responses_of_other_prompts,
        written_late=True,
    ),
    Thread(
        repository="NovaSky-AI/SkyRL",
        number=2246,
        symptom="the batch after a weight sync differs by 0.87 nats in the mean; the prefix cache was not cleared",
        cause="prefix",
        write=_cache_that_outlives_a_sync,
        null_steps=(1, 2),
        written_late=True,
    ),
    Thread(
        repository="eval-protocol/python-sdk",
        number=457,
        symptom="rare rows differ by tens of nats; ids came from the decoded text, log-probs from what was sampled",
        cause="shift",
        write=_text_tokenized_again,
        written_late=True,
    ),
)


def write_threads(folder: Path, model: nn.Module, *, seed: int) -> dict[str, Path]:
    """Write the log of every thread; its path by the thread's name."""
    paths = {}
    for place, thread in enumerate(THREADS):
        paths[thread.name] = folder / f"{thread.name}.parquet"
        thread.write(model, paths[thread.name], seed * 1_000 + 100 * place)
    return paths


def main() -> None:
    """Write the logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of a causal model of transformers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, path in write_threads(options.output, load_model(options.model), seed=options.seed).items():
        sys.stdout.write(f"{name}: {path}\n")


if __name__ == "__main__":
    main()
