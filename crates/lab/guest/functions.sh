# What a lab script can call, besides busybox and the programs of the image.

# Waits until every guest that runs has come here.
barrier() {
    echo "barrier $1" >&3
    read -r _ <&3
}

# Waits until the test on the host says so.
host() {
    echo "host $1" >&3
    read -r _ <&3
}

# Tries a command again and again until it succeeds: wait_for SECONDS COMMAND...
wait_for() {
    _tries=$(($1 * 20))
    shift
    until "$@"; do
        _tries=$((_tries - 1))
        if [ $_tries -le 0 ]; then
            echo "waited in vain for: $*"
            return 1
        fi
        usleep 50000
    done
}
