# make demo | test | test-full | coverage | check | docs | dist | lock | sbom. Each makes .venv when it is missing or out of date.
# PYTHON=python3.12 chooses the interpreter; DATA=DIR lets tests read real text from DIR.
PYTHON ?= python3
DATA ?=
REPOSITORY ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# Two processes, a file of tests to each: one group of ranks serves all compositions of a file. The
# order is that of tests/longest.txt.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(DATA),--data "$(DATA)")

# Rewriting the assertions of all tests takes 15 s a process where no bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

# mkdocs 1.6 is pinned below 2 in pyproject.toml, so its theme has nothing to warn of.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test test-full coverage check docs dist lock sbom clean
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/headrace train demo

test: .venv/installed-dev
	$(PYTEST) -m "not slow and not gpu"

# A test of Slurm starts one where Debian's packages are: apt-get install slurmctld slurmd slurm-client munge
# Pages are tried in a browser where there is one: apt-get install chromium
test-full: .venv/installed-full
	$(PYTEST) -m "not gpu"

coverage: .venv/installed-dev
	rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run $(PYTEST:$(BIN)/python=) -m "not slow and not gpu"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

check: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tests/architecture/english.py
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mkdocs build --strict --quiet --site-dir site

docs: .venv/installed-dev
	$(BIN)/mkdocs build --strict --site-dir site

# The wheel and the sdist, as a release has them; REPOSITORY=https://HOST/OWNER/NAME makes README's links absolute.
dist: .venv/installed-release
	rm -rf dist
	$(BIN)/python .ci/dist.py --repository "$(REPOSITORY)"
	$(BIN)/python -m twine check --strict dist/*

# requirements.txt: every package that `pip install headrace` brings, with the sha256 of its files, for
# any system and Python 3.11 to 3.14. pip install --require-hashes -r requirements.txt
lock: .venv/installed-release
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --constraint constraints.txt --output-file requirements.txt pyproject.toml

# dist/sbom.cdx.json: the same packages as a CycloneDX document.
sbom: .venv/installed-release
	mkdir -p dist
	$(BIN)/cyclonedx-py requirements requirements.txt --pyproject pyproject.toml \
	  --output-reproducible -o dist/sbom.cdx.json

clean:
	rm -rf .venv site build dist .coverage

# A stamp is newer than what it was made from, so a second `make` installs nothing.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing headrace into .venv (torch is large: minutes on a slow line)"
	@$(PIP) -e .
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing headrace with what its tests need into .venv"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/installed

.venv/installed-release: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what builds, locks and lists a release into .venv"
	@$(PIP) -e '.[release]'
	@touch $@

.venv/installed-full: .venv/installed-dev
	@echo "installing what the tests of engines and object stores need into .venv"
	@$(PIP) -e '.[engines]'
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: headrace needs Python 3.11 or later, and $(PYTHON) is:"; \
	  $(PYTHON) --version 2>&1 | head -n 1; \
	  echo "  try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "error: $(PYTHON) -m venv failed"; \
	  echo "  try: on Debian or Ubuntu, apt install python3-venv"; exit 2; }
