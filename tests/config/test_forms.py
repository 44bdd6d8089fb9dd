"""Every form of the options at every place that reads a configuration: the same configuration, or text that runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollcorr import Monitor, RolloutCorrectionConfig
from rollcorr.cli import app
from rollcorr.config import dump_yaml, load_yaml
from rollcorr.config.conversion import convert, resolve
from rollcorr.config.layers import merge_layers, parse_override, read_document
from rollcorr.diagnostics.log_check import choose_config
from rollcorr.diffusion import DiffusionActorConfig
from rollcorr.integrations.trl import attach
from rollcorr.integrations.verl import RolloutCorrectionConfig as VerlConfig
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
from rollcorr.train import load_config

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from trl_stand_in import StandInTrainer

SECTION = "algorithm.rollout_correction."

# Form → the options as the document of that generation has them, by dotted name.
FORMS = {
    "2025-10 flat": {
        "algorithm.rollout_is_threshold": 2.0,
        "algorithm.rollout_is": True,
        "algorithm.rollout_is_level": "sequence",
        "algorithm.rollout_is_mode": "mask",
    },
    "2025-10 nested": {
        f"{SECTION}rollout_is_threshold": 2.0,
        f"{SECTION}rollout_is": True,
        f"{SECTION}rollout_is_level": "sequence",
        f"{SECTION}rollout_is_mode": "mask",
    },
    "2025-11": {
        f"{SECTION}rollout_is": None,
        f"{SECTION}rollout_rs": "geometric",
        f"{SECTION}rollout_rs_threshold": 1.001,
        f"{SECTION}rollout_rs_threshold_lower": 0.999,
        f"{SECTION}rollout_token_veto_threshold": 1e-4,
    },
    "verl 0.7": {  # https://github.com/verl-project/verl/issues/4912
        f"{SECTION}rollout_is": "token",
        f"{SECTION}rollout_is_threshold": 2.0,
        f"{SECTION}rollout_is_batch_normalize": False,
        f"{SECTION}rollout_rs": "geometric",
        f"{SECTION}rollout_rs_threshold": 1.01,
        f"{SECTION}rollout_rs_threshold_lower": 0.99,
        f"{SECTION}rollout_token_veto_threshold": 1e-4,
        f"{SECTION}bypass_mode": True,
        f"{SECTION}loss_type": "ppo_clip",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    },
    "2025-10 alone": {  # the guide's blocks without a section
        "rollout_is_threshold": 2.0,
        "rollout_is": True,
        "rollout_is_level": "sequence",
        "rollout_is_mode": "mask",
    },
    "newest alone": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"},
    "newest": {f"{SECTION}rollout_rs": "token_k1", f"{SECTION}rollout_rs_threshold": "0.5_2"},
    "with verl's paths": {
        "algorithm.rollout_is_threshold": 2.0,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode": "processed_logprobs",
    },
    "preset": {"algorithm.rollout_correction": "decoupled_k3_rs"},
}
NEWEST = {
    "2025-10 flat": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=None, rollout_rs="seq_sum_k1", rollout_rs_threshold=2.0
    ),
    "2025-11": RolloutCorrectionConfig(
        rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001", rollout_token_veto_threshold=1e-4
    ),
    "verl 0.7": RolloutCorrectionConfig(
        rollout_is="token",
        apply_is=False,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.99_1.01",
        rollout_token_veto_threshold=1e-4,
        bypass_mode=True,
    ),
    "newest": RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2"),
    "with verl's paths": RolloutCorrectionConfig(rollout_is="token", apply_is=False),
    "preset": RolloutCorrectionConfig.decoupled_k3_rs(),
}
NEWEST["2025-10 nested"] = NEWEST["2025-10 alone"] = NEWEST["2025-10 flat"]
NEWEST["newest alone"] = NEWEST["newest"]


ENTRIES = ("train", "convert-config", "check --config", "advise", "Monitor", "TRL", "diffusion")


def overrides_of(form):
    return [f"{name}={'null' if value is None else value}" for name, value in FORMS[form].items()]


def command(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "400"})


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A healthy log, with a null beside it."""
    folder = tmp_path_factory.mktemp("forms")
    for name, rows in (("null", 800), ("log", 64)):
        rollout = torch.full((rows, 16), -3.0)
        train = rollout + 0.02 * torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
        with RolloutLogWriter(folder / f"{name}.parquet") as writer:
            writer.write(RolloutBatch.from_padded(torch.ones(rows, 16), rollout_log_prob=rollout, old_log_prob=train))
    result = command("null", str(folder / "null.parquet"), "-o", str(folder / "null.json"))
    assert result.exit_code == 0, result.stderr
    return folder / "log.parquet"


