"""A checkpoint is valid or an error names it: damaged, foreign or non-finite files are never trained on."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollcorr.run_directory.directory import paths_by_step, step_of
from rollcorr.train import checkpoint as checkpoints
from rollcorr.train.checkpoint import (
    NonFiniteWeightsError,
    TrainState,
    delete_older_checkpoints,
    has_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    newest_sound_checkpoint,
    save_checkpoint,
)

RECORDS = {"config.yaml": "steps: 3\nname: ü\n", "history.json": "[]\n"}
FILES = (
    "engine.safetensors", "manifest.json", "optimizer.pt", "policy/config.json", "policy/model.safetensors",
    "records/config.yaml", "records/history.json", "state.json",
)  # fmt: skip


class Toy:
    """A linear layer that is trained for a step with each save."""

    def __init__(self, directory, *, seed=0, size=8):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = torch.nn.Linear(size, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.directory = directory / "checkpoints"
        self.seed = seed

    def save_policy(self, folder):
        (folder / "policy").mkdir()
        (folder / "policy" / "config.json").write_text(f'{{"seed": {self.seed}}}', encoding="utf-8")
        save_file(self.model.state_dict(), folder / "policy" / "model.safetensors")

    def save(self, step, *, records=RECORDS, keep=2):
        self.model.weight.square().sum().backward()
        self.optimizer.step()
        return save_checkpoint(
            self.directory,
            self.save_policy,
            self.optimizer,
            TrainState(step=step, engine_version=max(step - 1, 0), skipped_steps=self.seed),
            records=records,
            engine_weights={"weight": self.model.weight.detach().clone()},
            keep=keep,
        )


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs with checkpoints of steps 1 and 2; no file of one equals a file of the other."""
    directories = []
    for seed in (1, 2):
        toy = Toy(tmp_path_factory.mktemp("run"), seed=seed)
        for step in (1, 2):
            toy.save(step, records={"config.yaml": f"seed: {seed}\n", "history.json": f"[{seed}]\n"})
        directories.append(toy.directory)
    return directories


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def cut(file, _):
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file, _):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def take_another_runs(file, other):
    shutil.copyfile(other, file)


DAMAGES = {
    "missing": lambda file, _: file.unlink(),
    "empty": lambda file, _: file.write_bytes(b""),
    "cut": cut,
    "one bit flipped": flip_a_bit,
    "another run's": take_another_runs,
}
REASONS = {
    "missing": "is missing",
    "empty": "is cut",
    "cut": "is cut",
    "one bit flipped": "altered",
    "another run's": "of another",
}


