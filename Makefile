PYTHON ?= python3
# TransformerLens: 3.9, which has HookedTransformer, or 4, in an environment of its own.
TL ?= 3.9
ifeq ($(TL),4)
VENV := .venv-tl4
PINS := constraints-tl4.txt
EXTRA := test
# Where TransformerLens has no part, the tests with 3.9 say enough. TESTS=tests runs all.
TESTS := tests/hooks tests/models tests/studies
CHECKS :=
else ifeq ($(TL),3.9)
VENV := .venv
PINS := constraints.txt
EXTRA := dev
TESTS := tests
CHECKS := lint types
else
$(error TL is 3.9 or 4, not $(TL))
endif
# Another Python has an environment of its own too.
ifneq ($(PYTHON),python3)
VENV := $(VENV)-$(notdir $(PYTHON))
endif
BIN := $(VENV)/bin
# What decides in which order sums are taken; variables of one run are joined by commas.
# MKL reads MKL_ENABLE_INSTRUCTIONS on Intel alone; `default` also changes the last digits of randn.
KERNELS := MKL_CBWR=COMPATIBLE,ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 \
	MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OMP_NUM_THREADS=2
NUMERICAL := tests/hooks tests/maps tests/analyses

# Threads of torch that wait leave their cores to other processes, as in the commands.
export OMP_WAIT_POLICY ?= passive

# What `make real` runs: a model that comes in wheels, smollm2-135m or gemma-3-270m, or
# MODEL=FILE.gguf. A name comes twice in the text: an induction head finds what followed it.
MODEL ?= smollm2-135m
TEXT ?= "Mary Whitfield met Tom at the station. Later that day, Mary Whitfield wrote him a letter."
ifeq ($(MODEL),gemma-3-270m)
HEAD ?= L5H1
QUERY ?= 15
endif
HEAD ?= L18H6
QUERY ?= 14

.PHONY: ablate real test check ci recipes size claims kernels shapes lint types docs package bench install versions models notebooks clean

# The two models that ship, with RoPE and without a position encoding, and both side by side.
TWINS := rope-tiny nope-tiny

ablate: install  ## Attribute the positional patterns of two small models, side by side (about 25 s)
	for model in $(TWINS); do \
		$(BIN)/python -m nope_probe.ablate --model $$model --out runs/twins/$$model || exit 1; \
	done
	$(BIN)/python -m nope_probe.compare $(TWINS:%=runs/twins/%) --out runs/twins/compare

real: install  ## The same for a real language model, and its attention on a text (4 minutes)
ifneq ($(filter smollm2-135m gemma-3-270m,$(MODEL)),)
	$(BIN)/python .ci/real_model.py $(MODEL)
endif
	$(BIN)/python -m nope_probe.ablate --model $(MODEL) --layers all --n-seqs 64
	$(BIN)/python -m nope_probe.attention --model $(MODEL) --n-seqs 128 --seq-len 64 \
		--text $(TEXT) --why $(HEAD) --query $(QUERY)

test: install  ## Lint, types and tests/; with TL=4 the tests that run models, on TransformerLens 4
	@start=$$(date +%s) && $(MAKE) check && took=$$(($$(date +%s) - start)) && \
	echo "make test took $$((took / 60)) min $$((took % 60)) s"

check: $(CHECKS)
	$(BIN)/pytest -n auto --dist loadfile $(TESTS)

ci: install  ## tests/ci: all decoders, flags and pages, kill and resume, and `make real`'s model if it is there
	$(BIN)/pytest -n auto --dist worksteal tests/ci
	$(BIN)/pytest -n auto --dist worksteal --hypothesis-profile=thorough tests/hooks/test_ablation.py

shapes: install  ## tests/ with checks of shapes and types at every call
	$(BIN)/pytest -n auto --dist loadfile --jaxtyping-packages=nope_probe,beartype.beartype \
		-m "not wrong_types" $(TESTS)

recipes: install  ## The tests of what is in recipes/
	$(BIN)/pytest -n auto --dist loadfile recipes/tests

kernels: install  ## The numerical tests with the kernels of other processors (a minute each)
	for kernel in $(KERNELS); do \
		echo "$$kernel"; \
		env $$(echo $$kernel | tr , ' ') $(BIN)/pytest -n auto --dist loadfile $(NUMERICAL) || exit 1; \
	done

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

docs: install  ## The documentation site, in build/docs/index.html; a warning is an error
	PYTHONPATH=. $(BIN)/python -m sphinx -b html -E -W --keep-going --quiet docs build/docs

package: install  ## The wheel and the sdist, in build/package, checked in an environment of their own
	rm -rf build/package build/lib
	$(BIN)/python -m build --quiet --outdir build/package .
	$(BIN)/python .ci/check_package.py build/package

versions:  ## The same maps from TransformerLens 3.9 and 4, side by side
	$(MAKE) install TL=3.9
	$(MAKE) install TL=4
	.venv/bin/python benchmarks/versions.py write build/maps-tl3.safetensors
	.venv-tl4/bin/python benchmarks/versions.py write build/maps-tl4.safetensors
	.venv/bin/python benchmarks/versions.py compare build/maps-tl3.safetensors build/maps-tl4.safetensors

models:  ## Every decoder on both versions of TransformerLens, into docs/models.md (20 minutes)
	$(MAKE) install TL=3.9
	$(MAKE) install TL=4
	.venv/bin/python -W ignore recipes/census/models_page.py measure build/models-tl3.json
	.venv-tl4/bin/python -W ignore recipes/census/models_page.py measure build/models-tl4.json
	.venv/bin/python recipes/census/models_page.py write build/models-tl3.json build/models-tl4.json

bench: install  ## Measure every claim on a quiet machine, into build/bench.md (15 minutes)
	$(BIN)/python -W ignore benchmarks/bench.py

size:  ## The numbers of the budget: code lines of rooms and studies, flags, tables, lines of tests
	PYTHONPATH=. $(BIN)/python benchmarks/size.py

claims: install  ## Put what papers say of position to the test, into docs/claims.md (after make real)
	$(BIN)/python -W ignore recipes/claims/page.py

notebooks: install  ## Run the notebooks and write them with outputs (needs Chromium)
	$(BIN)/python docs/make_notebooks.py

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-shared.txt $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c $(PINS) -e ".[$(EXTRA)]"
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
