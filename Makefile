# Each target sets itself up: the first command typed on a fresh machine may be any of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test test-slow test-hta plots bench clean

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

run: $(STAMP)
	mkdir -p out
	$(BIN)/emulator run llama3_8b_fsdp64 --trace out/llama3_8b_fsdp64.json.gz --timeline out/llama3_8b_fsdp64.png --json out/llama3_8b_fsdp64_report.json

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

test-hta: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[hta]'
	$(BIN)/python -m pytest -m hta

plots: $(STAMP)
	$(BIN)/python -m plots

bench: $(STAMP)
	$(BIN)/python -m pytest -m bench -s -p no:cacheprovider
	$(BIN)/python -m plots speed

clean:
	rm -rf $(VENV) out build *.egg-info
