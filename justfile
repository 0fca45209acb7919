# Short names for the usual work; `just` alone lists them.

default:
    @just --list --unsorted

# what a change must pass: format, lints, tests
check: fmt-check lint test

# all tests, as in the README
test:
    cargo test --workspace

# only the house checks
tidy:
    cargo test -p kvgate --test it tidy

# format everything
fmt:
    cargo fmt --all

# is everything formatted
fmt-check:
    cargo fmt --all --check

# clippy, warnings denied; licences and duplicates when cargo-deny is installed
lint:
    cargo clippy --workspace --all-targets --locked -- -D warnings
    if command -v cargo-deny >/dev/null; then cargo deny check; else echo "cargo-deny is not installed: skipped"; fi

# API documents of the crates, warnings denied
doc:
    RUSTDOCFLAGS=-Dwarnings cargo doc --no-deps --workspace --locked

# the whole thing on one machine, without a GPU
demo *ARGS:
    cargo run --release -- demo {{ ARGS }}

# the dashboard in a real browser
browser *ARGS:
    tests/browser/check.sh {{ ARGS }}

# pictures of every screen in light, dark and phone width, from the demo
screenshots FOLDER="target/screenshots":
    tests/browser/check.sh screenshots.mjs "$(pwd)/{{ FOLDER }}"

# what the tools of others say of the files in deploy/
deploy:
    python3 deploy/check.py

# benchmarks; they print what they ran on
bench *ARGS:
    cargo bench --workspace {{ ARGS }}

# load on a service over HTTP, beside the disk and bare axum: `just load --scenario open,contended`
load *ARGS:
    cargo run --release -- bench {{ ARGS }}

# kvgate beside Redis and a Ray actor; writes docs/performance.md
compare *ARGS:
    python3 benches/compare/run.py {{ ARGS }}

# mutation tests of the core (needs cargo-mutants); narrow them with --file
mutants *ARGS:
    cargo mutants --package kvgate-core {{ ARGS }}

# closes and the agent harness at a real SGLang on the CPU; the first run installs 6 GB (docs/ci.md)
real-engine:
    KVGATE_REAL_ENGINE=1 nice cargo test --locked -p kvgate --test it real_engine:: -- --nocapture

# plants known bugs in a copy of the tree; a named test must fail for each
sabotage *WORDS:
    python3 tests/sabotage.py {{ WORDS }}

# seeds of the simulation of the whole gate, on release code; a failing seed prints its last events
seeds COUNT="1500":
    KVGATE_SIM_SEEDS={{ COUNT }} cargo test --release --locked -p kvgate-sim --test seeds -- --nocapture

# fuzz targets, so many seconds each, on optimised code with overflow checks
fuzz SECONDS="60" TARGETS="fuzz::":
    BOLERO_RANDOM_TEST_TIME_MS={{ SECONDS }}000 RUST_BACKTRACE=0 CARGO_PROFILE_TEST_OPT_LEVEL=2 cargo test --locked --workspace --lib --target-dir target/fuzz -- {{ TARGETS }}

# the long runs: many more random cases, seeds and kills, on release code
nightly CASES="20000" ROUNDS="200" SEEDS="10000":
    PROPTEST_CASES={{ CASES }} cargo test --release --locked -p kvgate-core
    KVGATE_SIM_SEEDS={{ SEEDS }} cargo test --release --locked -p kvgate-sim --test seeds
    KVGATE_REAL=1 KVGATE_TORTURE_ROUNDS={{ ROUNDS }} cargo test --release --locked --workspace
    KVGATE_RAY_SHARDS=16 KVGATE_BIN="$PWD/target/release/kvgate" clients/python/check.sh
    KVGATE_CHURN=1000000 cargo test --release --locked -p kvgate --test it durable::churn
    cargo bench --bench restart

# the Python client: lints, types, tests, in a fresh virtual environment
python *ARGS:
    clients/python/check.sh {{ ARGS }}

# everything of docs/ci.md, with its time caps
ci:
    .ci/run
