"""docs/background/performance.md, from the results that benchmarks/correction.py --save has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_page import gpu_section

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
VERL, COPY = "verl 0.9.1", "copy"
QUIET = 0.5  # load average below which the machine was ours
MEANING = {
    VERL: "verl's helper, on the padded tensors",
    COPY: "14 bytes per token, 7 read and 7 written",
    "cpu, out=, metrics not read": "compiled C, buffers reused; statistics stay tensors",
    "cpu, out=": "compiled C, buffers reused",
    "cpu, fresh outputs": "compiled C, new output tensors",
    "cpu, metrics only": "the preset `disabled`: no weights",
    "cpu, eleven criteria, out=": "every rejection criterion at once",
    "cpu, histograms and the worst, out=": "`detail=True`, which reads the batch twice",
    "torch, out=": "eager torch, buffers reused",
    "torch, fresh outputs": "eager torch, new output tensors",
    "torch, eleven criteria, out=": "every rejection criterion at once",
    "torch.compile, fresh outputs": "the torch path as one graph of inductor",
}
TARGETS = (  # (contender, compared with, at least or at most, limit)
    ("cpu, out=", VERL, "at least", 100.0),
    ("cpu, fresh outputs", VERL, "at least", 50.0),
    ("cpu, out=", COPY, "at most", 1.6),
    ("cpu, eleven criteria, out=", COPY, "at most", 2.3),
    ("cpu, histograms and the worst, out=", VERL, "at least", 50.0),
    ("torch, out=", VERL, "at least", 12.0),
)

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
Seconds = dict[str, dict[str, dict[str, float]]]


def performance_page(generated: str, table: Table) -> str:
    """The page; `table` writes a Markdown table from a header and rows."""
    result = json.loads((RESULTS / "correction_cpu.json").read_text(encoding="utf-8"))
    return f"""# Performance

{generated}

This page shows the time and memory of a correction, and of log-probs without logits.

```bash
make bench                               # measure
make bench ARGS="--repeats 20 --save"    # measure, and write benchmarks/results/correction_cpu.json
make docs                                # write this page from it
```

## Measured

{_provenance(result)}

The correction truncates token weights at 2 and rejects sequences by `seq_mean_k3` at 0.01. Every metric is read as a
number, unless a row states otherwise; verl's function computes 43 metrics of its own. Log-probs are float32, the mask
is bool. "Padded" responses have 1,024 to 8,192 tokens in rows of 8,192, "packed" batches contain these responses
without padding, and "dense" responses all have 8,192 tokens. 1 M is 1,048,576 tokens. All implementations run in turn
in one process, {_runs(result["seconds"])} times, so disturbances affect all of them.

{_second(result)}

{_times(result, table)}

The torch times above, and the torch ratios below, are of an older version. At 8 M tokens the present version takes
3.8 to 4.3 times as long (`benchmarks/paired.py 0883dc5 --cases torch --tokens 8388608`, 8 pairs). So it is 6 to 9
times as fast as verl, and misses its target. `benchmarks/results/correction_cpu.json` has all figures.

## Targets

{_verdict(result)}

{_targets(result, table)}

At 1 M tokens every batch stays in the last-level cache between runs. {_growth(result["seconds"])} So ratios at 1 M
tokens depend on the machine as much as on the kernel, which arithmetic limits. Python adds about 0.1 ms per call of
`correct` and `.metrics()`.

## Share of a training step

{_share()}

## Operations, waits and bytes

The counts are for 64 dense sequences of 2,048 tokens on one thread. On a GPU an operation is a kernel launch, and a
wait blocks the queue until a value has reached the host. Bytes are read or written, in memory or cache.
torch's profiler does not count compiled C ("not seen"), which reads 9 bytes per token and writes 5.
`tests/kernels/test_correction_counts.py` checks these counts.

{_counts(result["counts"], table)}

## How it works

*One read.* Tokens are read once, in blocks that stay in cache. From each block the kernel computes counts, sums of d
(the log-ratio), d², expm1(d) and weights, and the extremes of d. All metrics and the decisions about sequences follow
from these numbers.

*Lower limit.* Every implementation must read 9 bytes per token, and write 5 for weights and a mask. The row "copy"
also moves 14 bytes, but writes 7, so a correction can be faster. New memory can double the time, so reuse buffers with
`out=`.

