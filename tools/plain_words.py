"""Count words that engineers rarely write, in docstrings, comments and Markdown; exit with 1 beyond a limit.

    python tools/plain_words.py                     every root of LIMITS, with its exceeded words
    python tools/plain_words.py --list beside       every line that uses the word

A limit is a frequency per 10,000 words. Limits were set from six codebases that engineers like to read (rlax,
torchtitan, torchmetrics, Equinox, nanochat, tinker-cookbook). Names in backticks, code blocks and words with
underscores do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TOO_OFTEN = {
    "what": 20,
    "says": 2,
    "say": 2,
    "those of": 1,
    "that of": 2,
    "alone": 2,
    "none": 46,
    "nothing": 7,
    "holds": 5,
    "hold": 3,
    "gives": 4,
    "takes": 8,
    "whoever": 0.2,
    "told": 0.3,
    "tells": 2,
    "beside": 0.3,
    "asked": 1,
    "others": 2,
    "whole": 8,
    "many": 6,
    "left": 6,
    "another": 6,
    "wrong": 4,
    "too": 5,
}
"""Word or pair → highest frequency."""

TOO_RARE = {"return": 7, "returns": 14, "compute": 8, "default": 6, "contains": 0.8}
"""Word → lowest frequency."""

LIMITS = {"src/rollcorr": (3, 0), "docs README.md": (3, len(TOO_RARE)), "tests": (3, len(TOO_RARE))}
"""Root → how many words of TOO_OFTEN and of TOO_RARE may exceed their limit."""


def python_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) for each line of a docstring or comment."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if documented and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for number in range(docstring.lineno, docstring.end_lineno + 1):
                yield number, lines[number - 1]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def markdown_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) for each line outside of code blocks."""
    fenced = False
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text, without names of code."""
    text = re.sub(r"`[^`]*`", " ", text)
    return [word.lower() for word in re.findall(r"(?<![\w_.])[A-Za-z']{2,}(?![\w_(])", text)]


def terms_of(text: str) -> list[str]:
    """Return words and pairs of neighboring words."""
    words = words_of(text)
    return words + [" ".join(pair) for pair in itertools.pairwise(words)]


def lines_of(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, number, text) for each line of prose below a root."""
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if path.suffix not in (".py", ".md"):
            continue
        source = path.read_text(encoding="utf-8")
        for number, line in python_lines(source) if path.suffix == ".py" else markdown_lines(source):
            yield path, number, line


def exceeded(*roots: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the frequencies of the words beyond their limits: those too often, and those too rare."""
    counts: Counter[str] = Counter()
    total = 0
    for root in roots:
        for _, _, line in lines_of(root):
            counts.update(terms_of(line))
            total += len(words_of(line))
    frequency = {word: counts[word] * 1e4 / total for word in TOO_OFTEN | TOO_RARE}
    often = {word: frequency[word] for word, limit in TOO_OFTEN.items() if frequency[word] > limit}
    rare = {word: frequency[word] for word, limit in TOO_RARE.items() if frequency[word] < limit}
    return often, rare


def main() -> int:
    """Print the exceeded limits, or the lines with a word; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="WORD", help="print every line with this word or pair")
    word = parser.parse_args().list
    failed = False
    for roots, limits in LIMITS.items():
        paths = [ROOT / root for root in roots.split()]
        if word:
            for path, number, line in (found for root in paths for found in lines_of(root)):
                if word in terms_of(line):
                    print(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
            continue
        for words, limit, kind in zip(exceeded(*paths), limits, ("too often", "too rare"), strict=True):
            failed |= len(words) > limit
            shown = ", ".join(f"{term} {value:.1f}" for term, value in words.items()) or "–"
            print(f"{roots}: {len(words)} words {kind}, at most {limit}: {shown}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