def read_by(entry, arguments, log):
    """Return the configuration that an entry point reads from a file and overrides, as on its command line."""
    files = [text for text in arguments if "=" not in text]
    if entry == "train":
        changes = [text for text in arguments if "=" in text]
        return load_config(next(iter(files), None), [*changes, "rollout.group_size=2"]).algorithm.correction
    if entry == "convert-config":
        result = command("convert-config", *arguments)
        assert result.exit_code == 0, result.stderr
        document = load_yaml(result.stdout)
        assert convert(document).schema == "newest"
        return resolve(document)
    if entry == "check --config":
        return choose_config(settings=arguments)
    if entry == "advise":
        null = ("--null", str(log.with_name("null.json")))
        result = command("advise", log, *null, *(part for text in arguments for part in ("--config", text)))
        assert result.exit_code == 0, result.stderr
        changes = shlex.split(re.search(r"over your configuration: (.*)", result.stderr)[1])
        advised = load_yaml(result.stdout[result.stdout.index("algorithm:") :])
        changed = merge_layers([{"algorithm": {"rollout_correction": choose_config(settings=arguments).to_dict()}},
                                *map(parse_override, changes)])  # fmt: skip
        assert resolve(changed) == resolve(advised)
        return choose_config(settings=arguments)

    # Python: a mapping, in which names may be dotted.
    document = read_document(arguments)
    if entry == "Monitor":
        monitor = Monitor(log.parent / str(hash(str(arguments))), document)
        monitor.close()
        return monitor.config
    if entry == "TRL":
        trainer = StandInTrainer()
        attach(trainer, document)
        return trainer._correction_config
    return DiffusionActorConfig(rollout_correction=document).correction


@pytest.mark.covering(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["file", "lines", "overrides", "overrides over a preset"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_form_runs_at_every_entry_point(form, source, entry, tmp_path, log):
    path = tmp_path / "run.yaml"
    arguments = overrides_of(form)
    if source == "file":
        path.write_text(dump_yaml(FORMS[form]), encoding="utf-8")
        arguments = [str(path)]
    elif source == "lines":
        path.write_text("# a guide's block\n\n" + "\n".join(text.replace("=", " = ") + " \\" for text in arguments))
        arguments = [str(path)]
    elif source != "overrides":
        path.write_text("algorithm: {rollout_correction: disabled}\n", encoding="utf-8")
        arguments = [str(path), *arguments]
    expected = NEWEST[form]
    if entry == "TRL" and expected.bypass_mode:  # refused; the text to type follows
        with pytest.raises(ValueError, match="set bypass_mode=False"):
            read_by(entry, arguments, log)
        arguments = [*arguments, f"{SECTION}bypass_mode=False"]
        expected = expected.with_options(bypass_mode=False, apply_is=True)
    assert read_by(entry, arguments, log) == expected


@pytest.mark.parametrize("form", FORMS)
def test_dotted_mapping_equals_newest_form(form):
    assert resolve(FORMS[form]) == NEWEST[form]


@pytest.mark.parametrize("form", ["2025-10 flat", "2025-11", "verl 0.7"])
def test_verl_adapter_prints_overrides_that_run(form):
    options = {name.rpartition(".")[2]: value for name, value in FORMS[form].items() if "rollout_ref" not in name}
    with pytest.raises(ValueError, match="In the newest form: ") as refused:
        VerlConfig.read(options)
    typed = shlex.split(str(refused.value).partition("In the newest form: ")[2])
    section = merge_layers([parse_override(text) for text in typed])["algorithm"]["rollout_correction"]
    assert resolve(section) == NEWEST[form]
    if section.get("rollout_is_threshold", 2.0) is not None:  # verl: no threshold, no weights
        assert VerlConfig.read(section).to_config() == NEWEST[form]


def test_spaces_and_comments_around_a_value():
    assert parse_override('rollout_is = "token" # weights') == {"rollout_is": "token"}


def test_dotted_threshold_of_a_file_is_a_band():
    assert load_yaml(f"{SECTION}rollout_rs_threshold: 0.5_2") == {f"{SECTION}rollout_rs_threshold": "0.5_2"}


def test_lines_set_an_option_once(tmp_path):
    path = tmp_path / "block.yaml"
    path.write_text("rollout_rs = token_k1\nrollout_rs = seq_sum_k1\n")
    with pytest.raises(ValueError, match="key 'rollout_rs' is written twice"):
        read_document([str(path)])
    path.write_text("rollout_is: token\nnote: a = b\n")
    assert read_document([str(path)]) == {"rollout_is": "token", "note": "a = b"}


@pytest.mark.parametrize(
    "document",
    [
        {f"{SECTION}rollout_is_threshold": 3.0, "algorithm.rollout_correction": "bypass_pg_is"},
        {"algorithm": {"rollout_correction": "bypass_pg_is"}, f"{SECTION}rollout_is_threshold": 3.0},
        {f"{SECTION}rollout_is_threshold": 3.0, "algorithm": {"rollout_correction": "bypass_pg_is"}},
    ],
)
def test_option_with_preset_prints_overrides_that_run(document):
    with pytest.raises(ValueError, match=r"'algorithm\.rollout_correction' is written twice") as refused:
        resolve(document)
    typed = shlex.split(str(refused.value).partition("as overrides: ")[2])
    assert load_config(None, typed).algorithm.correction == RolloutCorrectionConfig.bypass_pg_is(threshold=3.0)


def test_dotted_option_joins_its_block():
    document = {f"{SECTION}rollout_is": "token", "algorithm": {"rollout_correction": {"rollout_is_threshold": 3.0}}}
    assert resolve(document) == RolloutCorrectionConfig.token_is(threshold=3.0)
    document["algorithm"]["rollout_correction"]["rollout_is"] = "sequence"
    with pytest.raises(ValueError, match=r"rollout_is' is written twice.*rollout_is=token .*rollout_is=sequence"):
        resolve(document)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # Three alternatives, one below the other.
            'rollout_rs = "token_k1" # Token-level ratio bounds\nrollout_rs_threshold = "0.6_1.6"\n'
            'rollout_rs = "seq_mean_k3"\nrollout_rs_threshold = 0.01\n',
            RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.6_1.6"),
        ),
        (
            'Configuration: loss_type = "reinforce" (requires bypass_mode = true)',
            RolloutCorrectionConfig(loss_type="reinforce", bypass_mode=True),
        ),
    ],
)
def test_pasted_prose_prints_overrides_that_run(text, expected, tmp_path):
    path = tmp_path / "block.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="Write overrides instead") as refused:
        read_document([str(path)])
    typed = shlex.split(str(refused.value).partition("overrides instead: ")[2])
    assert resolve(read_document(typed)) == expected


