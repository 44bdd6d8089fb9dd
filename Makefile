.DEFAULT_GOAL := help
.PHONY: help install demo demo-seeds demo-diffusion demo-diffusion-seeds test test-oldest coverage test-anywhere
.PHONY: test-slow test-mutants test-crash test-crash-bugs test-hostile test-oracle test-sanitizers test-triton test-compile calibration test-browser test-ray test-arm test-verl
.PHONY: test-trl test-frameworks test-vllm check docs front-figures docs-site lock release-check wheels bench gpu-wheels gpu gpu-dry
.PHONY: laboratory conformance diagnosis diagnosis-vllm judge study-measured study-measured-quick study-trained
.PHONY: training-bench training-bench-quick clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VERL_VENV := .venv-verl
VERL_STAMP := $(VERL_VENV)/.installed
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
OLDEST_VENV := .venv-oldest
OLDEST_STAMP := $(OLDEST_VENV)/.installed
OLDEST_TORCH := 2.6.0
# Where the judge's logs are.
JUDGE_LOGS ?= runs/judge
BIN_OF_VERL := $(VERL_VENV)/bin
BIN_OF_TRL := $(TRL_VENV)/bin
VERL_NEEDS := accelerate aiohttp cachetools cloudpickle codetiming datasets dill fastapi importlib_metadata orjson pandas peft
VERL_NEEDS += pybind11 pylatexenc pyvers pyzmq ray torchdata TransferQueue uvicorn
# What `pip install rollcorr` alone must be able to do.
OLDEST_TESTS := tests/config tests/core tests/correction tests/diffusion tests/distributed tests/kernels tests/layouts
# What runs once per implementation of the correction.
BEHAVIOR := tests/correction/test_oracle.py tests/test_known_failures.py tests/correction/test_correction.py tests/correction/test_correction_golden.py \
	tests/correction/test_correction_out.py tests/kernels/test_detail.py tests/test_recipes.py

##@ First steps

help: ## Show this list
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-22s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

# HASHES=1, as the workflows set it, installs everything but torch from requirements.lock first, in pip's hash-checking
# mode. The later lines then find what they need. Without it, a build of torch from any place may be installed.
HASHED = $(if $(HASHES),$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	--requirement requirements.lock)

$(STAMP): pyproject.toml constraints.txt requirements.lock setup.py $(wildcard src/rollcorr/kernels/correction/cpu/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(HASHED)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VLLM_STAMP): pyproject.toml tools/vllm_environment.py
	$(PYTHON) tools/vllm_environment.py $(VLLM_VENV)
	@touch $@

# hydra-core asks for an older omegaconf than the trainer needs, and verl for a GPU's packages: both come without theirs.
$(VERL_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]' \
		'hypothesis>=6.100' 'pytest>=8.0' $(VERL_NEEDS)
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		verl==0.9.1 tensordict==0.10.0 hydra-core==1.3.2 antlr4-python3-runtime==4.9.3
	@touch $@

$(TRL_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]' \
		'hypothesis>=6.100' 'pytest>=8.0' trl==1.16.0
	@touch $@

# Without torch: what the site says of the API is read from the source.
$(DOCS_STAMP): pyproject.toml constraints.txt requirements.lock tools/requirements_of.py
	$(PYTHON) -m venv $(DOCS_VENV)
	$(HASHED)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$$($(PYTHON) tools/requirements_of.py docs)
	@touch $@

