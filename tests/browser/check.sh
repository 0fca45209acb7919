#!/usr/bin/env bash
# The dashboard in a real browser. Needs Node 20 or newer, npm and a kvgate binary; Chromium is that of the machine, else,
# as root, the package of the distribution. The binary is the one that KVGATE_BIN names, else the debug build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

root=$(cd ../.. && pwd)
if [[ -z ${KVGATE_BIN:-} ]]; then
    KVGATE_BIN=$root/target/debug/kvgate
    [[ -x $KVGATE_BIN ]] || (cd "$root" && cargo build --locked)
fi
export KVGATE_BIN

if [[ -z ${KVGATE_CHROMIUM:-} ]]; then
    if ! command -v chromium >/dev/null; then
        if ((EUID != 0)); then
            echo "chromium is missing: install it, or name one in KVGATE_CHROMIUM" >&2
            exit 1
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
    fi
    KVGATE_CHROMIUM=$(command -v chromium)
fi
export KVGATE_CHROMIUM

npm ci --no-audit --no-fund --silent
exec node "${@:---test}"
