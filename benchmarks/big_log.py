"""Check a log of 100 million tokens, and measure time and memory of the whole command.

    python benchmarks/big_log.py                                # one reader, then two
    python benchmarks/big_log.py --row-group-tokens 25000000    # four row groups, as other writers make them
    python benchmarks/big_log.py --workers 1 2 --ray local      # and a Ray cluster on this machine
    python benchmarks/big_log.py --ids                          # with token ids, prompts and versions of the weights
    python benchmarks/big_log.py --source ../other/src          # the check of another checkout, on the same log
    python benchmarks/big_log.py --source ../other/src --pairs 20   # in turn, 20 times: the median ratio of CPU time
    python benchmarks/big_log.py --save                         # also writes benchmarks/results/

Each reader runs as `rollcorr check LOG --json`. "Largest" is the peak resident set of the largest process, from
getrusage of the command and its children; "together" is the largest sum over its processes that was seen in /proc,
which counts pages that they share once for each (Linux only). "CPU" is the time of all its processors. This script
imports nothing large, for the getrusage of a child begins with the size of its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
MB = 1e6
SHORTEST, LONGEST = 64, 16384


def main() -> None:
    """Write the log, check it with each number of readers, and print a table."""
    arguments = parse()
    if arguments.write:
        write(Path(arguments.write), arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        log = Path(folder) / "log.parquet"
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write", str(log)], check=True)
        size = log.stat().st_size
        print(f"{arguments.tokens:,} tokens, {size / MB:,.0f} MB, row groups of {arguments.row_group_tokens:,} tokens")
        print(f"{'':12s} {'seconds':>8s} {'CPU, s':>8s} {'M tokens/s':>11s} {'largest, MB':>12s} {'together, MB':>13s}")
        readers = [("--workers", str(workers)) for workers in arguments.workers]
        readers += [("--ray", arguments.ray)] if arguments.ray else []
        sources = [HERE.parent / "src", *map(Path, arguments.source)]
        if arguments.pairs:
            compare(log, readers[0], sources, arguments.pairs)
            return
        results = [
            {"reader": " ".join(reader), **({"source": str(source)} if number else {}), **check(log, reader, source)}
            for number, source in enumerate(sources)
            for reader in readers
        ]
    for result in results:
        rate = arguments.tokens / 1e6 / result["seconds"]
        line = f"{result['reader']:12s} {result['seconds']:8.1f} {result['cpu']:8.1f} {rate:11.1f}"
        print(f"{line} {result['largest'] / MB:12.0f} {result['together'] / MB:13.0f}  {result.get('source', '')}")
    same = all(result["answer"] == results[0]["answer"] for result in results if "source" not in result)
    print("the answers are the same to the last digit" if same else "THE ANSWERS DIFFER")
    if arguments.save:
        save(arguments, size, results, same=same)


def compare(log: Path, reader: tuple[str, str], sources: list[Path], pairs: int) -> None:
    """Check the log with both checkouts in turn, and print the median ratio of their CPU time."""
    ratios = []
    for pair in range(pairs):
        own, other = (check(log, reader, source)["cpu"] for source in sources)
        ratios.append(own / other)
        print(f"pair {pair + 1}: {own:.2f} s and {other:.2f} s of CPU, ratio {own / other:.3f}", flush=True)
    lowest, highest = min(ratios), max(ratios)
    print(f"median ratio of {pairs} pairs: {statistics.median(ratios):.3f} ({lowest:.3f} to {highest:.3f})")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the log (default 100 M)")
    parser.add_argument("--row-group-tokens", type=int, default=2_000_000, help="tokens of a row group (default 2 M)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="numbers of readers (default 1 2)")
    parser.add_argument("--ray", help="also read on a Ray cluster: local, auto or ray://host:port")
    parser.add_argument("--folder", help="where to put the log meanwhile (default: the temporary directory)")
    parser.add_argument("--ids", action="store_true", help="also write token ids, prompts and versions")
    parser.add_argument("--source", nargs="*", default=[], help="src folders of other checkouts, to compare with")
    parser.add_argument("--pairs", type=int, help="check with this checkout and --source in turn, this often")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pairs and len(arguments.source) != 1:
        parser.error("--pairs compares with one checkout: name its folder with --source")
    return arguments


def write(path: Path, arguments: argparse.Namespace) -> None:
    """Write the log, a row group at a time: responses of log-normal length, one token in twenty not the policy's."""
    import torch

    from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

    generator = torch.Generator().manual_seed(0)
    left, step = arguments.tokens, 0
    with RolloutLogWriter(path, row_group_rows=1 << 30) as log:
        while left:
            tokens, step = min(left, arguments.row_group_tokens), step + 1
            spread = torch.empty(tokens // SHORTEST + 1).log_normal_(7.5, 0.8, generator=generator)
            ends = spread.long().clamp(SHORTEST, LONGEST).cumsum(0)
            ends = torch.cat([ends[ends < tokens], torch.tensor([tokens])])
            rollout = -2 * torch.rand(tokens, generator=generator)
            train = (rollout + 0.02 * torch.randn(tokens, generator=generator)).clamp_(max=-1e-6)
            mask = torch.rand(tokens, generator=generator) > 0.05
            columns = {"rollout_log_prob": rollout, "old_log_prob": train, "step": step, "reward": 0.5}
            if arguments.ids:
                columns |= written_ids(ends, generator)
            log.write(RolloutBatch.from_packed(mask, cu_seqlens=torch.cat([ends.new_zeros(1), ends]), **columns))
            left -= tokens


def written_ids(ends: object, generator: object) -> dict:
    """Ids of a vocabulary of 150,000, a prompt of 64 to 512 ids for each row, and a version of the weights per step."""
    import torch

    sizes = torch.randint(64, 512, (len(ends),), generator=generator)
    ids = torch.randint(150_000, (int(ends[-1]),), generator=generator, dtype=torch.int32)
    prompts = torch.randint(150_000, (int(sizes.sum()),), generator=generator, dtype=torch.int32)
    return {
        "response_ids": ids,
        "prompt_ids": [row.tolist() for row in prompts.split(sizes.tolist())],
        "policy_versions": [0] * len(ends),
    }


def check(log: Path, reader: tuple[str, str], source: Path) -> dict:
    """Run the command once: seconds, bytes, and what it said."""
    together = [0]
    command = [sys.executable, "-m", "rollcorr", "check", str(log), "--json", *reader]
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(source)}
        process = subprocess.Popen(command, stdout=output, cwd=source.parent, env=environment)
        watcher = threading.Thread(target=watch, args=(process.pid, together), daemon=True)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        watcher.join()
        output.seek(0)
        answer = output.read().decode()
    if process.returncode not in (0, 1, 3):
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    unit = 1 if platform.system() == "Darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "seconds": seconds,
        "cpu": cpu,
        "largest": usage.ru_maxrss * unit,
        "together": together[0],
        "answer": answer,
    }


