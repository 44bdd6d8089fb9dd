"""The structure keeps its promises: imports point one way, heavy packages stay where they belong, all is documented."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rollcorr"
FILES = sorted(PACKAGE.rglob("*.py"))

CONFIG_FAMILY = {
    "checks",
    "config",
    "generations",
    "preset_methods",
    "presets",
    "sampling",
    "schemas",
    "thresholds",
    "yaml_text",
}

# From the bottom up: a module may import its own layer and those below it.
LAYERS = [
    {"core"} | CONFIG_FAMILY,
    {"kernels"},
    {"distributed"},
    {"aggregation", "correction", "scoring"},
    {"bypass", "gradients", "policy_loss"},
    {"diffusion"},
    {"diagnostics", "engines", "rollout_log", "simulation"},
    {"train", "integrations"},
    {"cli"},
    {"__main__"},
]
APART = [("train", "integrations"), ("integrations", "train"), ("core", "config family"), ("config family", "core")]
LIGHT = {"numpy", "rich", "torch", "typer", "yaml"} | set(sys.stdlib_module_names)


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def family(name: str) -> str:
    return "config family" if name in CONFIG_FAMILY else name


def layer(name: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"rollcorr.{name} has no layer; add it to LAYERS"
    return found[0]


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Modules that a file imports, those for type checkers aside."""
    tree = ast.parse(path.read_text())
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


@pytest.mark.parametrize("path", [f for f in FILES if unit(f) != "__init__"], ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = unit(path)
    for module in imports(path):
        if not module.startswith("rollcorr."):
            continue
        other = module.split(".")[1]
        assert layer(other) <= layer(own), f"rollcorr.{own} must not import rollcorr.{other}"
        assert (family(own), family(other)) not in APART, f"rollcorr.{own} must not import rollcorr.{other}"


@pytest.mark.parametrize("path", [f for f in FILES if unit(f) == "core"], ids=lambda f: f.name)
def test_core_knows_torch_and_the_standard_library_only(path):
    allowed = {"torch", "rollcorr"} | set(sys.stdlib_module_names)
    assert {module.split(".")[0] for module in imports(path)} <= allowed


@pytest.mark.parametrize("path", [f for f in FILES if unit(f) in CONFIG_FAMILY], ids=lambda f: f.name)
def test_configurations_know_yaml_and_the_standard_library_only(path):
    allowed = {"yaml", "rollcorr"} | set(sys.stdlib_module_names)
    assert {module.split(".")[0] for module in imports(path)} <= allowed


def test_the_package_and_the_command_line_start_without_torch():
    code = "import sys, rollcorr, rollcorr.cli, rollcorr.config, rollcorr.schemas; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_the_correction_needs_no_extra():
    """What `pip install rollcorr` alone must be able to import."""
    light = ["correction", "policy_loss", "distributed", "config", "schemas", "diffusion", "integrations.verl"]
    for name in light:
        importlib.import_module(f"rollcorr.{name}")
    for path in FILES:
        if (
            unit(path)
            in {"core", "kernels", "correction", "policy_loss", "bypass", "diffusion", "distributed", "integrations"}
            | CONFIG_FAMILY
        ):
            allowed = LIGHT | {"rollcorr"} | ({"triton"} if path.parent.name == "triton" else set())  # imported lazily
            heavy = {m.split(".")[0] for m in imports(path, top_level=True)} - allowed
            assert not heavy, f"{path.name} imports {heavy} at the top"


@pytest.mark.parametrize("path", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_every_public_name_is_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.name} has no module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


@pytest.mark.parametrize("path", [f for f in FILES if unit(f) in {"core", "kernels"}], ids=lambda f: f.name)
def test_no_value_is_read_on_the_device_path(path):
    """`.item()`, `.tolist()`, `.cpu()` and the like wait for the device; `Statistics.read` and two checks may."""
    allowed = {("statistics.py", "read"), ("layout.py", "check_cu_seqlens"), ("sampling.py", "check_kept_sets")}
    for node in ast.walk(ast.parse(path.read_text())):
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
    for call in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES):
            continue
        if ast.unparse(call.func.value) == "torch":
            given = {keyword.arg for keyword in call.keywords}
            assert "device" in given, f"{path.name}:{call.lineno}: {ast.unparse(call)}: say device="


def test_public_names_resolve():
    package = importlib.import_module("rollcorr")
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(dir(package)) == set(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
