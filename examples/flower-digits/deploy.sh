#!/usr/bin/env bash
# A federation of real processes on this machine: a SuperLink with TLS and node authentication, and
# NODES SuperNodes with a folder each. Runs the app, and ends every process that it started.
#
#   ./deploy.sh                              4 nodes, 3 rounds
#   NODES=6 ROUNDS=5 ./deploy.sh 'dropouts=2'   other settings of the run
#
# KEEP=folder keeps keys, logs and the nodes' memories there. Nothing is fetched from the network.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nodes=${NODES:-4} rounds=${ROUNDS:-3} port=${PORT:-38000}
work=${KEEP:-$(mktemp -d)}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_HOME=$work/flwr
mkdir -p "$FLWR_HOME"

pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    [[ -n "${KEEP:-}" ]] || rm -rf "$work"
}
trap finish EXIT

python "$here/make_keys.py" "$work" "$nodes"
cat >"$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "tls"

[superlink.tls]
address = "127.0.0.1:$port"
root-certificates = "$work/ca.crt"
TOML

flower-superlink --ssl-certfile "$work/server.pem" --ssl-keyfile "$work/server.key" \
    --ssl-ca-certfile "$work/ca.crt" --enable-supernode-auth --host 127.0.0.1 --port "$port" \
    --disable-runtime-dependency-installation >"$work/superlink.log" 2>&1 &
pids+=($!)
until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    kill -0 "${pids[0]}" 2>/dev/null || { tail "$work/superlink.log" >&2; exit 1; }
    sleep 0.5
done

for ((node = 0; node < nodes; node++)); do
    flwr supernode register "$work/node$node.pub" tls
    mkdir -p "$work/memory$node"
    flower-supernode --root-certificates "$work/ca.crt" --superlink "127.0.0.1:$port" \
        --auth-supernode-private-key "$work/node$node" \
        --host 127.0.0.1 --port "$((port + 10 + node))" \
        --node-config "partition-id=$node num-partitions=$nodes lightsecagg-dir=\"$work/memory$node\"" \
        >"$work/node$node.log" 2>&1 &
    pids+=($!)
    echo $! >"$work/node$node.pid"
done

flwr run "$here" tls --stream --run-config "nodes=$nodes rounds=$rounds ${1:-}"