def watch(process: int, most: list[int]) -> None:
    """Note the largest sum of resident sets of a process and its descendants, until it ends."""
    while (sizes := resident(process)) is not None:
        most[0] = max(most[0], sizes)
        time.sleep(0.02)


def resident(root: int) -> int | None:
    """Bytes of a process and all its descendants; None when it has ended or there is no /proc."""
    parents, sizes = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z":
            parents[int(entry.name)], sizes[int(entry.name)] = int(fields[1]), int(fields[21])
    if root not in sizes:
        return None
    family = {root}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes[member] for member in family) * os.sysconf("SC_PAGE_SIZE")


def save(arguments: argparse.Namespace, size: int, results: list[dict], *, same: bool) -> None:
    """Write what was measured, with command, commit and device."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    result = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/big_log.py", *sys.argv[1:]]),
        "device": f"{processor()} ({os.cpu_count()} cores)",
        "python": platform.python_version(),
        "tokens": arguments.tokens,
        "row_group_tokens": arguments.row_group_tokens,
        "file_bytes": size,
        "same_answers": same,
        "readers": [{key: value for key, value in result.items() if key != "answer"} for result in results],
    }
    name = f"big_log_{arguments.tokens // 1_000_000}M_row_groups_of_{arguments.row_group_tokens // 1_000_000}M.json"
    (HERE / "results" / name).write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", HERE / "results" / name)


def processor() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n") if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


if __name__ == "__main__":
    main()
