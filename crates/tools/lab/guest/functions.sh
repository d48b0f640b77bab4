# Functions for lab scripts, in addition to busybox and the programs of the image.

# Waits until every running guest has reached this barrier.
barrier() {
    echo "barrier $1" >&3
    read -r _ <&3
}

# Waits until the test on the host continues.
host() {
    echo "host $1" >&3
    read -r _ <&3
}

# Repeats a command until it succeeds. Its time limit is shorter than that of the lab, and its error names the command.
wait_for() {
    _end=$(($(date +%s) + 300))
    until "$@"; do
        if [ "$(date +%s)" -ge $_end ]; then
            echo "timed out waiting for: $*"
            return 1
        fi
        usleep 50000
    done
}

# Writes the rack file of the guests, the same in each, and brings up the node of this guest: rack_up [proxy|direct
# [SILENCE [failover]]]. SILENCE is long because a guest that waits for a CPU may be silent without having failed. With
# failover, nodes have the addresses of the network, otherwise addresses that no network has.
rack_up() {
    case $DEVICE_KIND in
    dax) _device="backend = \"dax\"\ncoherence = \"${COHERENCE:-coherent}\"" ;;
    vfio) _device='backend = "pci"\nmode = "vfio"' ;;
    *) _device='backend = "pci"\nmode = "sysfs"' ;;
    esac
    _failover=false _network=127.77.0
    [ "${3:-}" != failover ] || _failover=true _network=10.77.0
    printf "version = 1\nname = \"lab\"\ntrust = \"%s\"\nfailover = %s\n\n" "${1:-proxy}" $_failover >"$RACK"
    printf '[device]\n%b\n' "$_device" >>"$RACK"
    _number=0
    for _node in $(echo "$NODES" | tr , ' '); do
        _number=$((_number + 1))
        printf '\n[[nodes]]\nname = "%s"\naddress = "%s.%d"\n' "$_node" $_network $_number >>"$RACK"
        printf 'device = "%s"\n' "$DEVICE" >>"$RACK"
    done
    printf '\n[timeouts]\nsilence_ns = "%s"\n' "${2:-90 s}" >>"$RACK"
    printf '%s_ns = "%s"\n' query '2500 ms' up '60 s' return '60 s' >>"$RACK"
    crosslane up --rack "$RACK" --node "$NODE"
}

# Runs a program whose sockets must all use lanes.
lanes() {
    crosslane run --rack "$RACK" --node "$NODE" --require-lane -- "$@"
}

# Prints the process ID of this guest's proxy or monitor: rack_process proxy|monitor. Other processes may exit during
# the search.
rack_process() {
    for _process in /proc/[0-9]*; do
        _words=$({ tr '\0' ' ' <"$_process/cmdline"; } 2>/dev/null) || continue
        case $_words in *" $1 "*) ;; *) continue ;; esac
        echo "${_process##*/}"
        return
    done
    return 1
}

# Kills this guest's proxy or monitor, and waits until it has exited: kill_now proxy|monitor.
kill_now() {
    _pid=$(rack_process "$1")
    kill -9 "$_pid"
    wait_for is_gone "$_pid"
}

# Whether a process has exited, reaped or not.
is_gone() { [ -z "$(cat "/proc/$1/cmdline" 2>/dev/null)" ]; }

# Prints a counter of the links to the other guests from the status: carried NAME.
carried() { crosslane status --rack "$RACK" --json | tr -d ' ,' | sed -n "s/^\"$1\"://p"; }

# Prints the number of interrupts of a device under VFIO since it was opened.
doorbells() {
    awk '/vfio/ { for (field = 2; $field ~ /^[0-9]+$/; field++) sum += $field } END { print sum + 0 }' /proc/interrupts
}

# Waits until a background process ends, and fails if it succeeds: must_fail PROCESS.
must_fail() {
    _status=0
    wait "$1" || _status=$?
    echo "ended with status $_status"
    [ $_status != 0 ]
}
