# The commands of a working day. `make` lists them.

TARGET := $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := help
.PHONY: help run release test check soak bench servers clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# `exec`, so that Ctrl-C and SIGTERM reach Pillarbox itself and it drains.
# Not optimised: it is ready in a third of the time, and shares what `make test` built.
run: ## build and run Pillarbox with a PostgreSQL of its own (ARGS="--flags")
	@scripts/setup run
	cargo build --locked --package pillarbox
	@exec $(TARGET)/debug/pillarbox $(ARGS)

release: ## build what you deploy: target/release/pillarbox
	cargo build --release --locked --package pillarbox

test: ## everything that CI checks: format, lints, all tests on real servers
	@scripts/setup test
	@$(MAKE) --no-print-directory check
	scripts/with-servers cargo test --workspace --locked

check: ## format and lints only, no servers
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

soak: ## the same tests, longer and larger
	@scripts/setup test
	PBX_SOAK=1 scripts/with-servers cargo test --release --workspace --locked

bench: ## measure (BENCH_ARGS="--flags")
	@scripts/setup test
	cargo build --release --locked --package pillarbox --package pillarbox-bench
	PBX_TEST_FSYNC=on scripts/with-servers $(TARGET)/release/pillarbox-bench $(BENCH_ARGS)

servers: ## a shell next to the test servers, for running one test again and again
	@scripts/setup test
	@scripts/with-servers $${SHELL:-bash}

clean: ## remove everything that was built
	cargo clean
