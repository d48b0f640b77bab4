#!/usr/bin/env bash
# The machine of tests/containers/run.sh: namespaces in which changes of files are kept in WORK.
set -euo pipefail
[ $$ = 1 ] || { echo 'tests/containers/inside.sh: tests/containers/run.sh starts it' >&2; exit 2; }
programs=$1 work=$2 rounds=${3:-}
readonly programs work rounds rack=/var/lib/crosslane image=docker.io/library/redis:7
examples=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../docs/examples")
readonly examples

# shellcheck source=tests/own-machine.sh
. "$(dirname "${BASH_SOURCE[0]}")/../own-machine.sh"
own_folders "$work" /etc /usr/lib /var
own_devices
mount -t cgroup2 none /sys/fs/cgroup
mkdir $rack
mount -t tmpfs none $rack
mount --make-rshared /
ip link set lo up
mkdir -p /etc/containers /usr/lib/crosslane/lib/x86_64-linux-gnu
cp "$programs/libcrosslane.so" /usr/lib/crosslane/lib/x86_64-linux-gnu/
cat >/etc/containers/containers.conf <<'TEXT'
# Limits that need no privilege of the whole machine, and no control groups, which others may manage.
[containers]
default_sysctls = []
default_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]
cgroups = "disabled"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
network_backend = "netavark"
TEXT
printf '[storage]\ndriver = "vfs"\nrunroot = "/run/containers/storage"\ngraphroot = "%s"\n' "$work/storage" \
    >/etc/containers/storage.conf

crosslane rack-dir create $rack --group 61000
crosslane rack-dir allow $rack --from 33 --to 999 --ports 6379
crosslane rack-dir device $rack --library /usr/lib/crosslane/lib/x86_64-linux-gnu/libcrosslane.so
# As in the image of that name.
podman import --quiet --change 'CMD ["redis-server", "--protected-mode", "no", "--save", ""]' "$work/image.tar" $image

run() { # OPTIONS of podman, image and command
    podman run --quiet --device crosslane/rack=shared "$@"
}

