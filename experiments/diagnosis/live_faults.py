"""Rollout logs with live faults: a small real model samples with one thing wrong, and a float32 trainer scores it.

    python experiments/diagnosis/live_faults.py OUTPUT [--engine vllm] [--logs 10] [--seed 0] [--only stale_1,int4]

OUTPUT/<fault>/<number>.parquet are the logs, OUTPUT/null/*.parquet a log per engine from other prompts without any
fault, and OUTPUT/index.csv says what each log holds. Equal arguments give equal logs. The sampler is the model itself,
token by token; with `--engine vllm` it is vLLM on the CPU, in whose environment this must run (`vllm_sampler.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from log_files import LogEntry, mean_k3, read_index, write_index, write_log
from small_model import (
    DEFAULT_MODEL,
    LEARNING_RATE,
    Responses,
    copied,
    dropout,
    first_token,
    in_float8,
    load_model,
    make_prompts,
    quantized,
    sample,
    score,
    stop_tokens,
    train,
    with_adapter,
    with_rope_theta,
)
from torch import nn
from vllm_sampler import DTYPES, vllm_sampler

from rollcorr import SamplingSpec

UPDATES = 20
"""Policy-gradient updates of a run; its snapshots are what is stale."""

NULL_ROWS = 64
PROGRAMS = {"ctranslate2": "ctranslate2"} | dict.fromkeys(DTYPES, "vllm")
"""Engine → the name that its logs record, where that is not transformers."""

NULL_ENGINES: Mapping[str, tuple[str, ...]] = {
    "model": ("fp32", "bf16", "int8", "ctranslate2"),
    "vllm": ("vllm_fp32", "vllm_bf16"),
}
"""What samples → the engines of its logs."""
TEMPERATURES = (1.0, 0.7)

ENGINES = ("bf16", "bf16", "int8", "bf16", "fp32", "bf16", "int8", "bf16", "bf16", "fp32")
"""Engine of the log with this number. Faults that are smaller than the noise of int8 use `FINE_ENGINES`."""
FINE_ENGINES = ("bf16", "bf16", "fp32", "bf16", "fp32", "bf16", "bf16", "bf16", "bf16", "fp32")

ROWS = (16, 32, 24, 48, 64)
TOKENS = (200, 160, 200, 120, 100)


@dataclass(frozen=True)
class Case:
    """One sampler, and the trainer that scores what it drew.

    Attributes:
        sampler: the weights that sample, in the engine's precision.
        trainer: the float32 weights that score.
        fed: what the sampler is fed instead of the prompt, as a function of it.
        options: of `sample`.
        scoring: of `score`.
        around: a context in which the trainer scores.
        longest_prompt: tokens.
        lag: updates between the two sides, for the recorded versions.
        detail: what the index says of it.
    """

    sampler: nn.Module
    trainer: nn.Module
    fed: Callable[[list[int]], list[int]] = list
    options: Mapping[str, object] = field(default_factory=dict)
    scoring: Mapping[str, object] = field(default_factory=dict)
    around: Callable[[], object] = nullcontext
    longest_prompt: int = 40
    lag: int = 0
    detail: str = ""


class Run:
    """A short training run: its snapshots, and a second run that trains an adapter only."""

    def __init__(self, model: nn.Module, *, seed: int, learning_rate: float = LEARNING_RATE) -> None:
        self.seed = seed
        generator = torch.Generator("cpu").manual_seed(seed)
        trained = copied(model).requires_grad_(True)
        states = train(trained, UPDATES, generator=generator, learning_rate=learning_rate)
        self.snapshots = [copied(state) for state in states]
        self.start = self.snapshots[0]

    @cached_property
    def adapted(self) -> tuple[nn.Module, nn.Module]:
        """The model with a trained adapter, and the same model with the adapter set to zero."""
        model, parameters, zero = with_adapter(self.start, rank=4, seed=self.seed)
        for parameter in parameters:
            parameter.requires_grad_(True)
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        for _ in train(model, 8, generator=generator, parameters=parameters, learning_rate=3e-3):
            pass
        trained = copied(model)
        zero()
        return trained, copied(model)


def in_engine(model: nn.Module, engine: str) -> nn.Module:
    """The weights as an engine holds them; vLLM rounds them itself."""
    if engine == "bf16":
        return copied(model).to(torch.bfloat16)
    if engine == "int8":
        return quantized(model, bits=8, activations=True)
    return copied(model)


def _stale(updates: int) -> Callable[[Run, int, str], Case]:
    def case(run: Run, number: int, engine: str) -> Case:
        # Different stages of the run: the update that was missed is another one each time.
        now = UPDATES - number % 4
        sampler = in_engine(run.snapshots[now - updates], engine)
        return Case(sampler, run.snapshots[now], lag=updates, detail=f"{updates} updates before {now}")

    return case


def _stale_head(run: Run, number: int, engine: str) -> Case:
    sampler = copied(run.snapshots[-1])
    old = run.snapshots[-1 - (8, 16)[number % 2]]
    sampler.get_output_embeddings().weight.copy_(old.get_output_embeddings().weight)
    return Case(in_engine(sampler, engine), run.snapshots[-1], detail=f"head {(8, 16)[number % 2]} updates old")


def _unsynced_layer(run: Run, number: int, engine: str) -> Case:
    sampler = copied(run.snapshots[-1])
    layers = sampler.model.layers
    layer = number % len(layers)
    layers[layer].load_state_dict(run.start.model.layers[layer].state_dict())
    return Case(in_engine(sampler, engine), run.snapshots[-1], detail=f"layer {layer}")


def _adapter_zeroed(run: Run, number: int, engine: str) -> Case:
    trained, zeroed = run.adapted
    return Case(in_engine(zeroed, engine), trained, detail="rank 4 on q and v")


def _no_bos(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    opening = first_token(model)
    fed = lambda prompt: prompt[1:] if prompt[0] == opening else prompt  # noqa: E731 (a case is one expression)
    return Case(in_engine(model, engine), model, fed=fed)


def _rope_theta(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    theta = (500_000.0, 20_000.0)[number % 2]
    return Case(in_engine(with_rope_theta(model, theta), engine), model, detail=f"theta {theta:g}")


def _prefix_cache(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    old = in_engine(run.snapshots[-17], engine)

    # vLLM caches whole blocks; the prompts of a real run have several.
    longest = 120 if engine in DTYPES else Case.longest_prompt
    detail = "prompt cache 16 updates old"
    return Case(in_engine(model, engine), model, options={"cache_model": old}, longest_prompt=longest, detail=detail)


def _left_pads(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    at_sampler = number % 2 == 0 and engine not in DTYPES  # vLLM does not pad
    side = {"pads_unmasked": True}
    return Case(
        in_engine(model, engine),
        model,
        options=side if at_sampler else {},
        scoring={} if at_sampler else side,
        detail="sampler" if at_sampler else "trainer",
    )


def _dropout(run: Run, number: int, engine: str) -> Case:
    model = copied(run.snapshots[-1])
    attention, residual = ((0.1, 0.0), (0.0, 0.02), (0.05, 0.02))[number % 3]
    around = lambda: dropout(model, attention=attention, residual=residual, seed=number)  # noqa: E731
    return Case(in_engine(model, engine), model, around=around, detail=f"attention {attention}, residual {residual}")


def _int4(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    sampler = quantized(model, bits=4, group=32).to(torch.bfloat16)
    return Case(sampler, model, detail="weights, groups of 32")


def _quantized(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    activations = number % 2 == 0 and engine not in DTYPES
    sampler = in_float8(model, activations=activations).to(torch.bfloat16)
    return Case(sampler, model, detail="float8 weights" + " and inputs" * activations)


def _other_prompt(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    generator = torch.Generator("cpu").manual_seed(run.seed + number)
    extra = [t for t in make_prompts(model, 1, generator=generator)[0][1:9] if t not in stop_tokens(model)]
    if number % 2 == 0:
        return Case(in_engine(model, engine), model, fed=lambda p: [p[0], *extra, *p[1:]], detail="a text in front")
    return Case(in_engine(model, engine), model, fed=lambda p: [*p, *extra[:2]], detail="a suffix behind")


def _healthy(run: Run, number: int, engine: str) -> Case:
    model = run.snapshots[-1]
    return Case(in_engine(model, engine), model)


FAULTS: Mapping[str, Callable[[Run, int, str], Case]] = {
    "stale_1": _stale(1),
    "stale_4": _stale(4),
    "stale_16": _stale(16),
    "stale_head": _stale_head,
    "unsynced_layer": _unsynced_layer,
    "adapter_zeroed": _adapter_zeroed,
    "no_bos": _no_bos,
    "rope_theta": _rope_theta,
    "prefix_cache": _prefix_cache,
    "left_pads": _left_pads,
    "dropout": _dropout,
    "int4": _int4,
    "other_prompt": _other_prompt,
    "quantized": _quantized,
    "healthy_fp32": _healthy,
    "healthy_bf16": _healthy,
    "healthy_int8": _healthy,
    "healthy_ctranslate2": _healthy,
    "healthy_vllm_fp32": _healthy,
    "healthy_vllm_bf16": _healthy,
}
FIXED_ENGINES = {"int4": "bf16", "quantized": "bf16"}
FINE = ("stale_1", "stale_head", "unsynced_layer", "prefix_cache")


def faults_of(sampler: str) -> tuple[str, ...]:
    """The faults, and the controls of a sampler's engines."""
    controls = {f"healthy_{engine}" for engine in NULL_ENGINES[sampler]}
    return tuple(fault for fault in FAULTS if not fault.startswith("healthy_") or fault in controls)


