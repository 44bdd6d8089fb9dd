"""Machine code of NVIDIA's GPUs, counted: instructions on each way through a kernel's loop, and groups of loads.

A loop has several ways through it where a block of tokens may be read in several manners. Instructions are those that a
warp issues, so an instruction of a program of one warp counts once for its 32 threads.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

EXPONENTIAL = "MUFU.EX2"
_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);?.*?/\* 0x([0-9a-f]{16}) \*/"
)
_SECOND_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
NO_BARRIER = 7


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        predicate: the condition that it is executed under, or an empty text.
        name: its name, with modifiers.
        operands: as they are printed.
        sets: the barrier that it sets when its result has come, or `NO_BARRIER`.
        waits: a bit for each barrier that it waits for.
    """

    predicate: str
    name: str
    operands: str
    sets: int
    waits: int


@dataclass
class BasicBlock:
    """Instructions without a branch among them, and where they lead."""

    instructions: list[Instruction] = field(default_factory=list)
    leads_to: list[int] = field(default_factory=list)

    @property
    def issued(self) -> int:
        """Instructions other than padding."""
        return sum(one.name != "NOP" for one in self.instructions)

    def has(self, name: str) -> bool:
        """Whether an instruction's name starts so."""
        return any(one.name.startswith(name) for one in self.instructions)


def disassembled(nvdisasm: str, cubin: bytes) -> str:
    """A kernel's machine code as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([nvdisasm, "-hex", path], capture_output=True, text=True, check=True).stdout


def basic_blocks(text: str) -> list[BasicBlock]:
    """The control flow of a kernel, from the output of nvdisasm with `-hex`."""
    blocks, named, waiting = [BasicBlock()], {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            if blocks[-1].instructions:
                _open_block(blocks)
            named[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.search(line):
            _, predicate, name, operands, _ = found.groups()
            waiting = [(predicate or "").strip(), name, operands]
        elif waiting and (second := _SECOND_WORD.match(line)):
            control = int(second[1], 16)
            one = Instruction(*waiting, sets=control >> 46 & 7, waits=control >> 52 & 63)
            blocks[-1].instructions.append(one)
            waiting = []
            if one.name.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP") and one.name != "BRA.DIV":
                _open_block(blocks)
    _connect(blocks, named)
    return blocks


def _open_block(blocks: list[BasicBlock]) -> None:
    """Start a block after the last one."""
    blocks.append(BasicBlock())


def _connect(blocks: list[BasicBlock], named: dict[str, int]) -> None:
    """Fill where each block leads: to the target of its branch, and on where the branch is conditional."""
    for index, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        ends = (
            last is not None
            and last.name.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP")
            and last.name != "BRA.DIV"
        )
        if ends and (target := _TARGET.search(last.operands)):
            block.leads_to.append(named[target[1]])
        conditional = ends and (last.predicate or re.match(r"\s*!?U?P\d", last.operands))
        if index + 1 < len(blocks) and (not ends or conditional):
            block.leads_to.append(index + 1)


Loop = tuple[int, frozenset[int]]
"""The block that a loop starts with, and all of its blocks."""


def back_edges(blocks: list[BasicBlock]) -> set[tuple[int, int]]:
    """Branches to a block that every way to them has passed: (from, to)."""
    found: set[tuple[int, int]] = set()
    open_blocks: set[int] = set()
    seen: set[int] = set()

    def visit(index: int) -> None:
        seen.add(index)
        open_blocks.add(index)
        for after in blocks[index].leads_to:
            if after in open_blocks:
                found.add((index, after))
            elif after not in seen:
                visit(after)
        open_blocks.remove(index)

    visit(0)
    return found


def loops(blocks: list[BasicBlock]) -> list[Loop]:
    """Every loop."""
    before: dict[int, set[int]] = {index: set() for index in range(len(blocks))}
    for index, block in enumerate(blocks):
        for after in block.leads_to:
            before[after].add(index)
    members: dict[int, set[int]] = {}
    for last, head in back_edges(blocks):
        inside = members.setdefault(head, {head})
        left = [last]
        while left:
            one = left.pop()
            if one not in inside:
                inside.add(one)
                left += before[one]
    return [(head, frozenset(inside)) for head, inside in members.items()]


def token_loops(blocks: list[BasicBlock]) -> list[Loop]:
    """The loops that load tokens and take exponentials, innermost first."""
    reading = [
        (head, inside)
        for head, inside in loops(blocks)
        if any(blocks[i].has("LDG") for i in inside) and any(blocks[i].has(EXPONENTIAL) for i in inside)
    ]
    return sorted(reading, key=lambda loop: len(loop[1]))


def way(
    blocks: list[BasicBlock], loop: Loop, avoided: frozenset[int] = frozenset(), *, computing: bool = True
) -> list[int]:
    """The blocks on the shortest way through a loop.

    Args:
        blocks: of the kernel.
        loop: the loop.
        avoided: blocks that the way does not pass, such as an inner loop's.
        computing: it must pass an exponential.
    """
    head, inside = loop
    nothing: tuple[float, tuple[int, ...]] = (float("inf"), ())
    back = back_edges(blocks)

    @cache
    def rest(index: int, computed: bool) -> tuple[float, tuple[int, ...]]:
        """Instructions and blocks from a block to the end of the turn."""
        computed = computed or blocks[index].has(EXPONENTIAL)
        found = nothing
        for after in blocks[index].leads_to:
            if after == head and (computed or not computing):
                found = min(found, (0.0, ()))
            elif after in inside - avoided and (index, after) not in back:
                found = min(found, rest(after, computed))
        return found[0] + blocks[index].issued, (index, *found[1])

    count, passed = rest(head, False)
    return list(passed) if count < float("inf") else []


def issued(blocks: list[BasicBlock], passed: list[int]) -> int:
    """Instructions in some blocks."""
    return sum(blocks[i].issued for i in passed)


def load_groups(blocks: list[BasicBlock]) -> int:
    """How often loads from memory wait for loads before them: 1 where all are on their way at once.

    A load belongs to a later group when an instruction before it waited for the barrier of an earlier load.
    """
    groups, pending, arrived = 0, 0, True
    for block in blocks:
        for one in block.instructions:
            if one.waits & pending:
                arrived, pending = True, pending & ~one.waits
            if one.name.startswith("LDG"):
                groups += arrived
                arrived = False
                pending |= 1 << one.sets if one.sets != NO_BARRIER else 0
    return groups
