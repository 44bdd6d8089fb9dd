"""The byte tokenizer reads anything; policies load from directories, or raise with the reason."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.engines.transport.weight_folder import checkpoint_weights, read_policy
from rollcorr.train.grpo import engine_null, policy
from rollcorr.train.grpo.policy import load_policy, make_byte_tokenizer, make_tiny_policy, save_policy
from rollcorr.train.model_files import demo_model_directory

TOKENIZER = make_byte_tokenizer()


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=50)
def test_any_text_survives_the_byte_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_the_tiny_policy_has_one_million_parameters_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    policy = make_tiny_policy()
    assert 1_000_000 < sum(p.numel() for p in policy.model.parameters()) < 4_000_000
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_weights_follow_from_the_seed(micro_policy):
    fields = {key: getattr(micro_policy.model.config, key) for key in ("hidden_size", "intermediate_size", "head_dim")}
    first, again, other = (load_policy(None, config=fields, seed=seed) for seed in (3, 3, 4))
    weights = [policy.model.get_input_embeddings().weight for policy in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_saved_policy_loads_as_it_was(micro_policy, tmp_path):
    save_policy(micro_policy, tmp_path / "policy")
    loaded = load_policy(str(tmp_path / "policy"))
    for (name, mine), (other, theirs) in zip(
        micro_policy.model.state_dict().items(), loaded.model.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, theirs)
    assert loaded.encode("1+1=?\n") == micro_policy.encode("1+1=?\n")
    assert (loaded.eos_token_id, loaded.pad_token_id) == (micro_policy.eos_token_id, micro_policy.pad_token_id)


def test_a_half_precision_checkpoint_trains_in_float32(micro_policy, tmp_path):
    micro_policy.model.bfloat16()
    save_policy(micro_policy, tmp_path / "policy")
    assert {p.dtype for p in load_policy(str(tmp_path / "policy")).model.parameters()} == {torch.float32}


def test_the_demo_policy_comes_with_the_checkout_and_is_small():
    files = [path for path in demo_model_directory("demo").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8_000_000
    policy = load_policy("demo")
    assert policy.encode("9") == TOKENIZER.encode("9")


def test_a_wrong_path_says_what_is_missing(micro_policy, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        load_policy(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        load_policy(str(tmp_path))
    save_policy(micro_policy, tmp_path / "policy")
    for path in (tmp_path / "policy").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="has a model but no tokenizer"):
        load_policy(str(tmp_path / "policy"))
    shutil.rmtree(tmp_path / "policy")


def test_exactly_one_source_of_weights_is_needed():
    for path, config in ((None, None), ("demo", {})):
        with pytest.raises(ValueError, match=r"either model.path or model.config"):
            load_policy(path, config=config)


@pytest.fixture
def no_questions(monkeypatch):
    """Count the questions on the terminal; a job without one would wait for the answer."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "n")
    return asked


def with_code(folder, mark):
    """Make a model's folder one with code of its own, which leaves a mark when it runs."""
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    return folder


@pytest.mark.parametrize("load", ["policy", "null", "weights"])
def test_a_folder_with_code_is_rejected_without_a_question(micro_policy, tmp_path, no_questions, load):
    save_policy(micro_policy, tmp_path / "model")
    weights = dict(checkpoint_weights(tmp_path / "model"))
    folder = with_code(tmp_path / "model", tmp_path / "it_ran")
    loads = {
        "policy": lambda: load_policy(str(folder)),
        "null": lambda: engine_null._load(str(folder), with_tokenizer=False),
        "weights": lambda: read_policy(folder, weights),
    }
    with pytest.raises(ValueError, match="contains custom code"):
        loads[load]()
    assert no_questions == []
    assert not (tmp_path / "it_ran").exists()


def test_every_load_forbids_code_of_the_folder():
    """A new call of transformers or diffusers without this argument would prompt on the terminal."""
    calls = 0
    for file in (Path(policy.__file__).parents[2]).rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner = call.func.value
            is_automatic = isinstance(owner, ast.Name) and owner.id.startswith(("Auto", "DiffusionPipeline"))
            if is_automatic and call.func.attr in ("from_pretrained", "from_config"):
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                assert ast.unparse(given["trust_remote_code"]) == "False", f"{file}:{call.lineno}"
                calls += 1
    assert calls == 6
