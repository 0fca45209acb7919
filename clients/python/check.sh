#!/usr/bin/env bash
# Checks the Python client on a machine that has python3 with venv, pip and a kvgate binary: format, lints, types, tests.
# The binary is the one that KVGATE_BIN names, else the debug build, which is made when it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

root=$(cd ../.. && pwd)
venv=$root/target/python-client
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

if [[ -z ${KVGATE_BIN:-} ]]; then
    KVGATE_BIN=$root/target/debug/kvgate
    [[ -x $KVGATE_BIN ]] || (cd "$root" && cargo build --locked)
fi
export KVGATE_BIN

python3 -m venv --clear "$venv"
# Dependency groups need a newer pip than Python 3.11 brings.
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet --group lint --group test --group ray --group trackers --editable .

"$venv/bin/ruff" format --check . "$root/examples"
"$venv/bin/ruff" check . "$root/examples"
"$venv/bin/mypy"
"$venv/bin/python" -m pytest --durations=5 "$@"
