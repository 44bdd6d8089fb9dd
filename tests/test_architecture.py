"""The structure keeps its promises: imports point one way, heavy packages stay where they belong, all is documented."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollcorr"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up: a room may import its own layer and those below it.
LAYERS = [
    {"config"},
    {"core"},
    {"kernels", "rollout_log", "run_directory"},
    {"correction", "layouts"},
    {"diffusion"},
    {"diagnostics", "engines", "simulation"},
    {"integrations", "monitor", "train"},
    {"cli", "demo"},
]
TRAINING = ("train", "integrations", "monitor")
APART = [(one, other) for one in TRAINING for other in TRAINING if one != other]
APART += [("diagnostics", "engines"), ("engines", "diagnostics")]
ENTRY_POINTS = {"__init__", "__main__"}  # of the package: they import whatever they open
LIGHT = {"lazy_loader", "numpy", "rich", "torch", "typer", "yaml"} | set(sys.stdlib_module_names)


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"rollcorr.{name} has no layer; add it to LAYERS"
    return found[0]


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


def test_the_top_level_holds_rooms_and_two_entry_points_only():
    assert {path.stem for path in PACKAGE.glob("*.py")} == ENTRY_POINTS
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set().union(*LAYERS)
    assert len(LAYERS) <= 8


@pytest.mark.parametrize(
    "path", [f for f in FILES if unit(f) not in ENTRY_POINTS], ids=lambda f: str(f.relative_to(PACKAGE))
)
def test_imports_point_down(path):
    own = unit(path)
    for module in imports(path):
        if not module.startswith("rollcorr."):
            continue
        other = module.split(".")[1]
        assert layer(other) <= layer(own), f"rollcorr.{own} must not import rollcorr.{other}"
        assert (own, other) not in APART, f"rollcorr.{own} must not import rollcorr.{other}"


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


@pytest.mark.parametrize("path", [f for f in FILES if unit(f) == "core"], ids=lambda f: f.name)
def test_core_knows_torch_and_the_standard_library_only(path):
    allowed = {"lazy_loader", "torch", "rollcorr"} | set(sys.stdlib_module_names)
    assert {module.split(".")[0] for module in imports(path)} <= allowed
    rooms = {module.split(".")[1] for module in imports(path) if module.startswith("rollcorr.")}
    assert rooms <= {"core", "config"}


@pytest.mark.parametrize("path", [f for f in FILES if unit(f) == "config"], ids=lambda f: f.name)
def test_configurations_know_yaml_and_the_standard_library_only(path):
    allowed = {"yaml", "rollcorr"} | set(sys.stdlib_module_names)
    assert {module.split(".")[0] for module in imports(path)} <= allowed


def test_the_package_and_the_command_line_start_without_torch():
    code = "import sys, rollcorr, rollcorr.cli, rollcorr.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_correction_needs_no_extra():
    """What `pip install rollcorr` alone must be able to import."""
    light = {"config", "core", "kernels", "correction", "diffusion", "integrations"}
    for name in light:
        importlib.import_module(f"rollcorr.{name}")
    for path in FILES:
        if unit(path) in light:
            allowed = LIGHT | {"rollcorr"} | ({"triton"} if path.parent.name == "triton" else set())  # imported lazily
            heavy = {m.split(".")[0] for m in imports(path, top_level=True)} - allowed
            assert not heavy, f"{path.name} imports {heavy} at the top"


@pytest.mark.parametrize("path", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_every_public_name_is_documented(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.name} has no module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


DEVICE_PATH = [f for f in FILES if unit(f) in {"core", "kernels"}]


@pytest.mark.parametrize("path", DEVICE_PATH, ids=lambda f: f.name)
def test_no_value_is_read_on_the_device_path(path):
    """`.item()`, `.tolist()`, `.cpu()` and the like wait for the device; those listed here may."""
    allowed = {
        ("mergeable_statistics.py", "read"),
        ("boundary.py", "check_cu_seqlens"),
        ("boundary.py", "_first"),  # arrays of numpy
        ("sampling.py", "check_kept_sets"),
    }
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef) or (path.name, node.name) in allowed:
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                assert call.func.attr not in {"item", "tolist", "cpu", "nonzero"}, f"{path.name}: {node.name}"


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
    "zeros",
}


@pytest.mark.parametrize("path", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_every_new_tensor_says_its_device(path):
    """Without one it lands on torch's default device, which is the caller's: a GPU, say, while the batch is not."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES):
            continue
        if ast.unparse(call.func.value) == "torch":
            given = {keyword.arg for keyword in call.keywords}
            assert "device" in given, f"{path.name}:{call.lineno}: {ast.unparse(call)}: say device="


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
