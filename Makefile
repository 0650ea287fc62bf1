PYTHON ?= python3
TARGET ?= tiny-qwen3-moe
EXPERIMENTS := main_table latency batch_scaling scattering
RUNS := results/experiments/$(TARGET)
PAGES := experiments/results/quick/$(TARGET)

# An MTP module is a layer of its target's checkpoint.
DRAFTER := $(firstword $(wildcard checkpoints/$(TARGET)/drafter) checkpoints/$(TARGET)/target)

VENV_PYTHON := .venv/bin/python
PIP_INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check

.PHONY: demo experiments test test-aot lint clean
.DELETE_ON_ERROR:

# Convert the bundled checkpoint once, then compare the decoding methods on a few prompts.
demo: .venv/.base converted/$(TARGET)/manifest.json
	$(VENV_PYTHON) -m experiments.decode --target converted/$(TARGET) \
	  --predictor checkpoints/$(TARGET)/predictor --prompts experiments/prompts/demo.jsonl --out results/demo

# The paper's tables and figures, small: one after the other, so that none disturbs the times of another. A rerun continues.
experiments: .venv/.base converted/$(TARGET)/manifest.json
	@set -e; for name in $(EXPERIMENTS); do \
	  $(VENV_PYTHON) -m experiments.$$name --quick --target converted/$(TARGET) \
	    --predictor checkpoints/$(TARGET)/predictor --out $(RUNS)/$$name; \
	  rm -rf $(PAGES)/$$name; mkdir -p $(PAGES)/$$name; \
	  find $(RUNS)/$$name '(' -name '*.md' -o -name '*.png' ')' -exec cp {} $(PAGES)/$$name ';'; \
	done
	$(VENV_PYTHON) -m experiments.report $(EXPERIMENTS:%=$(RUNS)/%) --out $(RUNS)/report.html

test: .venv/.test
	$(VENV_PYTHON) -m pytest -n 2 -q

# Compiles for absent accelerators. In an environment of its own: the compilers are plugins that JAX would load elsewhere.
test-aot: .venv-aot/.aot
	.venv-aot/bin/python -m pytest -q --confcutdir tests/aot tests/aot

lint: .venv/.test
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m pyright --pythonpath $(VENV_PYTHON)

# Keeps results/ except those of demo and experiments.
clean:
	rm -rf .venv .venv-aot converted results/demo results/experiments build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

converted/$(TARGET)/manifest.json: | .venv/.base
	$(VENV_PYTHON) -m convert checkpoints/$(TARGET)/target converted/$(TARGET) --drafter $(DRAFTER)

$(VENV_PYTHON):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "error: Python 3.11, 3.12 or 3.13 is needed; '$(PYTHON)' is not one (name another: make PYTHON=python3.12)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv --clear .venv

# Stamp files: an install runs again only when pyproject.toml or the interpreter changes.
.venv/.base: pyproject.toml $(VENV_PYTHON)
	$(PIP_INSTALL) -e .
	@touch $@

.venv/.test: pyproject.toml .venv/.base
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

.venv-aot/.aot: pyproject.toml $(VENV_PYTHON)
	$(VENV_PYTHON) -m venv --clear .venv-aot
	.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check -e '.[aot]'
	@touch $@
