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
    COPY: "14 bytes a token, 7 read and 7 written",
    "cpu, out=, metrics not read": "compiled C, buffers reused; statistics stay tensors",
    "cpu, out=": "the same and every metric as a number",
    "cpu, fresh outputs": "the same into fresh memory",
    "cpu, metrics only": "the preset `disabled`: no weights",
    "cpu, eleven criteria, out=": "every rejection criterion at once",
    "cpu, histograms and the worst, out=": "`detail=True`: a second read",
    "torch, out=": "eager torch alone",
    "torch, fresh outputs": "the same into fresh memory",
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

What a correction costs, what it costs at least, and how to measure it again. Everything here is about the
correction step: log-probs and a mask in; weights, a loss mask and statistics out.

```bash
make bench                               # measure
make bench ARGS="--repeats 20 --save"    # measure, and write benchmarks/results/correction_cpu.json
make docs                                # write this page from it
```

## Measured

{_provenance(result)}

The configuration is token weights truncated at 2 and the criterion `seq_mean_k3` at 0.01, with every metric on the
host unless a row says otherwise; verl's helper computes its 43. Log-probs are float32 and the mask is bool.
Responses have 1,024 to 8,192 tokens of 8,192 ("padded", 9/16 of the places hold a token), the same tokens packed,
or all 8,192 ("dense"). All contenders take turns in one process, so that what disturbs one disturbs its neighbors.
`min` is the least of {_runs(result["seconds"])} runs, ratios are of minima, and CPU is the time of all threads
together, the least of the runs too: others on the machine disturb it less.

{_batches(result["seconds"], table)}

## Targets

{_verdict(result)} A figure that misses its target is bold.

{_targets(result, table)}

Where the compiled kernel misses a target at 1 M tokens and meets it at 8 M, the batch stays in the last-level cache
between runs, and so does that of the others. {_growth(result["seconds"])}
So the ratio at 1 M tokens is as much the machine's as the kernel's, which is bound by arithmetic in both. A call and
`.metrics()` add about 0.1 ms of Python, whatever the batch.

What torch alone costs is some 50 operations and three exponentials on each block, at 0.2 to 0.5 ns a token each
when a block's float64 buffers are in the second-level cache, and the asking for them. In host memory, where a look
at a value is no wait, the tokens that count are brought together first, and a block without missing, extreme or
capped ones takes some 35 operations and two exponentials in four buffers. Log-ratios stay float64 there too: float32
holds neither their last digits nor k3 near 0.

## Asked of torch

For 64 sequences of 2,048 tokens, dense, on one thread. An operation is a kernel launch on a GPU; a wait stops its
queue until a value has come to the host. Bytes are those that operations read and write, in memory or in cache;
what compiled C does is not seen by torch: it reads 9 bytes a token and writes 5.
`tests/kernels/test_correction_counts.py` holds these counts, and that memory grows by the outputs and less than a
twentieth.

{_counts(result["counts"], table)}

## How

*One read.* Tokens are read once, in blocks that stay in cache, and leave sums: counts, Σ d, Σ d², Σ expm1(d), Σ of
weights less 1 and of their squares, extremes of d. Means, spreads, perplexities, χ², k3 and the decisions about
whole sequences follow from the sums; the largest k2 and k3 follow from the extremes of d, because both are convex.

*Floors.* Weights and a bool mask from float32 log-probs and a bool mask are 14 bytes a token; metrics alone are 9.
Nothing is faster than a copy of the same bytes. Fresh memory costs several times the arithmetic, which is what
`out=` is for.

*Compiled C* (`impl="cpu"`, taken by `"auto"` when there was a C compiler at installation): 512 tokens at a time in
float32 vectors, sums over blocks in float64, `expm1` and k3 from one series without cancellation, decisions as
comparisons of d. AVX-512, AVX2 or the compiler's own vectors, chosen when it runs; the last is what arm64 gets, and
`make test-arm` compiles it. It has been run on x86-64 only.

*Torch alone* (`impl="torch"`): the same sums in float64, {_block()} tokens at a time. Masks are float64 too,
because eager torch compares into numbers and sums them several times as fast as bool; all per-sequence sums of a
block are one operation; packed sums are `segment_reduce`. Each thread takes whole blocks. In host memory numpy adds up
sequences of different lengths.

## On a GPU

