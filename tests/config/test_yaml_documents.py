"""YAML in and out: thresholds keep their underscore, 1e-4 is a number, a key counts once."""

import pytest

from rollcorr.config.documents import MAX_DEPTH, dump_yaml, load_yaml


@pytest.mark.parametrize("band", ["0.5_2", "1_2", "0_2.0", "0.5_2.0", "0.5_2.0,0.01"])
@pytest.mark.parametrize("quote", ["", "'"])
def test_a_band_in_yaml_keeps_its_underscore_quoted_or_not(band, quote):
    loaded = load_yaml(f"rollout_rs_threshold: {quote}{band}{quote}\nsteps: 10_000\n")
    assert loaded == {"rollout_rs_threshold": band, "steps": 10000}
    assert load_yaml(dump_yaml(loaded)) == loaded


def test_yaml_reads_numbers_in_scientific_notation():
    assert load_yaml("a: 1e-4\nb: -2E3\nc: 1.5e6\nd: e5\n") == {"a": 1e-4, "b": -2000.0, "c": 1.5e6, "d": "e5"}


@pytest.mark.parametrize("text", ["a: [1", "a: 1\na: 2\n", "a: !!python/object:os.system x"])
def test_broken_yaml_and_keys_written_twice_are_errors(text):
    with pytest.raises(ValueError, match="not a YAML document"):
        load_yaml(text)


def test_yaml_merge_keys_still_work():
    assert load_yaml("base: &base {rollout_is: token}\nnew:\n  <<: *base\n  bypass_mode: false\n")["new"] == {
        "rollout_is": "token",
        "bypass_mode": False,
    }


def test_a_long_flat_list_is_not_deep():
    assert load_yaml(f"a: [{'1, ' * 2 * MAX_DEPTH}]") == {"a": [1] * 2 * MAX_DEPTH}
