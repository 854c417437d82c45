# `make demo` teaches a small model an edit, `make test` runs the tests. Both create .venv and install their
# dependencies, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-cpus coverage lint docs clean help

help:
	@echo "make demo      teach a small model an edit of photographs, from rows to pictures (about 3 minutes)"
	@echo "make test      the tests"
	@echo "make test-cpus those that compare numbers, with the kernels of other CPUs (about 5 minutes on two idle cores)"
	@echo "make coverage  the tests, and which lines none of them reaches"
	@echo "make lint      ruff and mypy"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make bench     all benchmarks, into docs/benchmarks.md (about 30 minutes on two idle cores)"
	@echo "make clean     remove what the demo wrote"

# The files mark finished installations: an interrupted one starts again.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := pyproject.toml setup.cfg constraints.txt

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.demo: $(INSTALLED) | $(BIN)/pip
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.installed: $(INSTALLED) | $(BIN)/pip
	$(PIP) -e '.[demo,dev]'
	@touch $@ $(VENV)/.demo

# Tests use processes and threads: one worker for each core.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test: $(VENV)/.installed
	$(PYTEST)

test-cpus: $(VENV)/.installed
	.ci/cpus

coverage: $(VENV)/.installed
	$(PYTEST) --cov=qie --cov-branch --cov-report=term-missing:skip-covered

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.docs: $(INSTALLED) | $(BIN)/pip
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/run.py

DEMO := configs/demo.yaml
PREDICT := --steps 10 --cfg 1

demo: export PATH := $(CURDIR)/$(BIN):$(PATH)
demo: $(VENV)/.demo
	rm -rf demo
	python tools/make_demo_photos.py demo
	qie-precompute --config $(DEMO) --end-idx 24
	qie-precompute --config $(DEMO) --start-idx 24
	qie-stats demo/shards --verify --html demo/stats.html
	qie-predict --config $(DEMO) --batch demo/before.jsonl $(PREDICT)
	qie-train --config $(DEMO) demo/shards
	qie-predict --config $(DEMO) --lora demo/run/checkpoint-000400 --batch demo/after.jsonl $(PREDICT)
	python tools/demo_report.py demo

clean:
	rm -rf demo