def engine_of(sampler: str, fault: str, number: int) -> str:
    """The engine of one log."""
    if fault.startswith("healthy_"):
        return fault.removeprefix("healthy_")
    engines = FINE_ENGINES if fault in FINE else ENGINES
    engine = FIXED_ENGINES.get(fault, engines[number % len(engines)])
    if sampler == "vllm":
        return "vllm_fp32" if engine == "fp32" else "vllm_bf16"
    return engine


@dataclass(frozen=True)
class Drawn:
    """The columns of one log."""

    prompts: list[list[int]]
    ids: list[list[int]]
    rollout: list[list[float]]
    train: list[list[float]]


def draw(case: Case, prompts: list[list[int]], *, engine: str, temperature: float, tokens: int, seed: int) -> Drawn:
    """Sample with one side and score with the other."""
    fed = [case.fed(prompt) for prompt in prompts]
    how = {"tokens": tokens, "temperature": temperature, **case.options}
    if engine == "ctranslate2":
        responses = _ctranslate2(case.sampler, fed, tokens=tokens, seed=seed)
    elif engine in DTYPES:
        responses = vllm_sampler().sample(case.sampler, fed, engine=engine, seed=seed, **how)
    else:
        responses = sample(case.sampler, fed, generator=torch.Generator("cpu").manual_seed(seed), **how)
    with case.around():
        train_log_prob = score(case.trainer, prompts, responses.ids, temperature=temperature, **case.scoring)
    return Drawn(prompts, responses.ids, responses.log_prob, train_log_prob)