*Compiled C* (`impl="cpu"`, which `"auto"` selects if installation found a C compiler) processes 512 tokens at a time in
float32 vectors, and adds blocks in float64 ([precision](correction.md#precision)). A block is *quiet* if all tokens are
valid, no log-ratio is beyond ±1 nat, no |log μ| is above 15, and no bound applies to a token. Quiet blocks
need one loop without masks, about 60 AVX-512 instructions per 16 tokens. Any other block is read again, from
cache. The kernel uses AVX-512, AVX2 or the compiler's own vectors.
It has run on x86-64 only; `make test-arm` compiles it for arm64.

*Eager torch* (`impl="torch"`) computes these sums in float64, {_block()} tokens at a time; each thread takes whole
blocks. A block needs about 140 operations and four exponentials; each operation costs 0.2 to 0.5 ns per token.

## On a GPU

`impl="triton"` launches three kernels and never waits. `"auto"` selects it after
[tests on the same GPU](correction.md#proof-on-a-gpu).

The first launch reads the tokens. Each program is one warp, which reads blocks of 512 tokens, and adds its sums in
float64 every 4,096 tokens. A *regular* block has only valid tokens, with log-ratios within ±2.75 nats. A regular block
costs 53 to 57 instructions per token on sm_90 (63 in bfloat16 with an int64 mask), and 43 to 60 on sm_100. Any other
block costs 135 to 170. `tests/kernels/triton_compilation.py cuda:90` counts instructions in the machine code.

The second launch decides which sequences are kept. torch would need 104 to 274 launches for these decisions
(`tests/kernels/test_decision_copies.py`), or 0.3 to 1.4 ms at 2.5 to 5 µs each. The third launch merges the
statistics, and applies the decisions to the tokens.

{gpu_section(table)}

```bash
make gpu-wheels      # on a machine with a network: downloads the other libraries' wheels, 7 MB
make gpu             # on a machine with a GPU, also without a network; takes under 9 minutes; then run make docs
make gpu-dry         # runs the same script on the CPU
```

`make gpu` first tests the kernels with recorded cases and 200 random batches against float64, a sequence of more than
2³¹ tokens, two runs that must be bit-identical, a step of every mode with waits forbidden, and 100 replays of a
captured graph. Then it measures. Each stage is a separate process, so a failure does not stop later stages.

On fake CUDA tensors (`tests/correction/test_cuda.py`), eager torch needs 240 launches for a padded micro-batch with
one criterion (packed 248), and no wait. 8 M tokens need 757 launches, in eight blocks of 1 M. verl 0.9.1 needs 308
launches and 49 waits. `torch.compile(fullgraph=True)` compiles `correct` and every `policy_loss` into one graph without
waits (torch 2.6 is too old). On the CPU, inductor's float64 code takes at least ten times as long as eager torch.

## Log-probs without logits

{_without_logits(table)}

Where to go next: [what a correction computes](correction.md), [limits](limits.md)."""


def _without_logits(table: Table) -> str:
    """`linear_log_prob` against other implementations, from the results of benchmarks/linear_logprob.py --save."""
    paths = RESULTS.glob("linear_logprob_cpu_float32_*.json")
    results = sorted((json.loads(path.read_text(encoding="utf-8")) for path in paths), key=lambda of: of["vocabulary"])
    rows = []
    for name in results[0]["seconds"]:
        cells = []
        for result in results:
            megabytes = result["peak_bytes"][name] / 1e6
            size = f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.1f}"
            cells += [f"{result['seconds'][name]['cpu']:.3g}", size]
        rows.append((name, *cells))
    first = results[0]
    header = [column for of in results for column in (f"CPU s, {of['vocabulary']:,} ids", "MB")]
    return f"""[`linear_log_prob`](../guides/linear_logprob.md) and other implementations, forward and backward:
{first["tokens"]} tokens, {first["width"]:,} hidden dimensions, {first["dtype"]}, kept sets of {first["kept"]} ids. The
columns contain the least CPU seconds of both threads, and the peak memory with gradients, by size of the vocabulary. A
chunked implementation computes at least four matrix products, which the row "four products" measures. The head's
gradient needs 134 MB, or 622 MB for the large vocabulary. Rows with "added to a gradient" add it to an existing
buffer; only the masked softmax also makes a new one.

{table(("", *header), rows)}

{first["device"]}, torch {first["torch"]}, {first["date"]}: `{first["command"]}` and
`{results[1]["command"]}`.
`--device cuda` measures a GPU."""


def _share() -> str:
    """The correction's share of a step of the reference trainer."""
    result = json.loads((RESULTS / "step_share_cpu.json").read_text(encoding="utf-8"))
    result |= {
        "millions": result["parameters"] / 1e6,
        "own": result["correction_bytes"] / 2**20,
        "whole": result["step_bytes"] / 2**20,
    }
    text = """The measured step of the reference trainer has {rows} responses with {tokens:,} tokens, and a model of
{millions:.1f} M parameters. The correction and all of its metrics take {correction_cpu_ms} of {step_cpu_ms:,.0f} ms
of CPU time, **{time_share:.3%}**, and {own:.2f} of {whole:,.0f} MiB, **{memory_share:.3%}**. The correction's memory
is its outputs and temporary tensors, counted where torch dispatches operations. A larger model makes both shares
smaller. verl's guide of October 2025 says 1 to 3 % of compute and about 1 % of memory. `{command}`: {device},
{threads} thread, torch {torch}, {date}, commit {commit}."""
    return text.format(**result)


def _provenance(result: dict[str, Any]) -> str:
    return (
        f"{result['device']}, {result['threads']} threads, torch {result['torch']}, Python {result['python']}, "
        f"{result['date']}, commit {result['commit']}: `{result['command']}`. "
        f"{_quiet(result['load'], result['threads'])}"
    )


def _quiet(load: float, threads: int) -> str:
    if load < QUIET:
        return "Nothing else ran."
    return (
        f"Other work kept {load:g} processes busy on those {threads} cores. So read times as upper bounds, and trust "
        "the CPU time more than the clock: milliseconds find an undisturbed moment, seconds do not, and threads that "
        "wait for one another lose most."
    )


def _runs(seconds: Seconds) -> str:
    runs = [row["runs"] for of in seconds.values() for row in of.values()]
    return f"{min(runs)} to {max(runs)}"


def _growth(seconds: Seconds) -> str:
    """How much longer the largest dense batch takes than the smallest."""
    dense = [of for title, of in seconds.items() if title.endswith("dense")]
    least, most = dense[0], dense[-1]
    times = {name: most[name]["min"] / least[name]["min"] for name in (VERL, COPY, "cpu, out=")}
    return (
        f"For 8 times as many tokens (dense),\nverl takes {times[VERL]:.0f} times as long, "
        f"the copy {times[COPY]:.0f} times, and `cpu, out=` {times['cpu, out=']:.0f} times."
    )


def _block() -> str:
    from rollcorr.kernels.correction.torch.blocks import CPU_BLOCK

    return f"{CPU_BLOCK:,}"


def _named(name: str) -> str:
    """A contender in a table: ours are code."""
    return name if name in (VERL, COPY) or name not in MEANING else f"`{name}`"


def _short(title: str) -> str:
    """The title of a batch for a column: 8,388,608 tokens, dense → 8 M dense."""
    tokens, layout = title.split(" tokens, ")
    return f"{int(tokens.replace(',', '')) >> 20} M {layout}"


def _second(result: dict[str, Any]) -> str:
    """What the table shows; on a busy machine the CPU time says more than the median."""
    if _clock(result) == "min":
        return "Milliseconds of the fastest run / of the median run:"
    return "Milliseconds, the least of the runs by the clock / the least CPU time of all threads together:"


def _times(result: dict[str, Any], table: Table) -> str:
    seconds = result["seconds"]
    second = "median" if _clock(result) == "min" else "cpu"
    rows = [
        (
            _named(name),
            *(f"{of[name]['min'] * 1e3:.2f} / {of[name][second] * 1e3:.2f}" for of in seconds.values()),
            MEANING.get(name, ""),
        )
        for name in next(iter(seconds.values()))
    ]
    return table(("", *map(_short, seconds), "what it is"), rows)


def _clock(result: dict[str, Any]) -> str:
    """Which of the measured times to judge by: a busy machine lets nobody's clock be compared."""
    return "min" if result["load"] < QUIET else "cpu"


def _figure(of: dict[str, dict[str, float]], contender: str, peer: str, clock: str) -> float:
    """× verl: how often the contender fits into verl's time. × copy: how often the copy fits into the contender's."""
    ratio = of[contender][clock] / of[peer][clock]
    return ratio if peer == COPY else 1 / ratio


def _met(figure: float, side: str, limit: float) -> bool:
    return figure >= limit if side == "at least" else figure <= limit


def _verdict(result: dict[str, Any]) -> str:
    clock = _clock(result)
    met = [
        _met(_figure(of, contender, peer, clock), side, limit)
        for contender, peer, side, limit in TARGETS
        for of in result["seconds"].values()
    ]
    basis = "the clock" if clock == "min" else "CPU time, because the machine was busy"
    return f"Judged by {basis}, {sum(met)} of {len(met)} figures meet their target. Bold figures miss it."


def _targets(result: dict[str, Any], table: Table) -> str:
    seconds, clock = result["seconds"], _clock(result)
    rows = []
    for contender, peer, side, limit in TARGETS:
        cells = []
        for of in seconds.values():
            figure = _figure(of, contender, peer, clock)
            text = f"{figure:.{2 if peer == COPY else 1}f}"
            cells.append(text if _met(figure, side, limit) else f"**{text}**")
        rows.append((f"`{contender}`", f"{side} {limit:g} × {'the copy' if peer == COPY else 'verl'}", *cells))
    return table(("", "target", *map(_short, seconds)), rows)


def _counts(counts: dict[str, dict[str, float]], table: Table) -> str:
    rows = [
        (
            _named(name),
            f"{row['operations']:.0f}",
            f"{row['waits']:.0f}",
            _bytes(name, row),
        )
        for name, row in counts.items()
    ]
    return table(("", "operations", "waits", "bytes per token"), rows)


def _bytes(name: str, row: dict[str, float]) -> str:
    compiled = name.startswith("cpu") and row["bytes_per_token"] < 1
    return "not seen" if compiled else f"{row['bytes_per_token']:,.0f}"
