#!/usr/bin/env bash
# kvgate on the head node of a Ray cluster: starts Ray's head and kvgate beside it, and stops both in
# order. `ray start` of the other nodes is as ever; jobs get KVGATE_URL through runtime_env.yaml.
#
#     deploy/ray/start_head.sh [further options of `ray start --head`]
#
# What is read from the environment, with its default. Every setting of `kvgate serve` has its own
# variable beside these, such as KVGATE_ADMISSION_HEADROOM.
#   GATE_BIN           the program                                    kvgate
#   GATE_ROUTER        the router in front of the engines             http://127.0.0.1:30000
#   GATE_BIND          address that kvgate listens on                 0.0.0.0
#   GATE_PORT          port of kvgate                                 7070
#   GATE_DATA          directory of the store, on a local disk        /var/lib/kvgate
#   GATE_HOST          the name under which workers reach this node   the full host name
#   KVGATE_TOKEN_FILE  tokens for callers                             none: everybody in the cluster may call
set -euo pipefail

bin=${GATE_BIN:-kvgate}
router=${GATE_ROUTER:-http://127.0.0.1:30000}
bind=${GATE_BIND:-0.0.0.0}
port=${GATE_PORT:-7070}
data=${GATE_DATA:-/var/lib/kvgate}
host=${GATE_HOST:-$(hostname -f 2>/dev/null || hostname)}

guard=(--insecure-no-auth)
[[ -z ${KVGATE_TOKEN_FILE:-} ]] || guard=()

ray start --head "$@"

stop() {
    trap - EXIT TERM INT
    [[ -z ${gate:-} ]] || kill -TERM "$gate" 2>/dev/null || true
    wait || true
    ray stop
}
trap stop EXIT
trap 'exit 143' TERM INT

# 69, 74 and 75 pass by themselves (the address, the disk, the store in use); 0 is an orderly stop, and
# any other code needs somebody to look.
while true; do
    status=0
    "$bin" serve --listen "$bind:$port" --allowed-host "$host" --data "$data" \
        --router "$router" --program-admission --session-lifecycle --log-format json \
        ${guard[@]+"${guard[@]}"} &
    gate=$!
    wait "$gate" || status=$?
    gate=
    case $status in
        0) exit 0 ;;
        2 | 65 | 77 | 78) exit "$status" ;;
        *) echo "kvgate ended with $status; it is started again" >&2 ;;
    esac
    sleep 2
done