# torch decides about the versions of these: the lock has those of the newest.
$(OLDEST_STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/rollcorr/kernels/correction/cpu/*.[ch])
	$(PYTHON) -m venv $(OLDEST_VENV)
	grep -vE '^(torch|triton|sympy|nvidia-[^=]*|cuda-[^=]*)==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(OLDEST_VENV)/constraints.txt \
		torch==$(OLDEST_TORCH)
	$(OLDEST_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(OLDEST_VENV)/constraints.txt \
		--editable . hypothesis pytest pytest-xdist setuptools
	@touch $@

install: $(STAMP) ## Create .venv with everything (torch is pinned by constraints.txt)

clean: ## Remove what was built and run
	rm -rf $(VENV) $(VLLM_VENV) $(VERL_VENV) $(TRL_VENV) $(DOCS_VENV) $(OLDEST_VENV) .venv-release site build dist *.egg-info runs .coverage*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

##@ Demonstrations

demo: $(STAMP) ## Four short trainings, two at a time: a fault is found, a correction saves one; then a page (under 10 minutes on 2 cores)
	$(BIN)/python experiments/demo/demo.py $(ARGS)

demo-seeds: $(STAMP) ## examples/train/demo.yaml for three seeds, with the acceptance figures at the end
	rm -rf runs/demo-seeds
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python experiments/training_runs/demo_seeds.py

demo-diffusion: $(STAMP) ## Flow-GRPO on a small SD3-type model, then the report with pictures (under 5 minutes on 2 cores)
	rm -rf runs/flow-grpo
	OMP_WAIT_POLICY=PASSIVE $(BIN)/rollcorr train examples/train/flow_grpo.yaml
	$(BIN)/rollcorr report runs/flow-grpo || case $$? in 1 | 3) ;; *) false ;; esac

demo-diffusion-seeds: $(STAMP) ## That for three seeds in both modes, with rewards, passes and seconds at the end
	rm -rf runs/flow-grpo-seeds
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python experiments/training_runs/flow_grpo_seeds.py

##@ Tests

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

coverage: $(STAMP) ## Run the tests and measure which lines they run, in all processes; fail below the floor (ARGS=TESTS for some)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --cov --cov-report=term:skip-covered $(ARGS)

##@ Tests in other environments and slower lanes

test-oldest: $(OLDEST_STAMP) ## Test the correction with torch 2.6, without any extra (an environment of its own)
	$(OLDEST_VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup $(OLDEST_TESTS)

test-anywhere: $(STAMP) ## Run the tests as a background job without a terminal, in foreign locales, in reverse order … (an hour)
	PYTHON=$(BIN)/python tools/hostile_environment.sh $(ARGS)

test-slow: $(STAMP) ## Fuzz the numbers with 10,000 examples of each property (half an hour)
	$(BIN)/python -m pytest tests/correction/test_numeric_fuzzing.py --hypothesis-profile=slow

test-crash: $(STAMP) ## Kill runs at every file event and at random times, cut their power, fill their disk; fail Monitors' disks (an hour)
	$(BIN)/python tools/crash/crash_runs.py --jobs 2 $(ARGS)
	$(BIN)/python tools/crash/monitor_faults.py && $(BIN)/python tools/crash/monitor_faults.py --ranks 2 --every 8

test-crash-bugs: $(STAMP) ## Plant 18 durability bugs, one at a time, and check that test-crash finds each (5 minutes)
	$(BIN)/python tools/crash/planted_bugs.py --jobs 2 $(ARGS)

test-mutants: $(STAMP) ## Make N=40 random small edits, drawn by SEED=0, and print those that no test notices (45 minutes at most; goes on)
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants/run_mutants.py --count $(or $(N),40) --seed $(or $(SEED),0) $(ARGS)

test-hostile: $(STAMP) ## Read 4,000 Parquet files with flipped bits (5 minutes); `make test` reads 150
	ROLLCORR_FLIP_SEEDS=4000 $(BIN)/python -m pytest tests/rollout_log/test_hostile_logs.py -k parquet

test-oracle: $(STAMP) ## Hold each implementation against float64: 200 random batches for each of ten seeds (5 minutes)
	ROLLCORR_ORACLE_SEEDS=10 $(BIN)/python -m pytest tests/correction/test_oracle.py --numprocesses 2

test-sanitizers: $(STAMP) ## Run the CPU kernel under the address and undefined-behavior sanitizers (needs gcc)
	ROLLCORR_SANITIZERS=1 $(BIN)/python -m pytest tests/kernels/test_cpu_build.py -k out_of_bounds

# The oldest version that is supported, that of torch 2.11, and the newest. Each has a folder of its own, which is put
# before the environment. Up to 3.6, the interpreter needs a numpy that still turns arrays of one element into numbers.
TRITON_VERSIONS ?= 3.4.0 3.6.0 3.9.0
$(VENV)/triton-%/.installed: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$*
	case $* in 3.[456].*) $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) numpy==2.2.6;; esac
	@touch $@

test-triton: $(TRITON_VERSIONS:%=$(VENV)/triton-%/.installed) ## Test the GPU kernels without a GPU, on three versions of Triton: interpreted, and compiled for four GPUs (2 GB)
	for version in $(TRITON_VERSIONS); do \
		PYTHONPATH=$(CURDIR)/$(VENV)/triton-$$version $(BIN)/python -m pytest tests/kernels/test_triton_*.py || exit 1; \
		PYTHONPATH=$(CURDIR)/$(VENV)/triton-$$version $(BIN)/python -m pytest $(BEHAVIOR) -k triton -m "not slow" --numprocesses 2 || exit 1; \
	done

test-compile: $(STAMP) ## Compile the correction and the losses with torch.compile's inductor, and compare (needs a C++ compiler; half an hour)
	ROLLCORR_COMPILE_BACKENDS=inductor $(BIN)/python -m pytest tests/correction/test_compile.py --numprocesses 2

calibration: $(STAMP) ## Hold calibrated thresholds against disjoint pools, and repeat their intervals 100 times (10 minutes)
	ROLLCORR_CALIBRATION=full $(BIN)/python -m pytest tests/diagnostics/test_calibration.py -s -k "disjoint or cover or effects"

test-browser: $(STAMP) ## Drive the pages and the site in headless Chromium (installs the distribution's package chromium, and playwright)
	@command -v chromium > /dev/null || apt-get install --yes --no-install-recommends chromium > /dev/null || \
		{ echo "make test-browser needs the package chromium: apt-get install chromium" >&2; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check 'playwright>=1.50'
	test -e site/index.html || $(MAKE) docs-site
	$(BIN)/python -m pytest tests/browser

test-ray: $(STAMP) ## Test `rollcorr check --ray` on a Ray cluster of this machine (installs Ray)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest tests/diagnostics/test_ray_cluster.py

test-arm: $(STAMP) ## Compile the CPU kernel for arm64 (installs a cross compiler, 100 MB)
	$(BIN)/pip install --quiet --disable-pip-version-check ziglang
	$(BIN)/python -m pytest tests/kernels/test_cpu_build.py -k arm64

test-verl: $(VERL_STAMP) ## Test beside verl 0.9.1 (an environment of its own); SOURCES as in test-frameworks
	$(BIN_OF_VERL)/python tools/test_frameworks.py --verl $(BIN_OF_VERL)/python $(SOURCES)

test-trl: $(TRL_STAMP) ## Test in the trainers of TRL 1.16.0 (an environment of its own); SOURCES as in test-frameworks
	$(BIN_OF_TRL)/python tools/test_frameworks.py --trl $(BIN_OF_TRL)/python $(SOURCES)

test-frameworks: $(VERL_STAMP) $(TRL_STAMP) ## Both; SOURCES=DIR with checkouts or wheels tests these versions too, and runs verl's own tests
	$(BIN_OF_VERL)/python tools/test_frameworks.py --verl $(BIN_OF_VERL)/python --trl $(BIN_OF_TRL)/python $(SOURCES)

test-vllm: $(VLLM_STAMP) ## Test the vLLM engine with vLLM itself on the CPU (an environment of its own, 3.7 GB)
	$(VLLM_VENV)/bin/python -m pytest tests/engines/test_vllm_real.py -s

##@ Checks, pages and releases

check: $(STAMP) ## Lint, format and type checks, also of the code on the pages; generated pages are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/style_faults.py
	$(BIN)/mypy
	$(BIN)/python tools/generate_docs.py --check
	$(BIN)/python tools/docs_types.py

docs: $(STAMP) ## Write the generated pages and the notebook
	$(BIN)/python tools/generate_docs.py
	$(BIN)/python tools/make_notebook.py

front-figures: $(STAMP) ## Draw the figures of the front page anew (ARGS="--demo runs/demo …" takes the curves of finished demos)
	$(BIN)/python tools/front_figures.py $(ARGS)

docs-site: $(DOCS_STAMP) ## Build the site into site/, and check its links, its API sections and its search (installs mkdocs)
	rm -rf site
	NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/mkdocs build --strict
	$(DOCS_VENV)/bin/python tools/docs_site/check_site.py site

lock: $(STAMP) ## Write constraints.txt and requirements.lock anew: every package of [dev], [release] and [docs], pinned (ARGS=--upgrade for the newest versions)
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/python tools/lock.py $(ARGS)

release-check: $(STAMP) ## Build what a release uploads, install each file into a clean environment, and try it (5 minutes)
	$(BIN)/python tools/release_check.py $(ARGS)

wheels: $(STAMP) ## Build the wheels of a release with cibuildwheel, which needs Docker or Podman; see RELEASING.md
	$(BIN)/pip install --quiet --disable-pip-version-check cibuildwheel
	$(BIN)/python -m cibuildwheel --output-dir dist

##@ Measurements

bench: $(STAMP) ## Time the correction against verl 0.9.1, installed in an environment of its own
	$(BIN)/python benchmarks/correction.py $(ARGS)

gpu-wheels: ## Fetch the wheels of the peers that `make gpu` measures against (4 MB), where there is a network
	$(PYTHON) tools/gpu_stages/carried.py --fetch

gpu: ## Prove and measure the GPU path: one GPU, no network, under 9 minutes; torch and Triton must be there
	$(PYTHON) tools/gpu.py $(ARGS)

gpu-dry: $(STAMP) ## Run the same script on the CPU, on small sizes; it fails after 2 minutes (half a minute of CPU)
	$(BIN)/python tools/gpu.py --device cpu --quick --minutes 2 --results runs/gpu-dry

laboratory: $(STAMP) ## Measure every correction where the exact gradient is known, then write the pages (under 20 minutes)
	rm -rf experiments/laboratory/cells
	OMP_NUM_THREADS=1 $(BIN)/rollcorr simulate --output experiments/laboratory
	OMP_NUM_THREADS=1 $(BIN)/python experiments/laboratory/reward_shapes.py
	OMP_NUM_THREADS=1 $(BIN)/python experiments/laboratory/table_training.py
	$(BIN)/python tools/generate_docs.py

diagnosis: $(STAMP) ## Make logs with known faults and without, and score `rollcorr check` on them (half an hour on one core)
	OMP_NUM_THREADS=1 PYTHON=$(BIN)/python experiments/diagnosis/run.sh $(ARGS)

diagnosis-vllm: $(STAMP) $(VLLM_STAMP) ## The same faults with vLLM on the CPU as the sampler (20 minutes on one core)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python experiments/diagnosis/live_faults.py runs/diagnosis/vllm --engine vllm --seed 8117 $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/diagnosis/score.py experiments/diagnosis/results/vllm --live runs/diagnosis/vllm

judge: $(STAMP) ## Make logs of loops and faults that the rules were not written for, two at a time, and score `rollcorr check` (an hour; goes on)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/judge/make_logs.py --root $(JUDGE_LOGS) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/judge/score_logs.py --root $(JUDGE_LOGS)

conformance: $(STAMP) ## Grade the corrections of six frameworks from the index by fifteen properties; SOURCES=DIR with checkouts: six more
	OMP_NUM_THREADS=1 $(BIN)/python experiments/conformance/grade_peers.py $(SOURCES)
	$(if $(SOURCES),OMP_NUM_THREADS=1 $(BIN)/python experiments/conformance/lines.py $(SOURCES))
	$(BIN)/python tools/generate_docs.py

study-measured: $(STAMP) ## Measure what rollouts of real engines do to the weights, then write its pages (half an hour on 2 cores; goes on)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python experiments/mismatch_in_practice/measured.py $(ARGS)

study-measured-quick: $(STAMP) ## A subset of that in two minutes, with asserted numbers
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python experiments/mismatch_in_practice/measured.py --quick $(ARGS)

study-trained: $(STAMP) ## Train the cells of the published study that are left, two at a time, then write the page (hours; goes on)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/mismatch_in_practice/trained.py --jobs 2 $(ARGS)

training-bench: $(STAMP) ## Train each correction on each sampler over eight seeds, two cells at a time, then write the page (4 core-hours; goes on)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/bench/bench.py --jobs 2 $(ARGS)

training-bench-quick: $(STAMP) ## Train one finished cell of it again, and compare its accuracy (3 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/bench/bench.py --quick $(ARGS)
