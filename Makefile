# `make` shows what Surefoot does; `make test` checks it. Both set up .venv on their first run.
# PYTHON=… chooses the interpreter, DEMO=… adds options to the demo's command. TORCH=… chooses the
# torch: cpu, pypi, a requirement, a wheel, an index, or auto (a CPU build where one can be had).

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
TORCH_PIN := $(VENV)/torch.txt
# Most of what is installed is never imported: Python compiles the rest when it first is.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --quiet --quiet \
	--constraint constraints-cpu.txt --constraint $(TORCH_PIN)
PYTHON ?=
TORCH ?=
DEMO ?=
# Keeps pyright from asking the network for a newer self.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# What one process compiled of Python the next need not, also where a container forbids to keep it.
unexport PYTHONDONTWRITEBYTECODE
# Threads that wait sleep: tests and their neighbours share the cores.
export OMP_WAIT_POLICY ?= passive

# A Python with a CUDA build of torch, triton and pytest-xdist.
GPU_PYTHON ?= python3

.PHONY: demo test test-clients test-gpu coverage lint format clean FORCE

demo: $(VENV)/.installed
	@$(BIN)/surefoot bench --show-drafts --no-json $(DEMO)

# LINTED=yes: they ran already.
test: $(if $(LINTED),,lint) $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/cpu

# Clients of the server that want other versions of packages than the tests do.
test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -q tests/clients

# The Triton kernels on an NVIDIA GPU: compiling them keeps several processes busy.
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -q -n 12 tests/gpu

# The share of the lines that the tests run, of those that need no GPU (pyproject.toml says which).
# Takes about twice as long as the tests do.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n 2 --dist worksteal tests/cpu
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src tests tools
	$(BIN)/ruff format src tests tools

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter or a torch that is asked for by name is compared with what is there.
FORCE:

$(VENV)/.created: $(if $(PYTHON),FORCE)
	@python=; \
	for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	      >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no usable Python (3.11 or newer, with its venv module) found;" \
	    "install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	identity=$$("$$python" -c 'import sys; print(sys.version, sys.base_prefix)'); \
	if [ "$$identity" != "$$(cat $@ 2>/dev/null)" ]; then \
	  echo "Setting up $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV) && echo "$$identity" > $@; \
	fi

$(TORCH_PIN): $(VENV)/.created tools/install_torch.py $(if $(TORCH),FORCE)
	@$(BIN)/python tools/install_torch.py "$(or $(TORCH),auto)" $@

$(VENV)/.installed: $(TORCH_PIN) pyproject.toml constraints-cpu.txt
	@echo "Installing Surefoot and what it needs (once; takes a few minutes)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need (once)"
	@$(PIP) --editable '.[dev]'
	@touch $@

# Whatever it does not bring along comes from the other environment, and Surefoot from this tree.
$(CLIENTS)/.installed: tests/clients/requirements.txt $(VENV)/.created
	@echo "Installing clients (once)"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --no-compile --quiet --quiet \
	  --disable-pip-version-check --no-deps --requirement $<
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(CLIENTS)/others.pth
	@echo '$(CURDIR)/src' >> $(CLIENTS)/others.pth
	@mv $(CLIENTS)/others.pth $(CLIENTS)/lib/python3.*/site-packages/
	@touch $@
