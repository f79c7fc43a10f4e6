# Every target creates and updates .venv itself. Variables: MODEL, ARGS (for serve, bench, test-gpu, wheel), PYTHON,
# VLLM_PYTHON and VLLM_MODEL (for test-vllm: an interpreter that has vLLM, and a checkpoint for it).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?= smollm2-135m-instruct
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(PYTHON) deploy/install.py $(BIN)/python
PYTEST := $(BIN)/python -m pytest
LEVELS := e2e oracle parity security native property tables unit
QUICK := tests/unit tests/oracle tests/property $(addprefix tests/parity/,native/test_native_models.py models/test_ir_models.py native/test_quants.py)
SLOW := slow or gpu or network or vllm or clients
CODE := engine engine_tools tests benchmarks examples
CPP := csrc/*/*.cpp csrc/*/*.h tests/native/emulated/*.cpp engine/torch/kernels/cuda/*.cu*
step = @printf '\n==> %s\n' "$(1)"

# Tests are compiled once and not for each run, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve programs browser test test-integration compiled walk test-quick oracle oracle-http scoreboard test-slow test-gpu test-native test-emulated test-vllm test-vllm-suite test-llamacpp-suite test-clients mutants mutants-nightly manifests nightly lint format bench wheel docs lock sbom clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.serve ## Fetch the default model and serve it (MODEL=name ARGS="--port 9000")
	$(call step,Fetching $(MODEL))
	@$(BIN)/engine pull $(MODEL)
	$(call step,Serving $(MODEL))
	@exec $(BIN)/engine serve $(MODEL) $(ARGS)

# $(call tested,PROCESSES,"OPTIONS" ...): a run of pytest for each. What failed is run once more, alone.
define tested
	@failed=; again=; \
	for options in $(2); do \
		printf '\n==> %s\n' "$$options"; \
		$(PYTEST) -n $(1) $$options && continue; \
		printf '\n==> what failed, once more and alone\n'; \
		$(PYTEST) -n 0 -v --last-failed --last-failed-no-failures none $$options && again=yes || failed=yes; done; \
	if [ -n "$$again" ]; then printf '\npassed only when run alone, so look for a race: see above\n'; fi; \
	if [ -n "$$failed" ]; then printf '\nfailed: see above\n'; exit 1; fi
endef

# The processes take files of the same list, and read a file when they run it. The long ones come first. Some tests
# wait, so three processes are quicker on two cores than two.
BY_FILE := -p tests.support.whole_files --maxschedchunk 1 -o console_output_style=times
test: $(VENV)/.dev programs ## Run every test but those of make test-integration and the long ones
	$(call step,Fetching the model that tests use)
	@$(BIN)/engine pull $(MODEL)
	$(call tested,3,"$(BY_FILE) --integration without $(LEVELS:%=tests/%)")

# Triton must be in interpreter mode when the kernels are defined, so they have a run of their own.
test-integration: $(VENV)/.dev browser ## Run what needs other programs: Chromium, Redis, Triton's interpreter, scoreboard
	@$(BIN)/engine pull $(MODEL)
	$(call tested,2,"$(BY_FILE) --integration only tests/scoreboard tests/ui $(LEVELS:%=tests/%)" "tests/kernels")

# The first import of a module compiles it, tests included, and both processes of make test would do so.
compiled: $(VENV)/.dev ## Compile the tests and what they import
	@$(PYTEST) -n 0 -q -p no:cacheprovider --collect-only --integration without $(LEVELS:%=tests/%) >/dev/null

test-quick: $(VENV)/.dev ## Run the quickest tests, for the time between two edits
	@$(PYTEST) -n 2 --dist loadfile -m 'not ($(SLOW) or seconds)' $(QUICK)

# Programs that tests start, with the packages of Debian that have them. Tests of what is missing are skipped.
PROGRAMS := clang=clang promtool=prometheus redis-server=redis-server zsh=zsh fish=fish chromium=chromium npm=npm
programs: ## Install what tests start: clang, Prometheus, Redis, zsh, fish, Chromium and npm
	@missing() { for each in $(PROGRAMS); do command -v $${each%=*} >/dev/null || printf '%s ' $${each#*=}; done; }; \
	if [ -n "$$(missing)" ] && [ "$$(id -u)" = 0 ]; then \
		printf '\n==> Installing %s\n' "$$(missing)"; apt-get update -q; \
		for package in $$(missing); do apt-get install -y -q --no-install-recommends $$package || true; done; fi; \
	if [ -n "$$(missing)" ]; then echo "some tests will be skipped: sudo apt-get install $$(missing)" >&2; fi

# npm ci verifies the packages by the checksums of the lock file. It writes a copy of that file last of all.
UI := build/ui
browser: programs ## Install the packages of npm that drive Chromium, for the tests of the page
	@cmp -s tests/ui/package-lock.json $(UI)/package-lock.json && [ -e $(UI)/node_modules/.package-lock.json ] || { \
		mkdir -p $(UI) && cp tests/ui/package*.json $(UI) && \
		npm ci --prefix $(UI) --silent --no-audit --no-fund --ignore-scripts; } || \
		echo "the driver of Chromium can't be installed, so the page is not tested: see npm's message" >&2

walk: $(VENV)/.dev browser ## Walk at random through the page and keep what fails (ARGS="--walks 500")
	@$(BIN)/python -m tests.ui.walk $(ARGS)

test-slow: $(VENV)/.dev programs ## Run the long tests
	@$(BIN)/engine pull $(MODEL)
	$(call step,Slow tests)
	@$(BIN)/python -m pytest -m slow --timeout 3600 tests

oracle: $(VENV)/.dev ## Random histories of engines, each request compared with itself alone (ARGS="--level toy --cases 10000 --seed 1")
	@$(BIN)/python -m tests.oracle $(ARGS)

oracle-http: $(VENV)/.dev ## The same over HTTP, in every API of the server (ARGS="--kind dialects --cases 300")
	@$(BIN)/python -m tests.oracle.http $(ARGS)

scoreboard: $(VENV)/.dev ## Measure what the server withstands, into docs/scoreboard.md (ARGS="R05 R06")
	@$(BIN)/engine pull $(MODEL)
	@$(BIN)/python -m tests.scoreboard --write $(ARGS)

test-gpu: $(VENV)/.dev ## Run all that needs a GPU: tests, correctness, speed (ARGS="--models llama-1b")
	@$(BIN)/python -m benchmarks.gpu.suite $(ARGS)

# Unless told of an environment, it builds one: some gigabytes, and minutes.
VLLM := .vllm
VLLM_PYTHON ?= $(VLLM)/bin/python
VLLM_MODEL ?= $(VLLM)/smollm2-135m-hf
test-vllm: $(VENV)/.dev ## Test vLLM itself, on a CPU, behind our server (VLLM_PYTHON=/path/to/python)
	@$(BIN)/engine pull $(MODEL)
	@if [ ! -x $(VLLM_PYTHON) ] || [ ! -d $(VLLM_MODEL) ]; then \
		printf '\n==> Building %s\n' $(VLLM); $(BIN)/python -m tests.support.servers.vllm_environment $(VLLM) $(MODEL); fi
	$(call step,vLLM behind our server)
	@VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) VLLM_MODEL=$(abspath $(VLLM_MODEL)) \
		$(BIN)/python -m pytest -m vllm --timeout 1800 tests/e2e

# Its environment is in build/vllm_suite, and is built on first use: a gigabyte, and minutes.
test-vllm-suite: $(VENV)/.dev ## Run vLLM's own tests of its API against our server
	@$(BIN)/engine pull $(MODEL)
	$(call step,vLLM's tests)
	@$(BIN)/python -m tests.vllm_suite $(ARGS)

# Each client has an environment in .clients, which is built on first use: gigabytes, and minutes.
test-clients: $(VENV)/.dev ## Test other projects' clients against our server (ARGS="-k codex")
	@$(BIN)/engine pull $(MODEL)
	$(call step,Other projects' clients)
	@$(BIN)/python -m pytest -m clients --timeout 3600 -v tests/clients $(ARGS)

# Two hundred tests start a server each. The sources and models come from PyPI and npm.
test-llamacpp-suite: $(VENV)/.dev ## Run llama.cpp's own server tests (ARGS="unit/test_completion.py -q")
	$(call step,llama.cpp's server tests)
	@$(BIN)/python -m tests.llamacpp_suite $(ARGS)

manifests: $(VENV)/.dev ## Render the plain manifests of deploy/kubernetes from the Helm chart
	@$(BIN)/python -m tests.support.references.helm

# Verdicts are lines of build/mutants/verdicts.jsonl. The first run measures which tests reach what: half an hour.
BASE ?= main
COUNT ?= 200
SEED ?= 1
mutants: $(VENV)/.dev ## Plant mistakes and report what no test notices, in what differs from BASE or in AREA (AREA=engine/runtime COUNT=50)
	@$(BIN)/python -m tests.teeth.mutants $(AREA) --base $(BASE) --count $(COUNT) --seed $(SEED) $(ARGS)

# Others each night, everywhere.
mutants-nightly:
	@$(MAKE) mutants AREA=engine COUNT=3000 SEED=$(shell date +%Y%m%d)

nightly: test-slow test-native test-vllm test-clients mutants-nightly ## Run all that takes too long for every change

# The sanitizers' runtimes must be there before Python; Python itself leaks at exit by design.
SANITIZED := build/sanitized
PRELOAD = $(shell g++ -print-file-name=libasan.so):$(shell g++ -print-file-name=libubsan.so)
test-native: $(VENV)/.dev ## Test the kernels under AddressSanitizer and UBSan
	$(call step,Building the kernels with sanitizers)
	@cmake -S . -B $(SANITIZED) -DENGINE_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	@cmake --build $(SANITIZED) --parallel 2
	$(call step,tests/native)
	@ENGINE_NATIVE_DIR=$(SANITIZED) LD_PRELOAD=$(PRELOAD) ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(BIN)/python -m pytest --timeout 1200 tests/native

# An emulator runs the matmul kernels of CPUs that are not here. QEMU has AVX2 and all that ARM has. It has no AVX-VNNI,
# whose only instruction is computed with AVX2, and no AVX-512, which is only compiled.
EMULATED := x86_64=avx_vnni aarch64=neon_bf16
test-emulated: ## Compare the kernels of other CPUs with the portable ones in an emulator (needs qemu-user)
	@set -e; for each in $(EMULATED); do cpu=$${each%=*}; build=build/check-$$cpu; \
		for tool in $$cpu-linux-gnu-g++ qemu-$$cpu; do command -v $$tool >/dev/null || { \
			echo "$$tool is missing: apt-get install g++-$$(echo $$cpu | tr _ -)-linux-gnu qemu-user" >&2; exit 1; }; done; \
		cmake -S tests/native/emulated -B $$build -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
			-DENGINE_EMULATE_VNNI=ON -DCMAKE_SYSTEM_PROCESSOR=$$cpu -DCMAKE_CXX_COMPILER=$$cpu-linux-gnu-g++ >/dev/null; \
		cmake --build $$build --parallel 2; \
		qemu-$$cpu -L /usr/$$cpu-linux-gnu -cpu max $$build/check_kernels $${each#*=}; done

lint: $(VENV)/.dev ## Check style, format and types
	$(call step,ruff check)
	@$(BIN)/ruff check $(CODE)
	$(call step,ruff format)
	@$(BIN)/ruff format --check $(CODE)
	$(call step,mypy)
	@$(BIN)/mypy
	$(call step,clang-format)
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(VENV)/.dev ## Rewrite the code in house format
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/clang-format -i $(CPP)

bench: $(VENV)/.dev ## Measure this engine beside llama.cpp and vLLM (ARGS=--quick)
	@$(BIN)/engine pull $(MODEL)
	@$(BIN)/python -m benchmarks.run --model $(MODEL) $(ARGS)

# The site is part of the package, so that wheels have it. The theme's own advertisement is not shown.
SITE_TOOLS := build/site
$(SITE_TOOLS)/.created:
	@$(PYTHON) -m venv $(SITE_TOOLS) && $(SITE_TOOLS)/bin/pip install -q 'mkdocs>=1.6,<2' 'mkdocs-material>=9.7,<10' && touch $@

docs: $(SITE_TOOLS)/.created ## Build the documentation as a site, which `engine docs` shows
	@NO_MKDOCS_2_WARNING=1 $(SITE_TOOLS)/bin/mkdocs build --strict --config-file deploy/site/mkdocs.yml
	@echo "Built engine/site: .venv/bin/engine docs"

wheel: docs ## Build wheels for x86-64 and aarch64 and the sdist into dist/ (ARGS="--machine aarch64")
	@$(PYTHON) deploy/wheels/build.py $(ARGS)

# Tools for these two have an environment of their own.
TOOLS := build/tools
$(TOOLS)/.created:
	@$(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install -q 'uv>=0.9,<1' 'cyclonedx-bom>=7,<8' && touch $@

lock: $(TOOLS)/.created ## Resolve deploy/requirements.lock again
	@$(TOOLS)/bin/uv pip compile -q --upgrade --universal --generate-hashes --no-emit-index-url --python-version 3.11 \
		--no-header --no-annotate -o deploy/requirements.lock pyproject.toml

sbom: $(VENV)/.serve $(TOOLS)/.created ## Write what the environment holds as CycloneDX into sbom.json
	@$(TOOLS)/bin/cyclonedx-py environment --of JSON -o sbom.json --pyproject pyproject.toml $(BIN)/python

clean: ## Remove the virtual environment and every cache
	rm -rf $(VENV) $(VLLM) .clients build dist engine/site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find engine engine_tools tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp, not the interpreter, which appears before the environment is complete.
$(VENV)/.created:
	$(call step,Creating $(VENV) with $(PYTHON))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed; set it with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv --without-pip $(VENV)
	@touch $@

# Otherwise each of several processes of pytest would compile what it imports.
COMPILE := $(BIN)/python -m compileall -q -j 0 engine

# A stamp holds the checksum of what was built: a checkout gives files new times, and not always new content. The
# development install holds all that serving needs, so a fresh one of it is enough to serve.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*/*)
SUM = $(shell cat $(SOURCES) | cksum)
$(VENV)/.serve: $(SOURCES) | $(VENV)/.created
	@grep -qsx '$(SUM)' $(VENV)/.dev $@ || { \
		printf '\n==> Installing the engine and building its kernels\n'; \
		$(INSTALL); }
	@echo '$(SUM)' >$@

$(VENV)/.dev: $(SOURCES) | $(VENV)/.created
	@grep -qsx '$(SUM)' $@ || { \
		printf '\n==> Installing the engine with its frameworks and the development tools\n'; \
		$(INSTALL) grpc jax otel tinygrad torch transformers dev && $(COMPILE); }
	@echo '$(SUM)' >$@
