PYTHON ?= python3
BIN := .venv/bin

.PHONY: ablate test check lint types clean

ablate: .venv/.installed  ## Attribute the shipped RoPE model's positional pattern
	$(BIN)/python -m nope_probe.ablate

test: .venv/.installed  ## Everything CI checks
	$(MAKE) check

check: lint types
	$(BIN)/pytest

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
