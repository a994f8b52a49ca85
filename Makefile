# Everything a person types. Needs make, Python 3.10 or newer and a package index; Node only for the
# page's own sources.
#
#   make serve                 install and serve on http://127.0.0.1:8000
#   make serve PORT=9000 ARGS="--max-num-seqs 16"
#   make soak SECONDS=60       64 clients, for so long; twenty minutes by default
#   make schemathesis SECONDS=60    whatever /openapi.json allows, and what it does not; ten minutes
#   make install TORCH="torch torchvision --index-url …"    bring PyTorch from another index first

PORT ?= 8000
ARGS ?=
TORCH ?=
PYTHON ?= python3

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NODE_MODULES := web/node_modules/.package-lock.json

.PHONY: install serve test soak schemathesis lint page page-test browser clean

install: .venv/.installed

serve: install
	@$(BIN)/mmserve serve --port $(PORT) $(ARGS)

# pytest comes last, so that its summary is the last line. A test uses one core, so two run at once, but
# those of the default model, which takes gigabytes.
test: .venv/.installed-dev browser lint page-test
	$(BIN)/pytest -n 2 --dist worksteal -m 'not model'
	$(BIN)/pytest -m model

soak: .venv/.installed-dev
	@$(BIN)/python tests/checks/soak.py --seconds $(or $(SECONDS),1200)

schemathesis: .venv/.installed-dev
	@$(BIN)/python tests/checks/described.py --seconds $(or $(SECONDS),600)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Stamps: a second call does nothing until pyproject.toml changes.
.venv/.installed: pyproject.toml | $(BIN)/pip
	$(if $(TORCH),$(PIP) install $(TORCH))
	$(PIP) install -e .
	@touch $@

.venv/.installed-dev: pyproject.toml | $(BIN)/pip
	$(if $(TORCH),$(PIP) install $(TORCH))
	$(PIP) install -e '.[dev]'
	@touch .venv/.installed $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo "mmserve needs Python 3.10 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "This Python lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The browser tests skip themselves where there is no Chromium.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk; \
	else echo "Chromium is missing: the browser tests will be skipped"; fi

# The built page is committed: nobody needs Node to serve it.
page: $(NODE_MODULES)
	cd web && npm run build

ifeq ($(shell command -v npm 2>/dev/null),)
page-test:
	@echo "npm is missing: the page's own checks are skipped"
else
# Built into a temporary folder, so that a page in work is not overwritten.
page-test: $(NODE_MODULES)
	cd web && npm run check && npm test
	@built=$$(mktemp -d) && trap 'rm -rf "$$built"' EXIT && \
	  (cd web && npm run build -- --outDir "$$built" --emptyOutDir) && \
	  { diff -rq web/dist "$$built" || \
	    { echo "web/dist is not what web/src builds to: run make page and commit it" >&2; exit 1; }; }
endif

$(NODE_MODULES): web/package-lock.json
	cd web && npm ci --no-audit --no-fund
	@touch $@

# What a build or a test leaves behind; .venv, web/node_modules and fetched weights stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './web/node_modules/*' -prune -exec rm -rf {} +