def _ctranslate2(model: nn.Module, prompts: list[list[int]], *, tokens: int, seed: int) -> Responses:
    """Responses and log-probs of CTranslate2 with int8 weights, at temperature 1."""
    from rollcorr.engines import CTranslate2Engine, GenerationSettings

    settings = GenerationSettings(
        sampling=SamplingSpec(), max_new_tokens=tokens, eos_token_id=stop_tokens(model)[-1], pad_token_id=0
    )
    rollout = CTranslate2Engine(model, settings, compute_type="int8", threads=1).generate(prompts, seed=seed)
    mask = rollout.tokens.response_mask.bool()
    pairs = zip(rollout.tokens.response_ids, rollout.rollout_log_prob, mask, strict=True)
    rows = [(ids[kept].tolist(), log_prob[kept].tolist()) for ids, log_prob, kept in pairs]
    return Responses([ids for ids, _ in rows], [log_prob for _, log_prob in rows])


def write_drawn(path: Path, drawn: Drawn, *, engine: str, temperature: float, step: int, version: int) -> None:
    """Write one log with its metadata."""
    sampling = SamplingSpec(
        temperature=temperature,
        logprobs="raw" if temperature == 1.0 else "processed",
        engine=PROGRAMS.get(engine, "transformers"),
    )
    rows = len(drawn.ids)
    write_log(
        path,
        prompt_ids=drawn.prompts,
        response_ids=drawn.ids,
        rollout_log_prob=drawn.rollout,
        old_log_prob=drawn.train,
        sampling=sampling,
        steps=[step] * rows,
        versions=[version] * rows,
    )


def null_name(engine: str, temperature: float) -> str:
    """Where the null log of an engine lies."""
    return f"null/{engine}_t{temperature}.parquet"


def write_nulls(folder: Path, model: nn.Module, *, sampler: str, seed: int) -> Iterator[LogEntry]:
    """One log per engine and temperature, of the start's weights, from prompts that no other log uses."""
    for engine in NULL_ENGINES[sampler]:
        for temperature in TEMPERATURES:
            if engine == "ctranslate2" and temperature != 1.0:
                continue  # its log-probs are raw, whatever it samples with
            generator = torch.Generator("cpu").manual_seed(seed + 900_001)
            prompts = make_prompts(model, NULL_ROWS, generator=generator)
            case = Case(in_engine(model, engine), model)
            drawn = draw(case, prompts, engine=engine, temperature=temperature, tokens=160, seed=seed + 900_002)
            name = null_name(engine, temperature)
            write_drawn(folder / name, drawn, engine=engine, temperature=temperature, step=0, version=0)
            yield _entry(name, "null", drawn, engine=engine, temperature=temperature, null="", null_k3=math.nan)


