"""The structure keeps its promises: imports point one way, heavy packages stay where they belong, all is documented."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from written_parts import APART, LAYERS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollcorr"
FILES = sorted(PACKAGE.rglob("*.py"))

ENTRY_POINTS = {"__init__", "__main__"}  # of the package: they import whatever they open
LIGHT = {"lazy_loader", "numpy", "rich", "torch", "typer", "yaml"} | set(sys.stdlib_module_names)


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"rollcorr.{name} has no layer; add it to LAYERS"
    return found[0]


@functools.cache
def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Modules that a file imports, those for type checkers aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def is_method_call(node: ast.AST) -> bool:
    """Whether a node is `x.name(…)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


BUDGETS = {
    "cli": 825,
    "config": 1692,
    "confirm": 252,
    "conformance": 350,
    "core": 1634,
    "correction": 1313,
    "demo": 163,
    "diagnostics": 8216,
    "diffusion": 491,
    "engines": 2303,
    "integrations": 1890,
    "kernels": 3643,
    "layouts": 137,
    "monitor": 1336,
    "rollout_log": 2156,
    "run_directory": 751,
    "simulation": 1161,
    "train": 3661,
}
"""Statements (`ast.stmt`) of each package; raise a number only by the budget of a change."""


def test_packages_stay_within_their_budgets():
    counts = dict.fromkeys(BUDGETS, 0)
    for path in FILES:
        if unit(path) in BUDGETS:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            counts[unit(path)] += sum(isinstance(node, ast.stmt) for node in nodes)
    over = {name: (count, BUDGETS[name]) for name, count in counts.items() if count > BUDGETS[name]}
    assert not over, f"statements and budgets: {over}"
    assert set(BUDGETS) == set().union(*LAYERS)


def test_the_page_stays_within_its_budgets():
    """Statements of Python in `report`, and lines of our own JavaScript."""
    report = PACKAGE / "diagnostics" / "report"
    nodes = [node for path in report.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    assert sum(isinstance(node, ast.stmt) for node in nodes) <= 697
    own = [path for path in (report / "page").glob("*.js") if not path.name.startswith("uPlot")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own) <= 1200


def test_public_names_and_options_are_documented():
    """Each occurs in a page, an example or a notebook; names of `diagnostics` are left out."""
    from undocumented import undocumented

    assert undocumented() == []


def test_the_top_level_holds_rooms_and_two_entry_points_only():
    assert {path.stem for path in PACKAGE.glob("*.py")} == ENTRY_POINTS
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set().union(*LAYERS)
    assert len(LAYERS) <= 8


def test_imports_point_down():
    faults = []
    for path in FILES:
        own = unit(path)
        if own in ENTRY_POINTS:
            continue
        others = {module.split(".")[1] for module in imports(path) if module.startswith("rollcorr.")}
        faults += [
            f"{path.relative_to(PACKAGE)} must not import rollcorr.{other}"
            for other in sorted(others)
            if layer(other) > layer(own) or (own, other) in APART
        ]
    assert not faults, "\n".join(faults)


def module_name(path: Path) -> str:
    """`rollcorr.core.weights` for its file, `rollcorr.core` for the `__init__` of a package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path) -> set[str]:
    """Return the package's modules that a file imports; `from package import file` names the file."""
    found = set(imports(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in found:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & {module_name(file) for file in FILES} - {module_name(path)}


def test_no_import_cycle_between_files():
    """Counts imports inside functions. Front doors import whatever they open, so they are no part of a cycle."""
    graph = {module_name(path): imported_files(path) for path in FILES if path.stem not in ENTRY_POINTS}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_files_of_neighboring_layers_have_names_of_their_own():
    """One name, one thing: a reader who hears "sampling" must not have to ask which. verl's generations are exempt."""
    seen: dict[tuple[int, str], Path] = {}
    for path in FILES:
        if path.stem.startswith("__") or unit(path) in ENTRY_POINTS or "verl" in path.parts:
            continue
        for neighbor in (-1, 0, 1):
            twin = seen.get((layer(unit(path)) + neighbor, path.stem))
            assert twin is None, f"{path.relative_to(PACKAGE)} and {twin.relative_to(PACKAGE)} share a name"
        seen[layer(unit(path)), path.stem] = path


def test_no_two_classes_share_a_name():
    """The verl adapters are exempt: they carry verl's own names."""
    homes: dict[str, Path] = {}
    for path in FILES:
        if "verl" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert homes.setdefault(node.name, path) == path, f"{node.name}: {path} and {homes[node.name]}"


@pytest.mark.parametrize(("room", "libraries"), [("core", {"lazy_loader", "torch"}), ("config", {"yaml"})])
def test_low_layers_import_few_libraries(room, libraries):
    """Besides these, the standard library and their own package; layers forbid the rest of rollcorr."""
    allowed = libraries | {"rollcorr"} | set(sys.stdlib_module_names)
    found = {(path.name, module.split(".")[0]) for path in FILES if unit(path) == room for module in imports(path)}
    assert not {(name, module) for name, module in found if module not in allowed}


def test_core_imports_config_and_itself_only():
    modules = {module for path in FILES if unit(path) == "core" for module in imports(path)}
    assert {module.split(".")[1] for module in modules if module.startswith("rollcorr.")} <= {"config", "core"}


def test_the_package_and_the_command_line_start_without_torch():
    code = "import sys, rollcorr, rollcorr.cli, rollcorr.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_correction_needs_no_extra():
    """Packages that `pip install rollcorr` must be able to import without extras."""
    light = {"config", "core", "kernels", "correction", "diffusion", "integrations"}
    for name in light:
        importlib.import_module(f"rollcorr.{name}")
    for path in FILES:
        if unit(path) in light:
            allowed = LIGHT | {"rollcorr"} | ({"triton"} if path.parent.name == "triton" else set())  # imported lazily
            heavy = {m.split(".")[0] for m in imports(path, top_level=True)} - allowed
            assert not heavy, f"{path.name} imports {heavy} at the top"


def test_every_public_name_is_documented():
    missing = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
        missing += [f"{path.name}: {getattr(n, 'name', 'module')}" for n in (tree, *named) if not ast.get_docstring(n)]
    assert not missing, "\n".join(missing)


def test_no_value_is_read_on_the_device_path():
    """`.item()`, `.tolist()`, `.cpu()` and the like wait for the device; those listed here may."""
    allowed = {
        ("mergeable_statistics.py", "read"),
        ("boundary.py", "check_cu_seqlens"),
        ("boundary.py", "_first_bad"),  # arrays of numpy
        ("sampling.py", "check_kept_sets"),
    }
    reads = set()
    for path in FILES:
        if unit(path) not in {"core", "kernels"}:
            continue
        functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            called = {call.func.attr for call in ast.walk(function) if is_method_call(call)}
            if called & {"item", "tolist", "cpu", "nonzero"}:
                reads.add((path.name, function.name))
    assert reads <= allowed


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
    "zeros",
}


def test_every_new_tensor_has_a_device():
    """The default device belongs to the caller: it may be a GPU while the batch is on the CPU."""
    faults = []
    for path in FILES:
        for call in filter(is_method_call, ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            if call.func.attr not in FACTORIES or ast.unparse(call.func.value) != "torch":
                continue
            if "device" not in {keyword.arg for keyword in call.keywords}:
                faults.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}: give device=")
    assert not faults, "\n".join(faults)


STUBS = PACKAGE.rglob("__init__.pyi")
FRONT_DOORS = sorted(".".join(("rollcorr", *path.parent.relative_to(PACKAGE).parts)) for path in STUBS)


@pytest.mark.parametrize("name", FRONT_DOORS)
def test_every_name_of_a_front_door_resolves(name):
    room = importlib.import_module(name)
    for public in room.__all__:
        assert getattr(room, public) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = room.nothing


def test_every_public_name_is_seen_by_tab():
    import rollcorr

    assert {"correct", "policy_loss", "linear_log_prob", "grpo_advantages", "health", "read_rollout_log"} <= set(
        dir(rollcorr)
    )
    assert len(set(dir(rollcorr))) == len(dir(rollcorr))