`impl="triton"` is three launches and no wait. `"auto"` takes it once a probe has shown on the machine at hand that it
computes what torch computes ([correction.md](correction.md#implementations)).

The first launch reads the tokens, 512 at a time and by one warp. A block whose tokens are all valid and within ±2.75
nats is read with nothing to select or to cap; a block without a valid token is only cleared; any other is read in full.
On sm_90 a token of a regular block costs 53 to 57 instructions in float32, and 63 in bfloat16 with an int64 mask; one
of any other block costs 135 to 170. A program spends about 1,100 beside its tokens, of which it has up to 4,096.
Before, every token cost 134, and four warps spent 1,195 each. A thread takes 128 registers, 136 where ranges count.
On sm_100 the assembler takes 128 to 168, by the version of Triton, and a token of a regular block costs 43 to 60.
`tests/kernels/triton_compilation.py cuda:90` counts all this in the machine code.

The second launch decides about sequences, and could be left to torch: on the table that the first one writes, torch's
decisions are 121 launches with one criterion and 259 with all (`tests/kernels/test_decision_copies.py`). At 2.5 to 5 µs
each that is 0.3 to 1.3 ms, several times what all three kernels are expected to take at 8 M tokens. So it stays.

{gpu_section(table)}

```bash
make gpu-wheels      # where there is a network: the peers' wheels, 7 MB
make gpu             # on a machine with one GPU, and no network: under 9 minutes; then: make docs
make gpu-dry         # the same script on the CPU, to see that it runs
```

The script proves before it measures: recorded cases and 200 random batches against float64, one sequence of more than
2³¹ tokens, two runs with equal bits, a step of every mode with waiting forbidden, and 100 replays of a captured graph.
Each stage is a process of its own and writes every row as it is found, so what fails or runs out of time leaves the
rest.

What eager torch asks of a GPU is counted without one, on fake CUDA tensors (`tests/correction/test_cuda.py`): for a
micro-batch 193 launches with one criterion, padded, and 199 packed; between the log-probs and the gradient no value is
read, and none of the host's memory is sent. verl 0.9.1 asks for 308, and waits 49 times.
`torch.compile(fullgraph=True)` takes `correct` and every `policy_loss` as one graph. On the CPU that is for code that
is compiled anyway, not for speed: inductor's float64 takes ten times as long as eager torch or more, which works in
blocks that stay in cache."""


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
        f"Other work kept {load:g} processes busy on those {threads} cores, so read times as upper bounds, and the "
        "CPU column before the clock: what takes milliseconds finds an undisturbed moment, what takes a second does "
        "not, and threads that wait for one another lose most."
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
        f"For 8 times the tokens, dense,\nverl takes {times[VERL]:.0f} times as long, "
        f"the copy {times[COPY]:.0f} times, and `cpu, out=` {times['cpu, out=']:.0f} times."
    )


def _block() -> str:
    from rollcorr.kernels.correction.torch.blocks import CPU_BLOCK

    return f"{CPU_BLOCK:,}"


def _batches(seconds: Seconds, table: Table) -> str:
    header = ("ms", "min", "median", "CPU", "× verl", "× verl, CPU", "× copy", "")
    parts = []
    for title, of in seconds.items():
        rows = [
            (
                f"`{name}`" if name in MEANING and name not in (VERL, COPY) else name,
                *(f"{row[key] * 1e3:.2f}" for key in ("min", "median", "cpu")),
                *(f"{of[VERL][key] / row[key]:.1f}" for key in ("min", "cpu")),
                f"{row['min'] / of[COPY]['min']:.2f}",
                MEANING.get(name, ""),
            )
            for name, row in of.items()
        ]
        parts.append(f"### {title}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


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
    return f"Judged by {basis}, {sum(met)} of {len(met)} figures meet their target."


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
    return table(("", "target", *seconds), rows)


def _counts(counts: dict[str, dict[str, float]], table: Table) -> str:
    rows = [
        (
            name if name in (VERL, COPY) else f"`{name}`",
            f"{row['operations']:.0f}",
            f"{row['waits']:.0f}",
            _bytes(name, row),
        )
        for name, row in counts.items()
    ]
    return table(("", "operations", "waits", "bytes a token"), rows)


def _bytes(name: str, row: dict[str, float]) -> str:
    compiled = name.startswith("cpu") and row["bytes_per_token"] < 1
    return "not seen" if compiled else f"{row['bytes_per_token']:,.0f}"
