# make env | model | demo | test | lint | docs | seams | test-all-versions | clean
#
# Everything lives in .venv and .model; stamp files make a second run instant. The demo uses vLLM's CUDA build, in
# .venv-cuda, where there is an NVIDIA GPU; tests use the CPU build everywhere. OSCAR_VENV=FOLDER uses an environment that
# exists already.

VENV := $(or $(OSCAR_VENV),.venv)
PYTHON := $(VENV)/bin/python
ENV := $(if $(OSCAR_VENV),,$(VENV)/.stamp)
DEMO_VENV := $(or $(OSCAR_VENV),$(if $(shell nvidia-smi -L 2>/dev/null),.venv-cuda,.venv))
DEMO_PYTHON := $(DEMO_VENV)/bin/python
DEMO_ENV := $(if $(OSCAR_VENV),,$(DEMO_VENV)/.stamp)
MODEL := .model/SmolLM2-135M-Instruct
SIDECAR := $(MODEL)/oscar/rotations.safetensors
# of the demo's calibration; `make demo SEQUENCES=16` calibrates as `oscar calibrate` does unless told otherwise
SEQUENCES := 3
CALIBRATED := $(MODEL)/oscar/.$(SEQUENCES)-sequences

.PHONY: env model demo test lint docs seams test-all-versions clean

env: $(ENV)

.venv/.stamp .venv-cuda/.stamp: scripts/setup_env.sh scripts/requirements.txt pyproject.toml
	scripts/setup_env.sh $(@D) $(if $(findstring cuda,$@),cuda)
	touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: | $(DEMO_ENV)
	$(DEMO_PYTHON) examples/convert_smollm2.py $(MODEL)

$(CALIBRATED): | $(MODEL)/config.json
	$(DEMO_PYTHON) -m vllm_oscar.calibrate $(MODEL) --sequences $(SEQUENCES) --out $(SIDECAR)
	rm -f $(@D)/.*-sequences
	touch $@

demo: $(DEMO_ENV) $(CALIBRATED)
	$(DEMO_PYTHON) examples/demo.py --model $(MODEL)

lint: $(ENV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/hadolint Dockerfile

# the documentation as a site, in site/; links and anchors are checked
docs: $(ENV)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet

# in two processes: most tests start an engine, which is mostly one thread; in the order of tests/conftest.py; then what
# model runners differ in with the one that vLLM has on GPUs, in Triton's interpreter
test: lint
	$(PYTHON) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
	VLLM_USE_V2_MODEL_RUNNER=1 $(PYTHON) -m pytest -m both_runners --numprocesses 2 --dist loadfile

# the sources of every supported vLLM, from wheels that pip fetches one after the other: about a minute, 1.2 GB
seams: $(ENV)
	$(PYTHON) scripts/check_seams.py

# nightly: real engines of every supported vLLM that has a CPU build, about 5 minutes each
test-all-versions: $(CALIBRATED)
	OSCAR_TEST_MODEL=$(abspath $(MODEL)) OSCAR_TEST_SIDECAR=$(abspath $(SIDECAR)) scripts/test_all_versions.sh

clean:
	rm -rf .venv .venv-cuda .model build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
