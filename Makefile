.DEFAULT_GOAL := help
.PHONY: help install demo demo-seeds test test-triton test-ray check docs bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard rollcorr/kernels/correction/cpu/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP) ## Create .venv with everything (torch is pinned by constraints.txt)

demo: $(STAMP) ## Train a small model on bf16 rollouts, then write the report (under 5 minutes on 2 cores)
	rm -rf runs/demo
	OMP_WAIT_POLICY=PASSIVE $(BIN)/rollcorr train examples/train/demo.yaml
	$(BIN)/rollcorr report runs/demo || test $$? -eq 1

demo-seeds: $(STAMP) ## The demo for three seeds, with the acceptance figures at the end
	rm -rf runs/demo-seeds
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo_seeds.py

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-triton: $(STAMP) ## Test the GPU kernels without a GPU: interpreted, and compiled for four GPUs (installs Triton, 1 GB)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[triton]'
	$(BIN)/python -m pytest tests/kernels/test_triton_*.py

test-ray: $(STAMP) ## Test `rollcorr check --ray` on a Ray cluster of this machine (installs Ray)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest tests/diagnostics/test_ray_cluster.py

check: $(STAMP) ## Lint, format and type checks; generated pages are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/generate_docs.py --check

docs: $(STAMP) ## Write the generated pages
	$(BIN)/python tools/generate_docs.py

bench: $(STAMP) ## Time the correction against verl 0.9.1, installed in an environment of its own
	$(BIN)/python benchmarks/correction.py

clean: ## Remove what was built and run
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
