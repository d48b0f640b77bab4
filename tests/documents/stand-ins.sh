# shellcheck shell=bash
# What the commands of the pages find, in namespaces of their own: an installed Crosslane, and stand-ins for commands
# that this machine need not have. Sourced by the script that tests/tests/documents.rs makes of a page.
# Variables: TREE, the laid-out installation; LAYERS, an empty folder.

# The files that a page writes below /etc, /usr and /run are gone with the namespace.
prepare_machine() {
    local folder layer
    ip link set lo up
    mount -t tmpfs tmpfs "$LAYERS"
    for folder in usr etc; do
        layer=$LAYERS/$folder
        mkdir -p "$layer/upper" "$layer/work"
        mount -t overlay -o "lowerdir=/$folder,upperdir=$layer/upper,workdir=$layer/work" overlay "/$folder"
    done
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    "$TREE/install.sh" --prefix /usr
}

# systemctl is not available without systemd as the first process. Checks the units as systemd reads them, and starts
# the service with the environment of its drop-in.
systemctl() {
    local drop_in=/etc/systemd/system/redis-server.service.d/crosslane.conf variables problems
    case $* in
    daemon-reload)
        problems=$(systemd-analyze verify redis-server.service 2>&1 | grep crosslane) || return 0
        printf 'systemd-analyze: %s\n' "$problems" >&2
        return 1
        ;;
    "restart redis-server")
        mapfile -t variables < <(sed -n 's/^Environment=//p' "$drop_in")
        setpriv --reuid=redis --regid=redis --clear-groups env "${variables[@]}" \
            redis-server --port 6379 --save '' --daemonize yes
        until setpriv --reuid=redis --regid=redis --clear-groups env "${variables[@]}" CROSSLANE_REQUIRE_LANE=1 \
            redis-cli -p 6379 ping; do sleep 0.2; done
        ;;
    *)
        echo "systemctl $*: no stand-in" >&2
        return 1
        ;;
    esac
}

# docker needs its daemon and images. Runs the program of the image in namespaces as docker makes them.
docker() {
    local image='' network='' user='' binds=() variables=() program=() isolate=()
    [ "$1" = run ] || { echo "docker $1: no stand-in" >&2 && return 1; }
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        -d) ;;
        --name) container=$2 && shift ;;
        --network) network=$2 && shift ;;
        --user) user=$2 && shift ;;
        -v) binds+=("$2") && shift ;;
        -e) variables+=("$2") && shift ;;
        -*) echo "docker $1: no stand-in" >&2 && return 1 ;;
        *) image=$1 ;;
        esac
        shift
    done
    case $network in
    '') isolate=(unshare --net) ;;
    container:*) isolate=(nsenter "--net=/proc/$(cat "$LAYERS/${network#container:}.pid")/ns/net") ;;
    esac
    case $image in
    redis:*) program=(redis-server --port 6379 --save '') ;;
    shop:*) program=(env CROSSLANE_REQUIRE_LANE=1 sh -c 'until redis-cli -p 6379 ping; do sleep 0.2; done') ;;
    esac
    # shellcheck disable=SC2016 # the inner shell expands them
    "${isolate[@]}" unshare --mount --pid --ipc --uts --fork --kill-child --mount-proc bash -euc '
        ip link set lo up
        while [ "$1" != -- ]; do
            IFS=: read -r from to mode <<<"$1"
            mkdir -p "$to" && mount --bind "$from" "$to"
            [ -z "$mode" ] || mount -o "remount,bind,$mode" "$to"
            shift
        done
        shift
        user=$1 && shift
        exec setpriv --reuid="${user%:*}" --regid="${user#*:}" --clear-groups env -i PATH="$PATH" "$@"
    ' bash "${binds[@]}" -- "$user" "${variables[@]}" "${program[@]}" &
    echo $! >"$LAYERS/$container.pid"
    # Only then the next container can join it.
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
    case $image in
    shop:*) wait $! ;; # It ends once it has its answer.
    esac
}
