# The commands of a working day. `make` lists them.

TARGET := $(or $(CARGO_TARGET_DIR),target)

# Tests wait for servers most of the time, so more of them run than there are cores.
export RUST_TEST_THREADS ?= 6
# Each test appends its duration to this file.
DURATIONS := $(TARGET)/test-durations

.DEFAULT_GOAL := help
.PHONY: help run rabbitmq release test test-all check audit soak bench servers clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# `exec`, so that Ctrl-C and SIGTERM reach Pillarbox itself and it finishes its work in progress.
# The profile of the tests, with which it shares its artifacts. See Cargo.toml for its speed.
run: ## build and run Pillarbox with an embedded PostgreSQL (ARGS="--flags")
	@scripts/setup run
	@scripts/console try
	cargo build --locked --package pillarbox-server
	@echo 'This is the build for development. To deploy or to measure, use `make release`.'
	@exec $(TARGET)/debug/pillarbox $(ARGS)

rabbitmq: ## open a shell with a private RabbitMQ, to which Pillarbox connects if it is started there
	@scripts/setup rabbitmq
	@PBX_TEST_SERVERS=rabbitmq scripts/with-servers bash -c \
		'export PILLARBOX_AMQP_URL=$$PBX_TEST_AMQP_URL RABBITMQ_API=$$PBX_TEST_AMQP_API; \
		echo "RabbitMQ runs until you leave this shell (exit). PILLARBOX_AMQP_URL is set: \`make run\` uses it."; \
		$${SHELL:-bash}; true'

release: ## build the binary for deployment: target/release/pillarbox
	@scripts/console try
	cargo build --release --locked --package pillarbox-server

# The console is built first: the server embeds it, and must not be built again while tests run it. The tests start the program that
# is built before them.
test: ## run all checks of CI: format, lints, and all tests on real servers
	@scripts/setup test
	@scripts/console build
	@$(MAKE) --no-print-directory check
	@rm -f $(DURATIONS)
	cargo build --locked --package pillarbox-server
	PBX_TEST_DURATIONS=$(abspath $(DURATIONS)) scripts/with-servers cargo test --workspace --locked
	PILLARBOX_BIN=$(abspath $(TARGET)/debug/pillarbox) scripts/console test
	@echo 'The ten slowest tests, in seconds:'
	@sort -rn $(DURATIONS) | head -n 10

test-all: test ## run what `make test` runs and the extended tests, which need more packages and time
	@scripts/setup test-all
	scripts/with-servers cargo test --workspace --locked --test extended

check: ## check format and lints only, without servers
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

audit: ## check advisories and licences of the dependencies (needs cargo-deny and access to GitHub)
	cargo deny --all-features check

soak: ## run the long form of the soak tests; `make test` runs their short form
	@scripts/setup test
	cargo build --release --locked --package pillarbox-server
	PBX_SOAK=1 scripts/with-servers cargo test --release --workspace --locked

bench: ## run the benchmarks (BENCH_ARGS="--flags")
	@scripts/setup test
	cargo build --release --locked --package pillarbox-server --package pillarbox-bench
	PBX_TEST_FSYNC=on scripts/with-servers $(TARGET)/release/pillarbox-bench $(BENCH_ARGS)

servers: ## open a shell with running test servers, to run one test repeatedly
	@scripts/setup test
	@scripts/with-servers bash -c '$${SHELL:-bash}; true'

clean: ## remove all build artifacts
	cargo clean
