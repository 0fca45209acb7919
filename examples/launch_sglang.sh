#!/usr/bin/env bash
# Starts SGLang engines, a router in front of them and kvgate beside them, with both features on. Ctrl-C ends all.
#
#   MODEL=Qwen/Qwen3-8B ENGINES=2 examples/launch_sglang.sh [more engine flags]
#
# Then point the rollout at the router (http://127.0.0.1:30000) and its kvgate client at http://127.0.0.1:7070.
set -euo pipefail

: "${MODEL:?names the model, a path or a name of the hub}"
engines=${ENGINES:-1}                     # engines on this host, one after another on its GPUs
gpus=${GPUS_PER_ENGINE:-1}                # tensor parallelism of an engine
router_port=${ROUTER_PORT:-30000}
engine_port=${ENGINE_PORT:-31000}         # the first engine's; the others follow
data=${KVGATE_DATA:-./kvgate-data}

pids=()
finish() {
    trap - EXIT INT TERM
    ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
    wait
}
trap finish EXIT
trap 'exit 130' INT TERM

urls=()
for ((i = 0; i < engines; i++)); do
    port=$((engine_port + i))
    # The session radix cache with priority eviction is what makes a session close free KV. Metrics let kvgate tell
    # evictable tokens from used ones.
    python -m sglang.launch_server --model-path "$MODEL" --host 127.0.0.1 --port "$port" \
        --tp-size "$gpus" --base-gpu-id $((i * gpus)) --enable-metrics \
        --enable-session-radix-cache --radix-eviction-policy priority "$@" &
    pids+=($!)
    urls+=("http://127.0.0.1:$port")
done

# Placement stays with the router: kvgate never picks an engine.
python -m sglang_router.launch_router --host 127.0.0.1 --port "$router_port" \
    --worker-urls "${urls[@]}" --policy cache_aware --worker-startup-timeout-secs 1800 &
pids+=($!)

# It waits for the fleet by itself: until the engines answer, every request is a bypass.
kvgate serve --router "http://127.0.0.1:$router_port" --data "$data" \
    --program-admission --session-lifecycle &
pids+=($!)

# When one of them ends, all end.
wait -n "${pids[@]}"