@pytest.mark.parametrize("rest", ["requires bypass_mode = true)", "bypass_mode = true): " + 300 * "x"])
@pytest.mark.parametrize("value", ['"reinforce" (', "reinforce. "])
def test_prose_as_override_prints_overrides_that_run(rest, value):
    prose = f"Configuration: loss_type = {value}{rest}"
    with pytest.raises(ValueError, match="Write overrides instead") as refused:
        read_document([prose])
    typed = shlex.split(str(refused.value).partition("overrides instead: ")[2])
    assert resolve(read_document(typed)) == RolloutCorrectionConfig(loss_type="reinforce", bypass_mode=True)


def test_suggested_overrides_keep_lists_in_order():
    with pytest.raises(ValueError, match="Write overrides instead") as refused:
        read_document(["Set rollout_rs = token_k1,seq_max_k2 with rollout_rs_threshold = 0.5_2.0,3.0, say"])
    typed = shlex.split(str(refused.value).partition("overrides instead: ")[2])
    assert [text.partition("=")[2] for text in typed] == ["token_k1,seq_max_k2", "0.5_2.0,3.0"]


def test_class_names_the_call_that_reads_older_options():
    old = {"rollout_is": "sequence", "bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
    with pytest.raises(TypeError, match=r"write rollcorr\.config\.convert\(dict\(…\)\)\.config"):
        RolloutCorrectionConfig(**old)
    assert convert(dict(**old)).config == RolloutCorrectionConfig.bypass_pg_is()


def test_older_overrides_replace_a_preset(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {rollout_correction: bypass_pg_is}\n", encoding="utf-8")
    flat = ["algorithm.rollout_is_threshold=3.0", "algorithm.rollout_is=true"]
    assert load_config(path, flat).algorithm.correction == RolloutCorrectionConfig.token_is(threshold=3.0)
    newest = load_config(path, [f"{SECTION}rollout_is_threshold=3.0"]).algorithm.correction
    assert newest == RolloutCorrectionConfig.bypass_pg_is(threshold=3.0)
    off = load_config(path, [*flat, "algorithm.rollout_correction=null"])
    assert off.algorithm.correction is None


MIXTURES = {
    "newest under 2025-10": [
        f"{SECTION}rollout_is=true",
        f"{SECTION}rollout_is_threshold=3",
        f"{SECTION}rollout_is_batch_normalize=true",
    ],
    "levels of two": [f"{SECTION}rollout_is=token", f"{SECTION}rollout_is_level=token"],
    "bands of two": [
        f"{SECTION}bypass_old_logprob_for_rollout=true",
        f"{SECTION}rollout_rs=token_k1",
        f"{SECTION}rollout_rs_threshold=0.5_2",
    ],
    "a switch under both names": [
        f"{SECTION}rollout_is=true",
        f"{SECTION}bypass_old_logprob_for_rollout=true",
        f"{SECTION}bypass_mode=true",
    ],
    "a loss under both names": [
        f"{SECTION}rollout_is=true",
        f"{SECTION}use_pure_rollout_correction=true",
        f"{SECTION}bypass_mode=true",
        f"{SECTION}loss_type=reinforce",
    ],
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixture_prints_overrides_that_run(mixture):
    with pytest.raises(ValueError, match="mix generations") as refused:
        load_config(None, ["algorithm.rollout_correction=disabled", *MIXTURES[mixture]])
    typed = shlex.split(str(refused.value).partition("In the newest form: ")[2])
    assert typed
    assert load_config(None, typed).algorithm.correction is not None


@pytest.mark.parametrize("criteria", ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "token_k1,seq_max_k2"])
def test_missing_threshold_prints_one_to_start(criteria):
    given = [f"{SECTION}rollout_rs={criteria}"]
    with pytest.raises(ValueError, match="To start, write") as refused:
        load_config(None, given)
    typed = str(refused.value).partition("To start, write ")[2]
    assert load_config(None, [*given, typed]).algorithm.correction.rollout_rs == criteria


def test_mixture_without_conversion_states_first_fix():
    with pytest.raises(ValueError, match=r"mix generations .* First fix this: rollout_rs 'token_k1' needs"):
        resolve({"rollout_correction": {"rollout_is": True, "rollout_rs": "token_k1"}})


def test_flat_options_over_a_block_print_the_override(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 2}}\n")
    flat = ["algorithm.rollout_is_threshold=3.0", "algorithm.rollout_is=true"]
    with pytest.raises(ValueError, match=r"write (\S+) before the overrides") as refused:
        _ = load_config(path, flat).algorithm.correction
    typed = re.search(r"write (\S+) before", str(refused.value))[1]
    assert load_config(path, [typed, *flat]).algorithm.correction == RolloutCorrectionConfig.token_is(threshold=3.0)


@pytest.mark.parametrize(
    ("override", "typed"),
    [
        ("actor_rollout_ref.rollout.calculate_log_probs=false", "actor_rollout_ref.rollout.calculate_log_probs=true"),
        ("actor_rollout_ref.rollout.algo.noise_level=1.2", "recipe=flow_grpo"),
        ("rollout_is_treshold=2.0", "algorithm.rollout_correction.rollout_is_threshold=2.0"),
        ("actor_rollout_ref.rollout.logprobs_mode=raw_logits", "raw_logprobs"),
        ("actor_rollout_ref.rollout.temprature=1", "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_refused_path_prints_what_to_type(override, typed):
    with pytest.raises(ValueError) as refused:
        load_config(None, [override])
    assert typed.partition("=2.0")[0] in str(refused.value)
    if "=" in typed:
        assert load_config(None, [typed] if "recipe" not in typed else [typed, override])


def test_two_paths_of_one_option_print_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref.rollout.n: 4\nrollout.group_size: 8\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"'rollout\.group_size' is written twice.*=4 rollout\.group_size=8$"):
        load_config(path)
    path.write_text("actor_rollout_ref.rollout.n: 4\nrollout.group_size: 4\n", encoding="utf-8")
    assert load_config(path).rollout.group_size == 4


def test_verl_paths_set_options_of_both_recipes():
    language = load_config(
        None,
        [
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.temperature=0.7",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "trainer.total_training_steps=5",
            "algorithm.filter_groups.enable=True",
            "reward_model.overlong_buffer.enable=True",
            "algorithm.filter_groups.max_num_gen_batches=10",
            "reward_model.overlong_buffer.len=16",
            "reward_model.overlong_buffer.penalty_factor=0.5",
        ],
    )
    dapo = language.rollout
    assert (dapo.max_rounds, dapo.overlong_buffer, dapo.overlong_penalty) == (10, 16, 0.5)
    assert (language.rollout.group_size, language.optim.lr, language.steps) == (4, 1e-6, 5)
    assert (language.rollout.sampling.temperature, language.rollout.sampling.logprobs) == (0.7, "processed")
    pictures = load_config(
        None,
        [
            "recipe=flow_grpo",
            "actor_rollout_ref.rollout.algo.noise_level=1.2",
            "rollout.algo.sde_window_size=2",
            "actor_rollout_ref.rollout.algo.sde_window_range=[0,5]",
            "actor_rollout_ref.model.lora_rank=64",
            "actor_rollout_ref.model.algorithm=mix_grpo",
            "actor_rollout_ref.actor.diffusion_loss.loss_mode=grpo_guard",
            "actor_rollout_ref.rollout.algo.sample_strategy=random",
            "actor_rollout_ref.rollout.dtype=float16",
        ],
    )
    rollout = pictures.rollout
    assert (rollout.sde_window, rollout.dtype, pictures.algorithm.loss.loss_mode) == ("shared", "float16", "grpo_guard")
    assert (rollout.noise_level, rollout.sde_window_range, pictures.model.lora.rank) == (1.2, (0, 5), 64)
