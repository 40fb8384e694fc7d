# One verb a line; each makes what it needs and is safe to run again.
PYTHON ?= python3
ENGINE ?= engines/recipes/smollm2-135m-rtx.toml
# The demo's bundle has one name and place, whatever this machine's target is.
ifeq ($(origin RECIPE),undefined)
NAMED  := --set name=smollm2-135m
BUNDLE ?= engines/store/smollm2-135m
RECIPE := engines/recipes/smollm2-135m-$(shell bash scripts/demo_target.sh).toml
endif
BUNDLE ?= engines/store/$(basename $(notdir $(RECIPE)))
PROMPT ?= What is the capital of France?
SYSTEM ?= You are a helpful assistant. Answer in one short sentence.
PORT   ?= 8000
METRICS_PORT ?= 8001
JOBS   ?= 2

# Through the environment, so that quotes and dollars in a prompt reach the command as they are.
export PROMPT SYSTEM

BIN   := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/pytest -q --durations=15
# A worker takes a file at a time (tests/conftest.py), in this order: the long ones come first.
TESTS  := $(PYTEST) -n $(JOBS) --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo serve build-engine bundle verify test soak check bench screenshots clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

$(READY): pyproject.toml constraints.txt
	@bash scripts/setup.sh "$(PYTHON)"

build-engine: $(READY) ## real TensorRT-RTX engines of the demo model, without a GPU (ENGINE=… for another recipe)
	@$(BIN)/ostinato build $(ENGINE)

bundle: $(READY) ## the demo's bundle for this CPU, which demo, serve and bench run (RECIPE=… for another)
	$(if $(NAMED),@bash scripts/demo_target.sh --why)
	@$(BIN)/ostinato build $(RECIPE) $(NAMED)

demo: bundle ## a streamed chat answer (PROMPT="…")
	@$(BIN)/ostinato chat $(BUNDLE) --system "$$SYSTEM" --prompt "$$PROMPT" --greedy

serve: bundle ## the OpenAI-compatible server on 127.0.0.1 (PORT=8000 METRICS_PORT=8001)
	@$(BIN)/ostinato serve $(BUNDLE) --port $(PORT) --metrics-port $(METRICS_PORT)

verify: bundle ## the demo's bundle beside transformers in float32, which takes some minutes
	@$(BIN)/ostinato verify $(RECIPE) --bundle $(BUNDLE)

test: $(READY) ## every test that needs no GPU
	@$(TESTS)

soak: $(READY) ## the same tests at full size, held to times: an hour or so on an idle machine
	@OSTINATO_SOAK=1 $(TESTS) -m "not timed"
	@OSTINATO_SOAK=1 $(PYTEST) -m timed

check: $(READY) ## checks format, lint and types
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy engines plugins builder runtime tests benchmarks

bench: bundle ## step times and the Python share of a step
	@$(BIN)/python benchmarks/decode_step.py $(BUNDLE)

screenshots: bundle ## the console's pictures in docs/, of the demo model under load (needs chromium)
	@OSTINATO_SCREENSHOTS=docs OSTINATO_BUNDLE=$(BUNDLE) $(BIN)/pytest -q -rs tests/runtime/test_console_pictures.py

clean: ## remove the environment and everything built
	rm -rf .venv .types .cache engines/store build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
