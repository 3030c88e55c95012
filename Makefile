# Everything runs in .venv of the checkout; PYTHON=python3.12 picks another interpreter for it.
BIN := .venv/bin
export PYTHON

.PHONY: help setup demo test lint format bench lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

setup:  ## make .venv; returns at once when nothing changed
	@bash scripts/setup.sh

demo: setup  ## generate with a quarter of the experts resident, compare with all resident
	@$(BIN)/prefetch-runtime demo

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, then the tests and one call of every benchmark
	$(BIN)/python scripts/run_tests.py

format: setup  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## measure; the ones that need a GPU are skipped without one
	$(BIN)/python -m pytest benchmarks

lock: setup  ## resolve requirements/*.lock anew
	$(BIN)/python scripts/lock.py

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
