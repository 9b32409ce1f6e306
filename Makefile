# Everything starts here. A fresh Debian machine needs python3, python3-venv, gcc and make; the rest
# goes to .venv and build/.

ifeq ($(origin CC),default)
CC = gcc
endif
PYTHON ?= python3
VENV ?= .venv
# Set to what pip shall install when the search for a CPU build of torch below does not suit.
TORCH ?=
TORCH_VERSION = $(shell sed -n 's/^torch==//p' constraints.txt)
CPU_INDEX = https://download.pytorch.org/whl/cpu

# Where a lent machine wants its results, it says so in $OUT, which has another meaning below.
GPU_OUT := $(if $(filter environment,$(origin OUT)),$(OUT),build/gpu)

BIN = $(VENV)/bin
PIP = $(BIN)/pip install --quiet -c constraints.txt
STAMP = $(VENV)/.lightck-installed

SOURCES = $(sort $(wildcard native/src/*.c))
HEADERS = $(sort $(wildcard native/src/*.h native/include/*.h))
NATIVE_TESTS = $(sort $(wildcard native/tests/test_*.c))
TEST_HEADERS = $(sort $(wildcard native/tests/*.h))
CRASH_SOURCES = $(sort $(wildcard native/crash/*.c))
CRASH_HEADERS = $(sort $(wildcard native/crash/*.h))
KILL_SOURCES = $(sort $(wildcard native/kill/*.c))
FUZZ_SOURCES = $(sort $(wildcard native/fuzz/*.c))
FUZZ_HEADERS = $(sort $(wildcard native/fuzz/*.h))
GUEST_SOURCES = $(sort $(wildcard native/guest/*.c))
GUEST_HEADERS = $(sort $(wildcard native/guest/*.h))
INCLUDES = -Inative/include -Inative/src
DIALECT = -std=c11 -D_GNU_SOURCE -fvisibility=hidden -pthread
WARNINGS = -Wall -Wextra -Wconversion -Werror
comma = ,
OUT = build/native
TESTING = $(abspath $(OUT)/lightck-testing.so)
CROSS = aarch64-linux-gnu-gcc

.PHONY: help venv demo check test test-full lint bench bench-full bench-record bench-micro bench-compare
.PHONY: native-test crash asan tsan pmem-guest kill fuzz
.PHONY: soak clean gpu-check wheels integrations torches
.DELETE_ON_ERROR:
.SECONDARY:

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP) ## Make .venv with lightck in it, its native part compiled

# One stamp for all: an editable install compiles the native part into lightck/, so that its
# sources are prerequisites too.
$(STAMP): pyproject.toml setup.py constraints.txt Makefile $(SOURCES) $(HEADERS) | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(MAKE) --no-print-directory torch
	rm -f lightck/_native*.so
	$(PIP) -e '.[cli,timeline,test,lint,docs]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The CPU build: from wherever pip is configured to look, else from PyTorch's own index. Machines
# for which neither has one get the plain build of the same version.
.PHONY: torch
torch: | $(BIN)/python
	@echo "torch $(TORCH_VERSION): installing (a few minutes the first time)"
	@if [ -n "$(TORCH)" ]; then $(PIP) "$(TORCH)"; else \
	  $(PIP) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	  || $(PIP) --extra-index-url $(CPU_INDEX) 'torch==$(TORCH_VERSION)+cpu' \
	  || $(PIP) 'torch==$(TORCH_VERSION)'; fi

demo: venv ## Train, kill, restart and compare with an uninterrupted run
	$(BIN)/lightck demo

# Whole files at a time, since many share what they prepare; many tests wait for other processes.
PYTEST_JOBS = 4
# Compiled modules are kept: every worker and child would compile all of lightck and its tests again.
PYTEST = PYTHONDONTWRITEBYTECODE= LIGHTCK_NATIVE=$(TESTING) $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadfile
CHECKED = $(shell $(BIN)/python -c 'import sys; sys.path.insert(0, "tests"); import tiers; \
  print(*("tests/" + each for each in tiers.CHECKED))')

check: venv native-test ## Run the native and unit tests, and a few of each other kind: before a commit
	$(PYTEST) $(CHECKED)

# Both parts at once: pytest waits a tenth of the time, and the native part has one process. Mutants
# prove the checks, not the code: only test-full has them, and as many images as docs/proof.md shows.
FEWER = KILL_CYCLES=30 ORDER_MUTANTS= CRASH_MUTANTS= CRASH_IMAGES=30000 CRASH_REPORT=crash-few
test: venv ## Run the native tests, crash images and what pytest runs in minutes
	$(MAKE) --no-print-directory -j2 $(OUT)/lightck-testing.so $(OUT)/lightck-trace.so
	$(MAKE) --no-print-directory -j2 $(FEWER) native-part python-part

.PHONY: native-part python-part
native-part:
	$(MAKE) --no-print-directory --output-sync=recurse native-test crash order kill

python-part:
	$(PYTEST)

test-full: venv native-test crash order kill ## Run all tests but the long ones: before a change is whole
	$(PYTEST) -m "not soak"

soak: CRASH_IMAGES = 1000000
soak: CRASH_REPORT = crash-soak
soak: KILL_CYCLES = 2000
soak: venv native-test crash order kill fuzz ## Run the long tests
	LIGHTCK_NATIVE=$(TESTING) $(BIN)/python -m pytest -m soak --timeout 3600
	$(MAKE) --no-print-directory pmem-guest KILLS=24 IMAGES=400

BENCH_STAMP = $(VENV)/.lightck-bench-installed

$(BENCH_STAMP): $(STAMP) bench/pyproject.toml
	$(PIP) -e '.[cli,test,lint,bench]' -e bench
	touch $@

# The newest versions that the registry has, in an environment of their own, beside the CPU torch and without
# torchvision, whose wheel on the registry does not load beside it. A package that lacks skips its tests, visibly.
INTEGRATIONS = .venv-integrations
INTEGRATIONS_PIP = $(INTEGRATIONS)/bin/pip install --quiet -c constraints-integrations.txt
FRAMEWORKS = lightning transformers accelerate peft datasets torchdata deepspeed torchtitan triton torchft-nightly \
  "ray[train]"
INTEGRATION_JOBS = 3

$(INTEGRATIONS)/.installed: constraints-integrations.txt Makefile
	$(PYTHON) -m venv $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/python -c 'import torch' 2>/dev/null \
	  || $(MAKE) --no-print-directory torch VENV=$(INTEGRATIONS)
	$(INTEGRATIONS_PIP) torch==$(TORCH_VERSION) numpy pyarrow cffi safetensors \
	  pytest pytest-timeout pytest-xdist hypothesis $(FRAMEWORKS)
	touch $@

# What DeepSpeed compiles at its first use, a minute of both cores: a test that is killed meanwhile leaves a lock,
# and the others wait for it.
INTEGRATIONS_ENV = TORCH_EXTENSIONS_DIR=$(abspath $(INTEGRATIONS))/torch_extensions PYTHONDONTWRITEBYTECODE=
DEEPSPEED_OPS = $(INTEGRATIONS)/torch_extensions/.compiled
COMPILE_DEEPSPEED_OPS = import deepspeed.accelerator as a; \
  a.get_accelerator().create_op_builder("ShareMemCommBuilder").load()

$(DEEPSPEED_OPS): $(INTEGRATIONS)/.installed
	rm -rf $(@D)
	$(INTEGRATIONS_ENV) $(INTEGRATIONS)/bin/python -c '$(COMPILE_DEEPSPEED_OPS)'
	touch $@

integrations: venv $(DEEPSPEED_OPS) ## Kill and resume the frameworks' own loops, with their newest versions
	$(INTEGRATIONS_ENV) $(INTEGRATIONS)/bin/python -m pytest tests/integrations \
	  -n $(INTEGRATION_JOBS) --dist worksteal --durations 5

# Plain builds, with gigabytes of CUDA each, so that CI leaves them out. An environment is made once.
TORCHES = torch==2.13.* torch
torches: venv native-test ## Run the tests of what lies on torch's inside, on the oldest and the newest torch
	for torch in $(TORCHES); do \
	  venv=build/torches/$$torch; python=$$venv/bin/python; \
	  [ -e $$venv/.installed ] || { $(PYTHON) -m venv $$venv && $$python -m pip install --quiet "$$torch" numpy pyarrow \
	    cffi matplotlib safetensors pytest pytest-timeout pytest-xdist hypothesis && touch $$venv/.installed; } || exit 1; \
	  $$python -c 'import torch; print("torch", torch.__version__)' && \
	  PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR) LIGHTCK_NATIVE=$(TESTING) $$python -m pytest -n 4 --dist loadfile \
	    tests/unit tests/integration tests/distributed/test_in_place*.py || exit 1; \
	done

# On an idle machine: numbers measured beside other work mean little. BENCH='stress idle' runs these.
BENCH =
bench: $(BENCH_STAMP) ## Measure lightck and its peers in minutes; report in build/bench
	$(BIN)/lightck-bench run $(BENCH)
	$(BIN)/lightck-bench report -o build/bench/report.md

bench-full: $(BENCH_STAMP) ## Measure everything, in hours
	$(MAKE) --no-print-directory bench BENCH=--full

# What README and docs/benchmarks show: the newest results and one traced run. On an idle machine, after `make bench-full`.
bench-record: $(BENCH_STAMP) ## Store the results of build/bench, draw, render README and docs/benchmarks
	$(BIN)/python -m bench picture
	$(BIN)/python -m bench readme --take

bench-micro: $(BENCH_STAMP) ## Measure copies, submitting, completing and the step boundary
	@mkdir -p build/bench
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest bench/micro --benchmark-json build/bench/micro.json

# Both in turn, so that a noisy machine hits both; ROUNDS of each.
BASE =
ROUNDS = 5
bench-compare: $(BENCH_STAMP) ## Micro-benchmarks of this tree and of the commit BASE
	@test -n "$(BASE)" || { echo "which commit to compare with? make bench-compare BASE=main"; exit 2; }
	@$(BIN)/lightck-bench compare $(BASE) --rounds $(ROUNDS)

# On a bare machine, without network and .venv; with GPU_DEVICE=cpu on any, with toys. GPU_PARTS and
# GPU_BUDGET (seconds) say what and how long: docs/gpu-check.md.
GPU_PYTHON = $(firstword $(wildcard $(BIN)/python) $(PYTHON))
GPU_DEVICE = cuda
GPU_PARTS =
GPU_BUDGET =
gpu-check: ## On a machine with a GPU: its tests, then what it reaches; in build/gpu or OUT
	@$(GPU_PYTHON) -c 'import torch' || { echo "$(GPU_PYTHON) has no torch: make venv, or PYTHON="; exit 2; }
	$(GPU_PYTHON) -m bench.gpu check $(GPU_PARTS) --device $(GPU_DEVICE) --out '$(GPU_OUT)' \
	  $(if $(GPU_BUDGET),--budget $(GPU_BUDGET))

# Without CRC32 instructions where no function asks for them: `zig cc` compiles so by itself.
LINT_CLANG = clang $(if $(filter x86_64,$(shell uname -m)),-mno-crc32)
lint: venv ## Check style, types, spelling, documents and warnings of everything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/lint_tree.py
	$(BIN)/mypy examples
	$(BIN)/codespell
	@if [ -x $(BIN)/mkdocs ]; then $(MAKE) --no-print-directory pages; \
	else echo "SKIPPED: no mkdocs in $(VENV), the links of docs were not followed: pip install '.[docs]'"; fi
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(HEADERS) $(NATIVE_TESTS) $(TEST_HEADERS) \
	  $(CRASH_SOURCES) $(CRASH_HEADERS) $(GUEST_SOURCES) $(GUEST_HEADERS) \
	  $(ORDER_SOURCES) $(ORDER_HEADERS) $(KILL_SOURCES) $(FUZZ_SOURCES) $(FUZZ_HEADERS) \
	  bench/yardstick/ntcopy.c
	@$(MAKE) --no-print-directory warnings COMPILER='$(CC)'
	@if command -v clang >/dev/null; then \
	  $(MAKE) --no-print-directory warnings COMPILER='$(LINT_CLANG)'; \
	else echo "SKIPPED: no clang on PATH, the native code was compiled with $(CC) only"; fi
	@if command -v $(CROSS) >/dev/null; then \
	  $(MAKE) --no-print-directory warnings COMPILER=$(CROSS); \
	else echo "SKIPPED: no $(CROSS) on PATH, the aarch64 code was not compiled"; fi

# Not with --quiet: then --strict lets everything pass.
.PHONY: pages
pages:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Without and with fault injection, and with the trace. -O2 because part of the warnings needs the optimizer's view; the
# code is thrown away.
.PHONY: warnings
warnings:
	@set -e; compile() { $(COMPILER) $(DIALECT) $(INCLUDES) $(WARNINGS) -O2 -S -o /dev/null "$$@"; }; \
	for file in $(SOURCES) $(GUEST_SOURCES) $(KILL_SOURCES) $(FUZZ_SOURCES); do compile $$file; done; \
	for file in $(SOURCES) $(NATIVE_TESTS); do compile -DLCK_TESTING -DLCK_GUARD $$file; done; \
	for file in $(SOURCES) $(CRASH_SOURCES); do compile -DLCK_TRACE -DLCK_GUARD $$file; done; \
	compile bench/yardstick/ntcopy.c; \
	if [ '$(COMPILER)' != $(CROSS) ] && [ "$$(uname -m)" = x86_64 ] && [ -n "$(CAPSTONE)" ]; then \
	  for file in $(ORDER_SOURCES); do compile -DLCK_TRACE -Inative/crash $$file; done; fi
	@echo "$(COMPILER) $(WARNINGS): no warnings"

# The release build's objects. EXTENSION_FLAGS are those of the extension that pip builds.
EXTENSION_FLAGS = $(eval EXTENSION_FLAGS := $(shell $(PYTHON) -c \
  'import sysconfig; print(sysconfig.get_config_var("CFLAGS"))') -fPIC $(shell \
  sed -n 's/^extra-compile-args = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",'))$(EXTENSION_FLAGS)
EXTENSION_COMPILE = $(CC) $(EXTENSION_FLAGS) $(INCLUDES) -c
EXTENSION_OBJECTS = $(SOURCES:native/src/%.c=$(OUT)/extension/%.o)

$(OUT)/extension/%.o: native/src/%.c $(HEADERS) Makefile pyproject.toml
	@mkdir -p $(@D)
	$(EXTENSION_COMPILE) -o $@ $<

# Every store to a region traced, crash images of real commits enumerated, and mistakes in the commit
# order, made on purpose, caught. CRASH_IMAGES=1000000 soaks; CRASH_MUTANTS= makes no mistakes.
CRASH_IMAGES = 120000
CRASH_MUTANTS = yes
CRASH_REPORT = crash
CRASH_OBJECTS = $(SOURCES:native/src/%.c=$(OUT)/crash/%.o) $(CRASH_SOURCES:native/crash/%.c=$(OUT)/crash/%.o)
# The tracing is visible: these are the trace library's objects, too.
CRASH_COMPILE = $(CC) $(filter-out -fvisibility=hidden,$(DIALECT)) $(INCLUDES) -Wall -Wextra -O2 -g -fPIC \
  -DLCK_TRACE -DLCK_GUARD -c -o $@ $<

crash: $(OUT)/crash/crash same-code ## Enumerate crash images and mutants of the commit order
	@mkdir -p build/proof
	$(OUT)/crash/crash --images $(CRASH_IMAGES) $(if $(CRASH_MUTANTS),,--skip-mutants) \
	  --json build/proof/$(CRASH_REPORT).json

.PHONY: same-code
same-code: $(EXTENSION_OBJECTS)
	bash native/crash/same_code.sh $(OUT)/same-code $(OUT)/extension $(EXTENSION_COMPILE)

$(OUT)/crash/crash: $(CRASH_OBJECTS)
	$(CC) -pthread -o $@ $^ -lm

$(OUT)/crash/%.o: native/src/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CRASH_COMPILE)

$(OUT)/crash/%.o: native/crash/%.c $(HEADERS) $(CRASH_HEADERS) Makefile
	@mkdir -p $(@D)
	$(CRASH_COMPILE)

# lckguest is the release code (the flags of pyproject.toml), linked statically for a guest without
# a C library. JOBS chooses by name ("core": about a minute), KILLS and IMAGES say how often.
GUEST = build/guest
GUEST_OBJECTS = $(GUEST_SOURCES:native/guest/%.c=$(OUT)/guest/%.o)
RELEASE_OBJECTS = $(SOURCES:native/src/%.c=$(OUT)/release/%.o)
LIES = -Wl,--wrap=mmap,--wrap=fsync
JOBS =
KILLS = 3
IMAGES = 30
SEED =

pmem-guest: ## Kill an emulated machine with persistent memory while it commits (JOBS=core)
	@bash tests/guest/install.sh $(GUEST) cloud && $(MAKE) --no-print-directory run-guest \
	  || test $$? = 77

.PHONY: run-guest
run-guest: $(GUEST)/lckguest $(GUEST)/lckguest-liar $(GUEST)/lightck-release.so
	@$(PYTHON) -m tests.guest $(JOBS) --folder $(GUEST) --kernel $(GUEST)/kernel-cloud \
	  --programs $(GUEST)/lckguest $(GUEST)/lckguest-liar \
	  --python $(BIN)/python --library $(GUEST)/lightck-release.so \
	  --kills $(KILLS) --images $(IMAGES) $(if $(SEED),--seed $(SEED))

$(GUEST)/lckguest: $(RELEASE_OBJECTS) $(filter-out %/liar.o,$(GUEST_OBJECTS))
	@mkdir -p $(@D)
	$(CC) -static -pthread -o $@ $^ -lm

$(GUEST)/lckguest-liar: $(RELEASE_OBJECTS) $(GUEST_OBJECTS)
	@mkdir -p $(@D)
	$(CC) -static -pthread $(LIES) -o $@ $^ -lm

$(GUEST)/lightck-release.so: $(RELEASE_OBJECTS)
	@mkdir -p $(@D)
	$(CC) -shared -pthread -o $@ $^ -lm

$(OUT)/release/%.o: native/src/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(DIALECT) $(INCLUDES) -Wall -Wextra -O3 -fPIC -c -o $@ $<

$(OUT)/guest/%.o: native/guest/%.c $(HEADERS) $(GUEST_HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(DIALECT) $(INCLUDES) -Wall -Wextra -O2 -c -o $@ $<

# The release build's own instructions, one at a time: the same stores, flushes and fences, in the
# same order, as the trace build has seen.
ORDER_SOURCES = $(sort $(wildcard native/order/*.c))
ORDER_HEADERS = $(sort $(wildcard native/order/*.h))
ORDER_OBJECTS = $(patsubst native/order/%.c,$(OUT)/order/%.o,$(filter-out %/tracee.c,$(ORDER_SOURCES)))
ORDER_COMPILE = $(CC) $(DIALECT) $(INCLUDES) -Inative/crash -Wall -Wextra -O2 -g -DLCK_TRACE -c -o $@ $<
TRACEE_OBJECTS = $(OUT)/order/tracee.o \
  $(patsubst %,$(OUT)/order/program/%.o,driver entries feed oracle)
TRACEE_LINK = $(CC) -pthread -Wl,--no-as-needed -lm -Wl,-z,now,--wrap=lck_medium_detect,--wrap=lck_space_reserve,--wrap=lck_space_extend
CAPSTONE = $(shell echo 'int main(void) { return 0; }' \
  | $(CC) -include capstone/capstone.h -x c - -o /dev/null -lcapstone 2>/dev/null && echo yes)

ORDER_MUTANTS = $(OUT)/order/mutants
.PHONY: order
# Objects that other targets have too are made here: the make below would make them at the same time.
order: $(CRASH_OBJECTS) $(EXTENSION_OBJECTS) ## Compare the release's instructions with the trace
	@if [ "$$(uname -m)" != x86_64 ]; then \
	  echo "SKIPPED: order: this check steps through x86 instructions only"; \
	elif [ -z "$(CAPSTONE)" ]; then \
	  echo "SKIPPED: order: no capstone to decode instructions with: apt-get install libcapstone-dev"; \
	else $(MAKE) --no-print-directory run-order; fi

# The C library's own copies: capstone 4 cannot decode some of their instructions.
NO_AVX512 = glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512CD,-AVX512DQ

.PHONY: run-order
run-order: $(OUT)/order/order $(OUT)/order/tracee $(ORDER_MUTANTS)
	@mkdir -p build/proof
	sed 's/\t/\n/g' $(or $(ORDER_MUTANTS),/dev/null) | GLIBC_TUNABLES=$(NO_AVX512) xargs -d '\n' \
	  $(OUT)/order/order --json build/proof/$(if $(ORDER_MUTANTS),order,order-release).json $(abspath $(OUT)/order/tracee)

$(OUT)/order/order: $(ORDER_OBJECTS) $(filter-out %/main.o,$(CRASH_OBJECTS))
	$(CC) -pthread -o $@ $^ -lcapstone -lm

$(OUT)/order/tracee: $(TRACEE_OBJECTS) $(EXTENSION_OBJECTS)
	$(TRACEE_LINK) -o $@ $^

$(OUT)/order/mutants: native/order/mutants.sh $(TRACEE_OBJECTS) $(EXTENSION_OBJECTS)
	bash native/order/mutants.sh $(abspath $(OUT)/order/mutant) $(OUT)/extension $(TRACEE_OBJECTS) \
	  -- $(TRACEE_LINK) -- $(EXTENSION_COMPILE) >$@

$(OUT)/order/program/%.o: native/crash/%.c $(HEADERS) $(CRASH_HEADERS) Makefile
	@mkdir -p $(@D)
	$(ORDER_COMPILE)

$(OUT)/order/%.o: native/order/%.c $(HEADERS) $(CRASH_HEADERS) $(ORDER_HEADERS) Makefile
	@mkdir -p $(@D)
	$(ORDER_COMPILE)

# A writer killed at random instants on every medium, and recovered each time.
KILL_CYCLES = 120
kill: $(OUT)/kill_loop ## Kill and recover a native writer, KILL_CYCLES times per medium
	bash native/kill/run.sh $< $(KILL_CYCLES) $(KILL_SEED)

$(OUT)/kill_loop: native/kill/kill_loop.c $(SOURCES:native/src/%.c=$(OUT)/plain/%.o)
	$(CC) $(DIALECT) $(INCLUDES) -Wall -Wextra -O2 -g -o $@ $^ -lm

# What readers and owners make of any bytes at all, guided by coverage.
FUZZ_SECONDS = 120
fuzz: ## Fuzz the native region parser for FUZZ_SECONDS (needs clang)
	bash native/fuzz/run.sh $(OUT)/fuzz $(FUZZ_SECONDS) $(DIALECT) $(INCLUDES)

native-test: run-plain $(OUT)/lightck-testing.so $(OUT)/lightck-trace.so ## Run the native tests

asan: run-asan ## Run the native tests under AddressSanitizer and UBSan

tsan: run-tsan ## Run the native tests under ThreadSanitizer

# $(1): name; $(2): flags; $(3): command to run a program with. Objects have fault injection
# (LCK_TESTING) in them and are shared by all test programs of the variant.
define variant
$(OUT)/$(1)/%.o: native/src/%.c $(HEADERS) Makefile
	@mkdir -p $$(@D)
	$(CC) $(DIALECT) $(INCLUDES) -Wall -Wextra $(2) -DLCK_TESTING -fPIC -c -o $$@ $$<

$(OUT)/$(1)/test_%: native/tests/test_%.c $(SOURCES:native/src/%.c=$(OUT)/$(1)/%.o) $(TEST_HEADERS)
	$(CC) $(DIALECT) $(INCLUDES) -Wall -Wextra $(2) -DLCK_TESTING -o $$@ $$(filter %.c %.o,$$^) -lm

.PHONY: run-$(1)
run-$(1): $(NATIVE_TESTS:native/tests/%.c=$(OUT)/$(1)/%)
	@failed=; for program in $$^; do echo "$$$$program"; \
	  $(3) $$$$program || failed="$$$$failed $$$$program"; done; \
	if [ -n "$$$$failed" ]; then echo "FAILED:$$$$failed"; exit 1; fi
endef

# ThreadSanitizer knows memory by its address: a race through the guard's two mappings (guard.h) would
# be none to it, so that variant has one.
# gcc 12's ThreadSanitizer cannot start under the address randomization of newer kernels.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
$(eval $(call variant,plain,-O2 -g -DLCK_GUARD))
$(eval $(call variant,asan,-O1 -g -DLCK_GUARD -fno-omit-frame-pointer -fsanitize=address$(comma)undefined \
  -fno-sanitize-recover=all))
$(eval $(call variant,tsan,-O1 -g -fsanitize=thread,$$(FIXED_ADDRESSES)))

# The trace build as a library: tests trace a real training run with it.
$(OUT)/lightck-trace.so: $(SOURCES:native/src/%.c=$(OUT)/crash/%.o) $(OUT)/crash/trace.o
	$(CC) -shared -pthread -o $@ $^ -lm

# What Python tests load through LIGHTCK_NATIVE to inject faults.
$(OUT)/lightck-testing.so: $(SOURCES:native/src/%.c=$(OUT)/plain/%.o)
	$(CC) -shared -pthread -o $@ $^ -lm

# Needs the registry for its tools, which get an environment of their own.
WHEELS = build/wheels/venv
$(WHEELS)/.installed: tools/wheels.txt
	$(PYTHON) -m venv --clear $(WHEELS)
	$(WHEELS)/bin/pip install --quiet -r $<
	touch $@

wheels: $(WHEELS)/.installed ## Build the sdist and manylinux wheels into dist/, and check them
	bash tools/wheels.sh $(WHEELS)/bin

clean: ## Remove everything that was built, .venv included
	rm -rf $(VENV) $(INTEGRATIONS) build dist *.egg-info bench/*.egg-info lightck/_native*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