def _entry(
    path: str,
    fault: str,
    drawn: Drawn,
    *,
    engine: str,
    temperature: float,
    null: str,
    null_k3: float,
    detail: str = "",
) -> LogEntry:
    return LogEntry(
        path=path,
        fault=fault,
        engine=engine,
        temperature=temperature,
        null=null,
        rows=len(drawn.ids),
        tokens=sum(map(len, drawn.ids)),
        k3=mean_k3(drawn.rollout, drawn.train),
        null_k3=null_k3,
        detail="; ".join(filter(None, (detail, f"{ids_in_effect(drawn.ids):.0f} ids in effect"))),
    )


def ids_in_effect(responses: Sequence[Sequence[int]]) -> float:
    """(Σ n)² / Σ n² over the counts n of the ids: a run that has collapsed repeats a few of them."""
    counts = Counter(token for ids in responses for token in ids).values()
    return sum(counts) ** 2 / max(1, sum(count**2 for count in counts))


def write_fault(
    folder: Path, run: Run, fault: str, number: int, nulls: Mapping[str, LogEntry], *, sampler: str
) -> LogEntry:
    """Write one log of a fault."""
    engine = engine_of(sampler, fault, number)
    temperature = 0.7 if number % 5 == 3 and engine != "ctranslate2" else 1.0
    case = FAULTS[fault](run, number, engine)

    seed = run.seed * 1_000 + 17 * number + 7 * list(FAULTS).index(fault)
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = ROWS[number % len(ROWS)]
    prompts = make_prompts(run.start, rows, generator=generator, longest=case.longest_prompt)
    tokens = TOKENS[number % len(TOKENS)]
    drawn = draw(case, prompts, engine=engine, temperature=temperature, tokens=tokens, seed=seed + 1)

    # Most engines that miss an update do not know it and report the version that they were told of.
    told = UPDATES if number % 3 else UPDATES - case.lag
    name = f"{fault}/{number}.parquet"
    write_drawn(folder / name, drawn, engine=engine, temperature=temperature, step=UPDATES, version=told)
    null = null_name(engine, temperature)
    detail = case.detail + (f"; logged version {told}" if case.lag else "")
    return _entry(
        name,
        fault,
        drawn,
        engine=engine,
        temperature=temperature,
        null=null,
        null_k3=nulls[null].k3,
        detail=detail,
    )


def write_logs(
    folder: Path,
    model: nn.Module,
    *,
    logs: int,
    seed: int,
    only: Sequence[str] = (),
    first: int = 0,
    learning_rate: float = LEARNING_RATE,
    sampler: str = "model",
) -> list[LogEntry]:
    """Write the nulls, then `logs` logs of every fault; the index grows with each."""
    folder.mkdir(parents=True, exist_ok=True)
    nulls = {entry.path: entry for entry in read_index(folder) if entry.fault == "null"}
    if not nulls:
        nulls = {entry.path: entry for entry in write_nulls(folder, model, sampler=sampler, seed=seed)}
        write_index(folder, list(nulls.values()))

    run, entries = Run(model, seed=seed, learning_rate=learning_rate), []
    for fault in only or faults_of(sampler):
        for number in range(first, first + logs):
            entries.append(write_fault(folder, run, fault, number, nulls, sampler=sampler))
        write_index(folder, entries)
    return entries


def main() -> None:
    """Write the logs that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--engine", choices=tuple(NULL_ENGINES), default="model", help="what samples")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of a causal model of transformers")
    parser.add_argument("--logs", type=int, default=10, help="logs of each fault")
    parser.add_argument("--first", type=int, default=0, help="number of the first log")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, the draws and the training run")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="of the updates that are missed")
    parser.add_argument("--only", default="", help="faults, separated by commas")
    options = parser.parse_args()

    torch.set_num_threads(1)
    started = time.perf_counter()
    only = [name for name in options.only.split(",") if name]
    entries = write_logs(
        options.output,
        load_model(options.model),
        logs=options.logs,
        seed=options.seed,
        only=only,
        first=options.first,
        learning_rate=options.learning_rate,
        sampler=options.engine,
    )
    for entry in entries:
        sys.stdout.write(f"{entry.path}  {entry.engine} T={entry.temperature}  k3 {entry.k3:.2e} ({entry.detail})\n")
    sys.stdout.write(f"{len(entries)} logs in {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
