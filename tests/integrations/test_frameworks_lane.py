"""`make test-frameworks SOURCES=DIR`: which versions of which framework it finds in a folder."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "test_frameworks.py"


@pytest.fixture(scope="module")
def lane():
    spec = importlib.util.spec_from_file_location("test_frameworks_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("", encoding="utf-8")
    return folder


def test_checkouts_wheels_and_source_archives_are_found_and_nothing_else(lane, tmp_path):
    sources, packed, unpacked = tmp_path / "sources", tmp_path / "packed", tmp_path / "unpacked"
    package(sources / "main", "verl")
    package(sources / "unrelated", "vllm")
    shutil.make_archive(str(sources / "trl-1.17.0"), "zip", package(packed / "wheel", "trl"))
    (sources / "trl-1.17.0.zip").rename(sources / "trl-1.17.0-py3-none-any.whl")
    package(packed / "archive" / "verl-0.9.1", "verl")
    shutil.make_archive(str(sources / "verl-0.9.1"), "gztar", packed / "archive")
    found = [(name, root.name) for name, root in lane.found(sources, unpacked)]
    assert sorted(found) == [("trl", "trl-1.17.0-py3-none-any.whl-unpacked"), ("verl", "main"), ("verl", "verl-0.9.1")]


def test_another_version_takes_the_place_of_the_installed_one_and_brings_no_other_module(lane, tmp_path):
    checkout = package(tmp_path / "checkout", "json")  # a name that is surely there already
    package(checkout, "tests")
    path = lane.alone(checkout / "json", tmp_path)
    assert [entry.name for entry in path.iterdir()] == ["json"]
    command = [sys.executable, "-c", "import json; print(json.__file__)"]
    done = subprocess.run(command, env={"PYTHONPATH": str(path)}, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parent == path / "json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an environment"),
        (["--verl", sys.executable, "no/such/folder"], "SOURCES must be a folder; got no/such/folder"),
        (["--verl", sys.executable, "empty"], "empty holds no sources and no wheel of verl"),
    ],
)
def test_a_lane_that_would_test_nothing_is_refused(arguments, message, tmp_path):
    (tmp_path / "empty").mkdir()
    done = subprocess.run([sys.executable, str(TOOL), *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "example"), [("trl", "trl_two_processes.py"), ("verl", "verl_separate_async.py")], ids=["trl", "verl"]
)
def test_a_lane_runs_its_example_of_scale(lane, name, example):
    assert (TOOL.parents[1] / "examples" / "scale" / example).exists()
    files = [path for pattern in lane.LANES[name][0] for path in Path(__file__).parent.glob(pattern)]
    assert any(f'"{example}"' in path.read_text(encoding="utf-8") for path in files)
