"""The list of statistics: every implementation computes exactly these rows; one that lacks a row names it."""

from __future__ import annotations

import pytest
import torch
from correction_cases import configuration, everything

from rollcorr.kernels.correction import dispatch, implementations
from rollcorr.kernels.correction.cpu import kernel
from rollcorr.kernels.correction.cpu.library import library, status
from rollcorr.kernels.correction.dispatch import correction_kernel
from rollcorr.kernels.correction.rows import CRITERION_ROWS, ROWS, Abilities, Computed, missing_rows, rows_of
from rollcorr.kernels.correction.triton.plan import abilities

needs_library = pytest.mark.skipif(status()[0] is None, reason="the C kernel was not built")
VETO = next(row for row in ROWS if row.name == "vetoed_sequences")


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


def test_a_row_is_listed_once():
    keys = [(row.kind, row.name) for row in (*ROWS, *CRITERION_ROWS)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("config", [configuration(), everything(rollout_is_batch_normalize=True)])
@pytest.mark.parametrize("impl", [name for name, (usable, _) in implementations().items() if usable])
def test_an_implementation_leaves_the_rows_of_the_list_in_its_order(impl, config):
    names = correction_kernel(*batch(), config, impl=impl).statistics.names
    for kind in ("sums", "moments", "extremes"):
        assert names[kind] == tuple(row.name for row in rows_of(config) if row.kind == kind)


@needs_library
def test_the_compiled_kernel_computes_the_list_and_nothing_else():
    lib, listed = (
        library(),
        {kind: {r.name for r in ROWS if r.kind == kind} for kind in ("sums", "moments", "extremes")},
    )
    assert not lib.abilities.missing
    assert {kind: set(lib.names[kind]) for kind in listed} == listed


def test_the_source_of_the_triton_kernels_names_every_row():
    assert not abilities().missing


def test_what_lacks_a_row_is_passed_over_where_the_row_is_needed():
    computed = {(row.kind, row.name) for row in (*ROWS, *CRITERION_ROWS)} - {("sums", "vetoed_sequences")}
    lacking = Abilities(missing_rows(computed), ("k1", "k2", "k3"), ("token",))
    assert lacking.missing == (VETO,)
    assert lacking.why_not(configuration()) is None
    reason = lacking.why_not(configuration(rollout_token_veto_threshold=1e-3))
    assert reason == f"it does not compute the row 'vetoed_sequences' (sums: {VETO.what})"
    assert lacking.why_not(configuration(rollout_rs="seq_sum_k3", rollout_rs_threshold=1.0)).endswith("'seq_sum_k3'")


@needs_library
def test_a_compiled_kernel_that_lacks_a_row_says_which(monkeypatch):
    lib = library()._replace(abilities=library().abilities._replace(missing=(VETO,)))
    monkeypatch.setattr(kernel, "library", lambda level=None: lib)
    monkeypatch.setattr("rollcorr.kernels.correction.dispatch.library", lambda: lib)
    config = configuration(rollout_token_veto_threshold=2e-3)
    kernel._missing_rows_reason.cache_clear()
    assert correction_kernel(*batch(), config).statistics.sum("vetoed_sequences") == 0
    with pytest.raises(ValueError, match=r"does not compute the row 'vetoed_sequences' .*; use impl='auto' or 'torch'"):
        correction_kernel(*batch(), config, impl="cpu")
    usable, note = implementations()["cpu"]
    assert not usable
    assert "'vetoed_sequences'" in note
    kernel._missing_rows_reason.cache_clear()


def test_auto_takes_the_reference_where_torch_lacks_a_row_and_torch_by_name_says_which(monkeypatch):
    def lacking(*args: object, **options: object) -> None:
        Computed({}, {}, {}).statistics(configuration(), "torch")

    monkeypatch.setattr(dispatch, "torch_correction", lacking)
    monkeypatch.setattr(dispatch, "_fastest_implementation", lambda batch, config: "torch")
    whole = correction_kernel(*batch(), configuration(), impl="reference")
    assert correction_kernel(*batch(), configuration()).statistics.sum("tokens") == whole.statistics.sum("tokens") == 6
    out = None, torch.zeros(2, 3, dtype=torch.bool)
    assert correction_kernel(*batch(), configuration(), out=out).loss_mask is out[1]
    assert out[1].all()
    with pytest.raises(ValueError, match="impl='torch' cannot take this batch: it does not compute the row 'tokens'"):
        correction_kernel(*batch(), configuration(), impl="torch")
    with pytest.raises(ValueError, match="does not compute the row 'tokens'"):
        correction_kernel(*batch(), configuration(), reduce=lambda table, rows: None)


def test_a_row_that_is_not_computed_or_not_listed_is_an_error_that_names_it():
    config = configuration()
    with pytest.raises(ValueError, match="impl='torch' cannot take this batch: it does not compute the row 'tokens'"):
        Computed({}, {}, {}).statistics(config, "torch")
    complete = Computed({}, {}, {})
    for row in rows_of(config):
        getattr(complete, row.kind)[row.name] = torch.zeros(())
    complete.sums["surprise"] = torch.zeros(())
    with pytest.raises(ValueError, match=r"computes \['surprise'\], which .*rows.py lacks"):
        complete.statistics(config, "torch")
