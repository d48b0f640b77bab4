#!/usr/bin/env bash
# Times the import of routes into a cluster of three nodes, and their removal; figures of docs/results/router.md.
#
# usage: scripts/bench-route-import.sh CROSSLANE [ROUTES [BUSY]]
#
# CROSSLANE is the built command, ROUTES the number of routes (1000000), BUSY the number of busy loops beside it (0).
# Needs root, iproute2 and python3. Everything is in network namespaces of its own, which are removed at the end.
set -euo pipefail

crosslane=$(realpath "$1")
routes=${2:-1000000}
busy=${3:-0}
many=$((routes + 100))
name=import$$
folder=$(mktemp -d)
nodes=(a b c)
busy_pids=()

cleanup() {
  "$crosslane" router down --cluster "$folder/cluster.toml" > /dev/null 2>&1 || true
  for pid in "${busy_pids[@]}"; do kill "$pid" 2> /dev/null || true; done
  for node in bare "${nodes[@]}"; do ip netns del "$name-$node" 2> /dev/null || true; done
  rm -rf "$folder"
}
trap cleanup EXIT

python3 - "$routes" "$folder" << 'PYTHON'
import sys
routes, folder = int(sys.argv[1]), sys.argv[2]
prefixes = (number for number in range(11 << 16, 224 << 16) if number >> 16 != 127)
with open(f"{folder}/add", "w") as add, open(f"{folder}/delete", "w") as delete:
    for index, number in zip(range(routes), prefixes):
        prefix = f"{number >> 16}.{number >> 8 & 255}.{number & 255}.0/24"
        add.write(f"route add {prefix} via 10.77.0.{2 + index % 4}\n")
        delete.write(f"route del {prefix}\n")
PYTHON

# A namespace with an interface eth0 whose other end is there too, and with an address.
namespace() {
  ip netns add "$name-$1"
  ip -n "$name-$1" link set lo up
  ip -n "$name-$1" link add eth0 type veth peer name eth1
  ip -n "$name-$1" link set eth0 up
  ip -n "$name-$1" link set eth1 up
  ip -n "$name-$1" address add "$2" dev eth0
}

seconds() { # COMMAND...: the time that it takes
  local begin
  begin=$(date +%s.%N)
  "$@"
  echo "$(date +%s.%N) $begin" | awk '{ printf "%.1f", $1 - $2 }'
}

wait_for() { # NODE LEAST MOST: until the number of its routes is in this range
  local found
  while true; do
    found=$("$crosslane" router status --cluster "$folder/cluster.toml" --node "$1" --json 2> /dev/null | python3 -c '
import json, sys
print(json.load(sys.stdin)["nodes"][0]["status"]["routes"]["v4"])' 2> /dev/null || echo -1)
    if [ "$found" -ge "$2" ] && [ "$found" -le "$3" ]; then return; fi
    sleep 0.1
  done
}

batch_and_wait() { # FILE LEAST MOST
  ip -n "$name-a" -batch "$folder/$1"
  for node in "${nodes[@]}"; do wait_for "$node" "$2" "$3"; done
}

pid_of() { cat "$pid_folder/$1.pid"; }

memory() {
  for node in "${nodes[@]}"; do
    awk -v node="$node" '/VmRSS/ { printf "  %s %.0f MB", node, $2 / 1024 }' "/proc/$(pid_of "$node")/status"
    awk '{ printf " (%.1f s of processor time)", ($14 + $15) / 100 }' "/proc/$(pid_of "$node")/stat"
  done
  echo
}

losses() {
  "$crosslane" router status --cluster "$folder/cluster.toml" --json | python3 -c '
import json, sys
print(sum(peer["losses"] for node in json.load(sys.stdin)["nodes"] for peer in node["status"]["peers"]))'
}

namespace bare 10.77.0.1/24
echo "bare namespace: add $(seconds ip -n "$name-bare" -batch "$folder/add") s, delete" \
  "$(seconds ip -n "$name-bare" -batch "$folder/delete") s"
ip netns del "$name-bare"

{
  printf 'version = 1\nname = "%s"\n' "$name"
  for node in "${nodes[@]}"; do
    printf '[[nodes]]\nname = "%s"\nnamespace = "%s"\n[[nodes.ports]]\ndevice = "eth0"\nkind = "af-packet"\n' \
      "$node" "$name-$node"
  done
} > "$folder/cluster.toml"
namespace a 10.77.0.1/24
namespace b 10.78.0.1/24
namespace c 10.79.0.1/24
"$crosslane" router up --cluster "$folder/cluster.toml"
pid_folder=$("$crosslane" router status --cluster "$folder/cluster.toml" --json | python3 -c '
import json, os, sys
print(os.path.dirname(json.load(sys.stdin)["nodes"][0]["log"]))')
echo "memory at first:"
memory
for ((index = 0; index < busy; index++)); do
  (while :; do :; done) &
  busy_pids+=($!)
done
echo "$routes routes added, at all nodes after $(seconds batch_and_wait add "$routes" "$many") s"
memory
echo "deleted, gone at all nodes after $(seconds batch_and_wait delete 0 100) s"
sleep 2
memory
echo "sessions lost: $(losses)"
"$crosslane" router down --cluster "$folder/cluster.toml"
ip -n "$name-a" -batch "$folder/add"
start_and_wait() {
  "$crosslane" router up --cluster "$folder/cluster.toml" > /dev/null
  for node in "${nodes[@]}"; do wait_for "$node" "$routes" "$many"; done
}
echo "nodes started, with $routes routes in the kernel, at all nodes after $(seconds start_and_wait) s"
memory
echo "sessions lost: $(losses)"
