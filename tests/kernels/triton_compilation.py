"""Compile the Triton kernels for an absent GPU and print their resources as JSON lines.

test_triton_compile.py runs it in a child process, because Triton's interpreter is a choice for a process:

    TRITON_INTERPRET=0 python tests/kernels/triton_compilation.py cuda:90

`machine_code` counts what NVIDIA's assembler made of a kernel (`sass.py`): groups of loads that wait for one another,
and for the token pass the instructions of a warp for each token that a thread reads.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import sass
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.triton import launch
from rollcorr.kernels.correction.triton.token_pass import BLOCK

TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
EVERYTHING = {
    "rollout_rs": ",".join(CRITERIA),
    "rollout_rs_threshold": ",".join("0.3_3.0" if name.endswith("k1") else "2.0" for name in CRITERIA),
    "rollout_token_veto_threshold": 1e-4,
}
STANDARD = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
CASES = {
    "standard": (STANDARD, {"T": 8192}),
    "standard, aligned rows": (STANDARD, {"T": 8208}),
    "standard, packed, bfloat16, int64 mask": (
        STANDARD,
        {"dtype": torch.bfloat16, "mask": torch.int64, "packed": True},
    ),
    "everything, token": (
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0", "safety_bound": 10.0} | EVERYTHING,
        {},
    ),
    "everything, sequence, packed": ({"rollout_is": "sequence"} | EVERYTHING, {"packed": True}),
    "metrics only, few long sequences": ({}, {"B": 4, "T": 1 << 20}),
}


def launches(
    fields: dict[str, Any],
    *,
    B: int = 1024,
    T: int = 8192,
    dtype: torch.dtype = torch.float32,
    mask: torch.dtype = torch.bool,
    packed: bool = False,
) -> list[launch.Launch]:
    """The three launches for a batch on the meta device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RolloutCorrectionConfig(**fields)
    shape = (B * T,) if packed else (B, T)
    with torch.device("meta"):
        log_prob, valid = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=mask)
        cu_seqlens = torch.empty(B + 1, dtype=torch.int32) if packed else None
    splits = launch.choose_splits(B * T, B)
    buffers = launch.make_buffers(valid, B, splits, config)
    return launch.launches(Batch(log_prob, log_prob, valid, cu_seqlens), buffers, splits, config)


def compiled(one: launch.Launch, target: GPUTarget) -> CompiledKernel:
    """A kernel as the launch would compile it: 1 is a constant, and multiples of 16 are known."""
    signature: dict[str, Any] = {}
    constants, attributes = dict(one.constants), {}
    for index, name in enumerate(one.kernel.arg_names):
        value = one.arguments.get(name)
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", constants.get(name, value)
        else:
            signature[name] = _type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constants, attributes)
    if target.backend == "hip":
        # What is counted stands in the assembly. Triton 3.4 asks for ROCm's linker besides; what it links is not run.
        os.environ.setdefault("TRITON_HIP_LLD_PATH", shutil.which("true") or "")
    limits = one.limits(target.arch // 10) if target.backend == "cuda" else {}
    return triton.compile(source, target=target, options={"num_warps": one.warps, "enable_fp_fusion": True} | limits)


def usage(kernel: CompiledKernel) -> dict[str, int]:
    """Registers and spills: from ptxas, or from the metadata of AMD's assembler."""
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
        names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        return {name: int(found[name]) for name in names}
    ptx = kernel.asm["ptx"]
    arch = re.search(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            ptxas(kernel.metadata.target.arch),
            "-v",
            f"--gpu-name={arch and arch[1]}",
            path,
            "-o",
            path.with_suffix(".o"),
        ]
        if maximum := re.search(r"\.maxnreg (\d+)", ptx):
            command.append(f"-maxrregcount={maximum[1]}")
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(_number(r"Used (\d+) registers", report)),
        "spill_store_bytes": int(_number(r"(\d+) bytes spill stores", report)),
        "spill_load_bytes": int(_number(r"(\d+) bytes spill loads", report)),
        "loads_after_a_store": _loads_after_a_store(ptx),
        "vector_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "vector_stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
    }


def machine_code(one: launch.Launch, kernel: CompiledKernel) -> dict[str, float]:
    """Groups of loads, and what the token pass costs, in instructions that a warp issues.

    "regular" is for each token that a thread reads in a regular block, "in_full" for one in any other block that has a
    valid token, and "outside_loops" what a program does beside them. They are left out where the assembler arranged the
    loops otherwise.
    """
    blocks = sass.basic_blocks(sass.disassembled(nvdisasm(), kernel.asm["cubin"]))
    found: dict[str, float] = {"load_groups": sass.load_groups(blocks)}
    if one.kernel.fn.__name__ == "read_tokens":
        in_full, *around = sass.token_loops(blocks)
        ways = ((loop, sass.way(blocks, loop, avoided=in_full[1])) for loop in around)
        of_blocks, regular = next(((loop, way) for loop, way in ways if way), (in_full, []))
        if regular:
            at_once = BLOCK.value // (2 if one.constants["PLAN"].token_criteria else 1)
            found["regular"] = sass.issued(blocks, regular) / (at_once // 32)
            found["in_full"] = sass.issued(blocks, sass.way(blocks, in_full)) / 4
            found["outside_loops"] = sum(block.issued for i, block in enumerate(blocks) if i not in of_blocks[1])
    return found


def _loads_after_a_store(ptx: str) -> int:
    """Loads that cannot overlap with earlier ones, because a store comes before them."""
    accesses = re.findall(r"\b(ld|st)\.global", ptx)
    return accesses[accesses.index("st") :].count("ld") if "st" in accesses else 0


def ptxas(arch: int) -> str:
    """Triton's own assembler; the function that finds it has no architecture argument before 3.5."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(arch) if inspect.signature(get_ptxas).parameters else get_ptxas()
    tool = tool[0] if isinstance(tool, tuple) else tool  # with its version, in some
    return str(getattr(tool, "path", tool))


def nvdisasm() -> str:
    """Triton's own disassembler."""
    return str(Path(ptxas(90)).with_name("nvdisasm"))


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in {text!r}")
    return found[1]


def _type(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, tuple):
        return tuple(_type(x) for x in value)
    return "fp32" if isinstance(value, float) else "i32"


def main(target: str) -> None:
    """Compile every case for a target: "cuda:90" or "hip:gfx942"."""
    backend, arch = target.split(":")
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    for case, (fields, shape) in CASES.items():
        for one in launches(fields, **shape):
            kernel = compiled(one, gpu)
            line = {"case": case, "kernel": one.kernel.fn.__name__} | usage(kernel)
            if backend == "cuda":
                line |= machine_code(one, kernel)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