def test_a_checkpoint_comes_back_as_it_was_saved(toy):
    path = toy.save(3)
    found, damaged = newest_sound_checkpoint(toy.directory)
    assert (found.path, found.state, damaged) == (path, TrainState(step=3, engine_version=2), [])
    assert found.records == RECORDS
    assert torch.equal(found.engine_weights["weight"], toy.model.weight)
    assert torch.equal(load_file(path / "policy" / "model.safetensors")["weight"], toy.model.weight)
    saved, mine = found.optimizer["state"][0], toy.optimizer.state_dict()["state"][0]
    assert all(torch.equal(saved[name], mine[name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    assert tuple(sorted(files)) == FILES


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_used(two_runs, tmp_path, name, damage):
    directory = shutil.copytree(two_runs[0], tmp_path / "checkpoints")
    other = two_runs[1] / "step_000002" / name
    DAMAGES[damage](directory / "step_000002" / name, other)

    found, damaged = newest_sound_checkpoint(directory)
    assert found.path.name == "step_000001"
    (line,) = damaged
    assert "step_000002" in line

    # A whole manifest of another run contradicts the first file.
    named = "engine.safetensors" if (name, damage) == ("manifest.json", "another run's") else name
    assert f"{named} " in line
    assert REASONS[damage] in line
    assert latest_checkpoint(directory) == directory / "step_000001"


@pytest.mark.parametrize("number", checkpoints.NOT_NOW)
@pytest.mark.parametrize("name", ["manifest.json", "optimizer.pt"])
def test_a_file_that_cannot_be_opened_now_is_not_taken_for_damaged(toy, monkeypatch, name, number):
    """An older checkpoint would be used, and the sound one deleted at the next save."""
    toy.save(1)
    toy.save(2)
    open_path = Path.open

    def not_now(path, *arguments, **options):
        if path.name == name:
            raise OSError(number, "not now")
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", not_now)
    with pytest.raises(OSError, match="not now"):
        newest_sound_checkpoint(toy.directory)


def test_a_sound_checkpoint_that_this_program_cannot_read_stops_the_run(toy, monkeypatch):
    toy.save(1)
    toy.save(2)

    def load(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=r"although its files are as they were written: optimizer\.pt: CUDA error"):
        newest_sound_checkpoint(toy.directory)


def test_no_bit_of_a_manifest_is_without_a_check(toy):
    path = toy.save(1)
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    for position in range(0, len(whole), 3):
        flipped = whole[position] ^ (1 << position % 8)
        manifest.write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
        with pytest.raises(checkpoints.DamagedCheckpointError, match=r"manifest\.json is"):
            load_checkpoint(path)


@pytest.mark.parametrize(
    "content",
    [b"{}", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"step": [], "files": {"a": 3}}'],
)
def test_a_garbled_manifest_causes_no_traceback(two_runs, tmp_path, content):
    directory = shutil.copytree(two_runs[0], tmp_path / "checkpoints")
    (directory / "step_000002" / "manifest.json").write_bytes(content)
    found, (line,) = newest_sound_checkpoint(directory)
    assert found.path.name == "step_000001"
    assert "manifest.json is cut or altered" in line


def test_a_checkpoint_of_another_step_is_not_used(toy):
    path = toy.save(1)
    shutil.copytree(path, path.with_name("step_000007"))
    found, (line,) = newest_sound_checkpoint(toy.directory)
    assert found.path.name == "step_000001"
    assert "manifest.json is of another checkpoint (step 1)" in line


def test_all_checkpoints_damaged_is_not_the_same_as_none(toy):
    assert newest_sound_checkpoint(toy.directory) == (None, [])
    assert not has_checkpoints(toy.directory)
    for step in (1, 2):
        (toy.save(step) / "optimizer.pt").unlink()
    found, lines = newest_sound_checkpoint(toy.directory)
    assert found is None
    assert [line.split("cannot be used: ")[1] for line in lines] == ["optimizer.pt is missing"] * 2
    assert has_checkpoints(toy.directory)
    assert latest_checkpoint(toy.directory) is None


def test_steps_sort_as_numbers_and_foreign_names_are_passed_over(toy):
    for step in (999_998, 999_999, 1_000_000):
        toy.save(step)
    assert names(toy.directory) == ["step_1000000", "step_999999"]
    for foreign in ("step_x", "step_", "step_7", "step_²", "step_1000001.old", "step_00000001"):
        (toy.directory / foreign).mkdir()
    (toy.directory / "step_2000000").write_text("a file", encoding="utf-8")
    found, (line,) = newest_sound_checkpoint(toy.directory)
    assert found.state.step == 1_000_000
    assert "step_2000000" in line
    assert list(paths_by_step(toy.directory)) == [999_999, 1_000_000, 2_000_000]
    assert step_of(toy.directory / "step_x") is None
    toy.save(1_000_001)
    assert (toy.directory / "step_x").is_dir()


@pytest.mark.parametrize("place", ["weights", "moments", "engine"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_saved_and_the_last_checkpoint_stays(toy, place, value):
    toy.save(1)
    weight = toy.model.weight
    engine = {"head": torch.ones(3)}
    tensor = {"weights": weight, "moments": toy.optimizer.state[weight]["exp_avg_sq"], "engine": engine["head"]}[place]
    tensor.data.view(-1)[1] = value
    before = names(toy.directory)
    where = {"weights": "trained tensor 0", "moments": "exp_avg_sq of tensor 0", "engine": "head of the engine"}[place]
    with pytest.raises(NonFiniteWeightsError, match=rf"^{where} .* has 1 values of \d+ that are NaN or infinite"):
        save_checkpoint(
            toy.directory, toy.save_policy, toy.optimizer, TrainState(step=2), records=RECORDS, engine_weights=engine
        )
    assert names(toy.directory) == before
    assert newest_sound_checkpoint(toy.directory)[0].state.step == 1


def test_a_step_that_was_reached_again_replaces_its_checkpoint(toy):
    toy.save(1)
    toy.save(2)
    toy.save(1, records={"config.yaml": "second\n"})
    assert names(toy.directory) == ["step_000001"]  # step 2 came from weights that are gone
    assert newest_sound_checkpoint(toy.directory)[0].records == {"config.yaml": "second\n"}


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(toy):
    path = toy.save(1)
    path.rename(path.with_name(".step_000001.set-aside"))
    assert has_checkpoints(toy.directory)
    assert newest_sound_checkpoint(toy.directory)[0].path == path
    assert names(toy.directory) == ["step_000001"]


def test_what_a_killed_run_left_half_written_is_removed(toy):
    toy.save(1)
    for name in (".step_000002.partial", "..step_000001.set-aside.partial", ".step_000001.set-aside"):
        (toy.directory / name / "policy").mkdir(parents=True)
    (toy.directory / ".history.json.partial").touch()
    assert newest_sound_checkpoint(toy.directory)[0].state.step == 1
    assert names(toy.directory) == ["step_000001"]


def test_a_run_that_was_killed_before_it_deleted_an_old_checkpoint_deletes_it_when_it_continues(toy):
    for step in (1, 2, 3, 9):
        toy.save(step, keep=9)
    delete_older_checkpoints(toy.directory, 3, keep=2)
    assert names(toy.directory) == ["step_000002", "step_000003", "step_000009"]


def test_a_half_deleted_checkpoint_is_none(toy, monkeypatch):
    for step in (1, 2):
        toy.save(step)

    def killed(path, **_):
        if path.is_dir():
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("rollcorr.run_directory.durable_files.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        toy.save(3)
    monkeypatch.undo()
    assert names(toy.directory) == [".step_000001.partial", "step_000002", "step_000003"]
    found, damaged = newest_sound_checkpoint(toy.directory)
    assert (found.state.step, damaged) == (3, [])


def test_every_file_and_folder_reaches_the_disk_before_the_name(toy, monkeypatch):
    """In the order of the calls: all files, their folders, then the rename, then the parent folder."""
    toy.save(1)
    events, fsync, replace = [], os.fsync, os.replace

    def note_fsync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def note_replace(source, target):
        events.append(f"rename {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    toy.save(2)
    place = str(toy.directory)
    named = events.index(f"rename {place}/step_000002")
    partial = f"{place}/.step_000002.partial"
    assert {f"{partial}/{name}" for name in FILES} < set(events[:named])
    assert {f"{partial}/policy", f"{partial}/records", partial} < set(events[:named])
    assert events[named + 1] == place


@pytest.mark.parametrize("share", [i / 10 for i in range(10)])
def test_a_full_disk_leaves_what_was_sound_and_is_reported(tmp_path, share):
    """A limit on the size of files stands in for the disk; the kernel refuses the write in the same way."""
    toy = Toy(tmp_path, size=96)
    path = toy.save(1)
    largest = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * largest), hard))
    try:
        with pytest.raises(OSError, match=r"File too large\): [\d,]+ bytes needed, [\d,]+ free; free some") as caught:
            toy.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert names(toy.directory) == ["step_000001"]
    assert newest_sound_checkpoint(toy.directory)[1] == []
    toy.save(2)
    assert load_checkpoint(toy.directory / "step_000002").state.step == 2


def test_a_failure_that_is_not_the_disks_keeps_its_own_message(toy):
    def broken(folder):
        raise RuntimeError("a tensor shares memory")

    with pytest.raises(RuntimeError, match="shares memory"):
        save_checkpoint(toy.directory, broken, toy.optimizer, TrainState())
    assert names(toy.directory) == []


def test_a_manifest_lists_step_size_and_digest(toy):
    path = toy.save(4)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["step"] == 4
    assert sorted([*manifest["files"], "manifest.json"]) == list(FILES)
    assert all(entry["bytes"] == (path / name).stat().st_size for name, entry in manifest["files"].items())
