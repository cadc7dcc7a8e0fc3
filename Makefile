# Everything a newcomer runs. Needs Python 3.11 or newer, git and make; `make setup` brings the rest into .venv.

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.setup-done
DEMO   := build/demo
MODEL  := vgg16-cifar

.DEFAULT_GOAL := help
.PHONY: gpu help setup demo test check bench accuracy reproduce picture fuzz golden agree order verify-all faults clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

setup: $(STAMP)  ## make .venv with the fourfold command and the tools in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Fourfold needs Python 3.11 or newer, this is %d.%d; try: make setup PYTHON=python3.12" % sys.version_info[:2])'
	@echo "setup: making .venv"
	@$(PYTHON) -m venv .venv
	@echo "setup: installing fourfold and its dependencies (torch is large, the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
	@echo "setup: done, the command is $(BIN)/fourfold"

demo: setup  ## measure this machine, find the best plan for it, train with it on two processes, write a page about it
	@mkdir -p $(DEMO)
	$(BIN)/fourfold calibrate --ranks 2 --rounds 3 -o $(DEMO)/cluster.toml
	$(BIN)/fourfold plan $(MODEL) --cluster $(DEMO)/cluster.toml --devices 2 --batch 16 --measure -o $(DEMO)/best.json
	$(BIN)/fourfold explain $(DEMO)/best.json
	$(BIN)/fourfold verify $(MODEL) --plan $(DEMO)/best.json --ranks 2 --no-predict
	$(BIN)/fourfold train $(MODEL) --cluster $(DEMO)/cluster.toml --strategy data --ranks 2 --batch 16 --data digits --record $(DEMO)/data.json
	$(BIN)/fourfold train $(MODEL) --cluster $(DEMO)/cluster.toml --plan $(DEMO)/best.json --ranks 2 --steps 60 --data digits --record $(DEMO)/run.json
	$(BIN)/fourfold report $(DEMO)/best.json $(DEMO)/data.json $(DEMO)/run.json -o $(DEMO)/report.html
	@echo "demo: done. Open $(DEMO)/report.html in a browser; then docs/README.md, or \`$(BIN)/fourfold --help\`."

test: setup  ## the tests (without those marked slow, gpu or foreign)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

check: setup  ## ruff, and mypy in strict mode on src
	@echo "check: ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: ruff format ."; exit 1; }
	@echo "check: mypy"
	@$(BIN)/mypy

bench: setup  ## the benchmarks
	@$(BIN)/python benchmarks/run.py

accuracy: setup  ## predictions of time and memory against measurements, and how far calibrations repeat (more than an hour)
	@$(BIN)/python benchmarks/accuracy.py
	@$(BIN)/python benchmarks/memory_accuracy.py
	@$(BIN)/python benchmarks/repeatability.py

reproduce: setup  ## the four papers rerun, pages under build/reproduce (about ten minutes; root for slow links)
	@$(BIN)/python benchmarks/reproduce.py

picture: setup  ## docs/plan.png, the picture in the README (needs chromium)
	@$(BIN)/python docs/draw_plan.py

fuzz: setup  ## 22,000 damaged plans, clusters and records: each valid, or refused in one line (two minutes; SEED=1 for others)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/mutate.py --plans 10000 --clusters 10000 --records 2000 --seed $(or $(SEED),0)

golden: setup  ## 888 predictions and searches against those written down: what a change to lowering or to the oracle moved (two minutes)
	@$(BIN)/python tests/support/golden.py

agree: setup  ## what ranks do in a step against their lists, record by record, for 64 plans (two minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/agreement.py

order: setup  ## messages between stages of 10,000 random plans under NCCL's rules, with planted faults (four minutes; SEED=1 for others)
	@$(BIN)/python tests/support/message_plans.py --plans 10000 --seed $(or $(SEED),0)

verify-all: setup  ## every model by every strategy on 2, 3 and 4 ranks against one process
	@$(BIN)/python tests/support/verify_all.py

gpu: setup  ## what is tried on a machine with a GPU: ops, plans, bf16, training, foreign networks, waits, shares (about half an hour)
	@mkdir -p build
	$(BIN)/python benchmarks/gpu_matrix.py
	$(BIN)/python benchmarks/gpu_matrix.py --mode bf16 --every 10
	$(BIN)/python benchmarks/gpu_matrix.py --mode channels_last --every 10
	$(BIN)/python tests/support/verify_all.py --device cuda
	$(BIN)/python tests/support/verify_all.py --device cuda --precision bf16 --every 3
	$(BIN)/python benchmarks/gpu_single.py
	$(BIN)/python benchmarks/gpu_training.py
	$(BIN)/python benchmarks/gpu_foreign.py
	$(BIN)/python benchmarks/gpu_syncs.py
	$(BIN)/python benchmarks/gpu_shares.py

faults: setup  ## ranks, parents and torchrun killed, stopped, terminated and interrupted, sixty times (about a quarter of an hour)
	@$(BIN)/python tests/support/faults.py

clean:  ## remove what was built and cached, but not .venv
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