serve() { # NAME OPTIONS: prints the address of a server in a container
    run --detach --name "$1" "${@:2}" "$image" redis-server --save '' --protected-mode no >/dev/null || return 1
    local address tries
    address=$(podman inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$1")
    for tries in {1..100}; do
        if podman exec "$1" redis-cli -h "$address" ping >/dev/null 2>&1; then
            echo "$address"
            return
        fi
        sleep 0.1
    done
    echo "the server '$1' did not answer in $tries tries" >&2
    return 1
}

readonly client=(redis-benchmark -c 1 -n 2000 -t "set,get" -d 500 --csv)

# Whether lanes of a server's user carry what a client exchanges with it (yes), or nothing (no). Its values have a MB in
# all.
carries() { # yes|no UID_OF_SERVER COMMAND...
    local before after
    before=$(lane_bytes $rack "$2") || return 1
    "${@:3}" >"$work/client.log" 2>&1 || { cat "$work/client.log"; return 1; }
    grep -q '"GET"' "$work/client.log" || return 1
    after=$(lane_bytes $rack "$2") || return 1
    if [ "$1" = yes ]; then [ $((after - before)) -gt 1000000 ]; else [ "$after" = "$before" ]; fi
}
has_lane() { # yes|no UID_OF_SERVER ADDRESS OPTIONS of the client's container
    carries "$1" "$2" run --rm "${@:4}" "$image" "${client[@]}" -h "$3"
}

# Measures Redis and its client in two containers on one network of podman, with the device and without it.
measure() {
    local address bare round clients kind
    address=$(serve with --network one --user 999:999)
    podman run --quiet --detach --name without --network one --user 999:999 "$image" >/dev/null
    bare=$(podman inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' without)
    sleep 1
    for ((round = 0; round < rounds; round++)); do
        for clients in 1 50; do
            for kind in lanes tcp; do
                local device=(--device crosslane/rack=shared) to=$address requests=$((clients == 1 ? 400000 : 800000))
                [ $kind = lanes ] || device=() to=$bare requests=$((clients == 1 ? 30000 : 200000))
                podman run --quiet --rm --network one --user 33:33 "${device[@]}" "$image" \
                    redis-benchmark -h "$to" -c $clients -n $requests -t get -d 8 --csv |
                    awk -F '"' -v "row=$round $clients $kind" '$2 == "GET" { print row, $4, $8 }'
            done
        done
    done >"$work/rounds.txt"
    python3 - "$work/rounds.txt" <<'PYTHON'
import collections, random, statistics, sys
rates = collections.defaultdict(list)
for line in open(sys.argv[1]):
    _, clients, kind, rate, _ = line.split()
    rates[clients, kind].append(float(rate))
for clients in ("1", "50"):
    lanes, tcp = rates[clients, "lanes"], rates[clients, "tcp"]
    ratios = [one / other for one, other in zip(lanes, tcp, strict=True)]
    draws = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    middle, low, high = (statistics.median(ratios), draws[50], draws[-51])
    print(f"{clients} clients: {statistics.median(lanes):.0f} requests/s over lanes, {statistics.median(tcp):.0f} over "
          f"kernel TCP, ratio {middle:.1f} [{low:.1f}, {high:.1f}] of {len(ratios)} rounds")
PYTHON
}

podman network create one >/dev/null
if [ -n "$rounds" ]; then
    measure
    exit
fi
address=$(serve server --network one --user 999:999)
try 'two containers of different users have lanes' has_lane yes 999 "$address" --network one --user 33:33
try 'a container of one user has lanes' has_lane yes 999 "$address" --network one --user 999:999
try 'a member of the group whom no rule names is refused' \
    has_lane no 999 "$address" --network one --user 5:5 --group-add 61000
try 'a user who is no member is refused' has_lane no 999 "$address" --network one --user 5:5
try 'a read-only container without capabilities has lanes' has_lane yes 999 "$address" --network one --user 33:33 \
    --read-only --cap-drop all --security-opt no-new-privileges
try 'containers that share a network namespace have lanes' \
    has_lane yes 999 "$address" --network container:server --user 33:33

# Users of their own: the kernel hides them from each other.
for uid in 100033 200033; do crosslane rack-dir allow $rack --from $uid --to 100999 --ports 6379 >/dev/null; done
mapped() { echo --network one --uidmap "0:$1:65536" --gidmap "0:$1:65536"; }
# shellcheck disable=SC2046 # options without blanks
{
    address=$(serve mapped $(mapped 100000) --user 999:999)
    try 'two containers with one range of users have lanes' \
        has_lane yes 100999 "$address" $(mapped 100000) --user 33:33
    try 'two containers with ranges of users of their own have lanes' \
        has_lane yes 100999 "$address" $(mapped 200000) --user 33:33
    try 'a container with another range and no rule is refused' \
        has_lane no 100999 "$address" $(mapped 300000) --user 33:33
    crosslane rack-dir allow $rack --from 33 --to 100999 --ports 6379 >/dev/null
    try 'a container without a user namespace reaches one with' \
        has_lane yes 100999 "$address" --network one --user 33:33
}

podman rm --force --time 0 server mapped >/dev/null

# The examples: the programs of the documents, with fewer requests.
moves() { # UID COMMAND...: whether lanes of a user carry something meanwhile
    local before after tries
    before=$(lane_bytes $rack "$1") || return 1
    "${@:2}" >"$work/example.log" 2>&1 || { cat "$work/example.log"; return 1; }
    for tries in {1..100}; do
        after=$(lane_bytes $rack "$1") || return 1
        [ $((after - before)) -le 1000000 ] || return 0
        sleep 0.1
    done
    echo "no lane after $tries tries"
    cat "$work/example.log"
    podman ps --all
    return 1
}
compose() {
    cp "$examples/compose.yaml" "$work"
    (cd "$work" && podman-compose up --detach)
}
try 'the services of the example for compose have lanes' moves 999 compose
(cd "$work" && podman-compose down >/dev/null 2>&1)

# Starts the container of a pod as a kubelet does: podman's pods need control groups.
pod() { # NAME REPLACED REPLACEMENT
    local arguments
    mapfile -d '' -t arguments < <(python3 - "$examples/kubernetes.yaml" "$@" <<'PYTHON'
import sys, yaml
path, name, replaced, replacement = sys.argv[1:]
pods = [document for document in yaml.safe_load_all(open(path)) if document["kind"] == "Pod"]
[spec] = [pod["spec"] for pod in pods if pod["metadata"]["name"] == name]
[container] = spec["containers"]
paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
user = container["securityContext"]
arguments = ["--name", name, "--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
for variable in container["env"]:
    arguments += ["--env", f"{variable['name']}={variable['value']}"]
for mount in container["volumeMounts"]:
    rights = "ro" if mount.get("readOnly") else "rw"
    arguments += ["--volume", f"{paths[mount['name']]}:{mount['mountPath']}:{rights}"]
command = [replacement if word == replaced else word for word in container["command"]]
print(*arguments, container["image"], *command, sep="\0", end="\0")
PYTHON
    )
    podman run --detach --quiet --network one "${arguments[@]}"
}
kubernetes() {
    pod redis '' ''
    sleep 1
    # A cluster resolves the name of the service.
    pod client redis "$(podman inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' redis)"
}
try 'the pods of the example for Kubernetes have lanes' moves 999 kubernetes

podman rm --all --force --time 0 >/dev/null

# Podman without root. Its containers have the groups of its user only if they keep them.
useradd --uid 7001 --no-create-home --home-dir /run/rootless rootless
printf 'rootless:200000:65536\n' | tee /etc/subuid >/etc/subgid
install -d -o rootless -m 700 /run/rootless /run/rootless/.config /run/rootless/.config/containers
rootless() {
    setpriv --reuid 7001 --regid 7001 --groups 61000 env -i PATH="$PATH" HOME=/run/rootless \
        XDG_RUNTIME_DIR=/run/rootless podman --storage-driver vfs "$@"
}
rootless import --quiet - $image <"$work/image.tar" >/dev/null
rootless_run() {
    rootless run --quiet --device crosslane/rack=shared --network host "$@"
}
rootless_client() { # yes|no UID_OF_SERVER PORT OPTIONS of the client's container
    carries "$1" "$2" rootless_run --rm "${@:4}" $image "${client[@]}" -p "$3"
}
answers() { # PORT
    local tries
    for tries in {1..100}; do
        redis-cli -p "$1" ping >/dev/null 2>&1 && return
        sleep 0.1
    done
    echo "no server at port $1 after $tries tries"
    return 1
}
rootless_run --detach --group-add keep-groups $image redis-server --save '' --port 7001 >/dev/null
answers 7001
try 'containers of one user without root have lanes if they keep the groups' \
    rootless_client yes 7001 7001 --group-add keep-groups
try 'without the groups they have none' rootless_client no 7001 7001
podman run --quiet --detach --network host --user 999:999 --device crosslane/rack=shared $image redis-server --save '' \
    --port 6379 >/dev/null
answers 6379
crosslane rack-dir allow $rack --from 7001 --to 999 --ports 6379 >/dev/null
try 'a container without root reaches one of another user by a rule, without the groups' \
    rootless_client yes 999 6379

print_result
