# One command surface, the same locally and in CI. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Dozens of processes import torch: without cached bytecode each of them would compile it again, 6 s each.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
MODULES := lorafleet_api lorafleet_operator lorafleet_runtime lorafleet_cli lorafleet_local

.PHONY: help setup demo demo-full up down status check test test-numerics test-chaos test-durability generate bench-demo bench-demo-full bench-trainer bench-trainer-gpu clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Environment, control-plane binaries and base model (once; at once when nothing changed)
	@hack/setup.sh

demo: setup ## Train three adapters through AdapterRun objects and prove that they learnt
	@exec $(BIN)/lorafleet-local demo --owner $$PPID

demo-full: setup ## The demo with runs that come late, pause, get deleted and fail beside the three
	@exec $(BIN)/lorafleet-local demo-full --owner $$PPID

up: setup ## Start the one-machine edition for your own `kubectl apply`; POOL=FILE changes its AdapterPool
	@exec $(BIN)/lorafleet-local up --owner $$PPID $(if $(POOL),--pool '$(POOL)')

down: ## Stop everything that this checkout started
	@if [[ -x $(BIN)/lorafleet-local ]]; then $(BIN)/lorafleet-local down; \
	elif grep -qs '"pid"' "$${LORAFLEET_STATE_DIR:-.lorafleet}"/{,demo/}state.json; then \
	echo "error: .venv is missing, but processes may live: run \`make setup && make down\`" >&2; exit 1; \
	else echo "no .venv: not set up"; fi

status: ## Show which processes of `make up` live
	@if [[ ! -x $(BIN)/lorafleet-local ]]; then echo "not running, and not set up: start it with \`make up\`"; \
	else $(BIN)/lorafleet-local status || [[ $$? == 3 ]]; fi

check: setup ## Lint, types, import layers, sizes, Dockerfile
	$(BIN)/ruff check .
	$(BIN)/mypy --strict $(addprefix -p ,$(MODULES))
	$(BIN)/mypy --strict tests hack  # a test that calls what is gone fails here, not when it runs
	$(BIN)/lint-imports
	$(BIN)/python hack/check_sizes.py
	$(BIN)/hadolint --ignore DL3008 Dockerfile  # apt pins would break with every update of the base image

test: setup ## All tests: unit, contract, numerics, cluster; prints the time of each part
	@hack/test.sh

test-chaos: setup ## Kill parts of a running stack, one after the other; not part of `make test`
	@CHAOS_LOG=docs/chaos-log.md hack/test-chaos.sh

test-numerics: setup ## The numerics part of `make test` alone: what docs/numerics.md claims
	@$(BIN)/python -m pytest tests/numerics --durations=10

test-durability: setup ## Kill a trainer 36 times, also inside its writes; what it trains stays the same bit for bit
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/durability -q -s -W ignore

generate: setup ## Write the generated files (CRDs) again
	$(BIN)/python -m lorafleet_api.generate

bench-demo: setup ## Run the demo and write bench/demo.json
	@exec $(BIN)/lorafleet-local demo --owner $$PPID --bench bench/demo.json

bench-demo-full: setup ## Run demo-full and write its figures into bench/demo.json
	@exec $(BIN)/lorafleet-local demo-full --owner $$PPID --bench bench/demo.json

bench-trainer: setup ## Measure the trainer alone and beside plain HF + PEFT, and write bench/trainer.json
	@exec $(BIN)/python -m lorafleet_local.bench_trainer

bench-trainer-gpu: ## Measure training throughput on one CUDA device beside PEFT, and write bench/trainer_gpu.json
	@exec $(BIN)/python -W ignore -m lorafleet_local.bench_trainer_gpu

clean: down ## Remove the environment and this checkout's state; the cache outside the tree stays
	rm -rf .venv .lorafleet .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
