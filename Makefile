# One command surface, the same locally and in CI. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
MODULES := lorafleet_api lorafleet_operator lorafleet_runtime lorafleet_local

.PHONY: help setup demo up down status check test generate bench-demo clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Environment, control-plane binaries and base model (once; at once when nothing changed)
	@hack/setup.sh

demo: setup ## Train three adapters through AdapterRun objects and prove that they learnt
	@exec $(BIN)/lorafleet-local demo

up: setup ## Start the one-machine edition for your own `kubectl apply -f adapterrun.yaml`
	@exec $(BIN)/lorafleet-local up

down: ## Stop what `make up` (or a killed demo) started
	@if [[ -x $(BIN)/lorafleet-local ]]; then hack/down.sh; fi

status: ## Show which processes of `make up` live
	@exec $(BIN)/lorafleet-local status

check: setup ## Lint, types, import layers, sizes, Dockerfile
	$(BIN)/ruff check .
	$(BIN)/mypy --strict $(addprefix -p ,$(MODULES))
	$(BIN)/lint-imports
	$(BIN)/python hack/check_sizes.py
	$(BIN)/hadolint --ignore DL3008 Dockerfile  # apt pins would break with every update of the base image

test: setup ## All tests: unit, contract, numerics, cluster; prints the time of each part
	@hack/test.sh

generate: setup ## Write the generated files (CRDs) again
	$(BIN)/python -m lorafleet_api.generate

bench-demo: setup ## Run the demo and write bench/demo.json
	@exec $(BIN)/lorafleet-local demo --bench bench/demo.json

clean: down ## Remove the environment and this checkout's state; the cache outside the tree stays
	rm -rf .venv .lorafleet .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
