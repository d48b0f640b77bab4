#!/bin/sh
# Runs in a fresh root of Debian, in /packages, which has the packages: installs, uses and removes each of them, first
# in the root as it is, then with a C compiler and a reader of manual pages.
set -eu
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
scratch=$(mktemp -d)
chmod 755 "$scratch"
release="Debian $(cat /etc/debian_version)"

fail() {
    printf '%s: %s\n' "$release" "$*" >&2
    exit 1
}

apt() { # COMMAND ARGS...
    apt-get -q -y --no-install-recommends "$@" >"$scratch/apt.log" 2>&1 || { cat "$scratch/apt.log" >&2 && exit 1; }
}

as_user() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }

# Prints all files and folders but those that apt, dpkg and the loader rewrite whatever is installed.
files() {
    find / -xdev \( -path /packages -o -path "$scratch" -o -path /var/cache -o -path /var/log -o -path /var/lib/apt \
        -o -path /var/lib/dpkg \) -prune -o -print | grep -vxF /etc/ld.so.cache | LC_ALL=C sort
}

has_compiler() { command -v cc >/dev/null; }

# With a C compiler, also what programs in C are compiled with.
install_package() { # deb | archive
    case $1 in
    deb)
        if has_compiler; then apt install /packages/*.deb; else apt install /packages/crosslane_*.deb; fi
        ;;
    archive)
        mkdir "$scratch/archive"
        for archive in /packages/*.tar.gz; do
            case $archive in
            *-dev-*) has_compiler || continue ;;
            esac
            tar -C "$scratch/archive" --strip-components=1 -xzf "$archive"
        done
        "$scratch/archive/install.sh" --prefix /usr/local >"$scratch/install.log"
        ;;
    esac
}

remove_package() { # deb | archive
    case $1 in
    deb) if has_compiler; then apt purge crosslane libcrosslane-lane-dev; else apt purge crosslane; fi ;;
    archive)
        "$scratch/archive/install.sh" --prefix /usr/local --uninstall >"$scratch/install.log"
        rm -r "$scratch/archive"
        ;;
    esac
}

wait_for_line() { # FILE
    count=0
    until [ -s "$1" ]; do
        count=$((count + 1))
        [ $count -le 600 ] || fail "no line in $1 for a minute"
        sleep 0.1
    done
}

# Two programs of a user without privileges over a lane.
carry_a_connection() {
    mkfifo "$scratch/held"
    as_user crosslane run -- perl /packages/echo.pl serve >"$scratch/port" &
    server=$!
    wait_for_line "$scratch/port"
    as_user crosslane run --require-lane -- perl /packages/echo.pl call "$(cat "$scratch/port")" \
        <"$scratch/held" >"$scratch/answer" &
    client=$!
    exec 9>"$scratch/held"
    wait_for_line "$scratch/answer"
    as_user crosslane stat --json >"$scratch/stat"
    exec 9>&-
    wait $client || fail 'the client failed'
    wait $server || fail 'the server failed'
    [ "$(grep -c '"lane_connections_total": 1' "$scratch/stat")" = 2 ] || fail "no lane in: $(cat "$scratch/stat")"
    rm "$scratch/held" "$scratch/port" "$scratch/answer"
}

compile() { # OPTIONS...
    # glibc's static libraries make the linker warn of the resolver, which the standard library of Rust refers to.
    cc -O2 -o "$scratch/in_place" /packages/in_place.c "$@" 2>"$scratch/cc.log" ||
        fail "in_place cannot be compiled with '$*': $(cat "$scratch/cc.log")"
    "$scratch/in_place" 4 >"$scratch/in_place.log" || fail "in_place, compiled with '$*', failed"
}

# The C example with the shared library, and without any.
use_from_c() {
    # shellcheck disable=SC2046 # options
    compile $(pkg-config --cflags --libs crosslane_lane)
    ldd "$scratch/in_place" | grep -q 'libcrosslane_lane\.so\.' || fail 'in_place does not use the shared library'
    # shellcheck disable=SC2046
    compile -static $(pkg-config --static --cflags --libs crosslane_lane)
    ! ldd "$scratch/in_place" >"$scratch/ldd.log" 2>&1 || fail "in_place is not static: $(cat "$scratch/ldd.log")"
}

# Every page is found and formatted without a warning.
read_manual() {
    pages=0
    for page in "$1"/share/man/man?/crosslane*; do
        name=$(basename "$page" .gz)
        [ "$(realpath "$(man -w "${name##*.}" "${name%.*}")")" = "$page" ] || fail "man does not find $page"
        warnings=$(MANROFFSEQ='' MANWIDTH=80 man --warnings -E UTF-8 -l -Tutf8 -Z "$page" 2>&1 >/dev/null)
        [ -z "$warnings" ] || fail "$page: $warnings"
        pages=$((pages + 1))
    done
    [ $pages -gt 20 ] || fail "only $pages manual pages"
}

# Links of the documents lead to files of the package.
check_links() { # FOLDER
    find "$1" -name '*.md' -print | while IFS= read -r document; do
        perl -ne 'while (/\]\(([^)#\s]+)[^)]*\)/g) { print "$1\n" unless $1 =~ m{://} }' "$document" |
            while IFS= read -r target; do
                [ -e "$(dirname "$document")/$target" ] || echo "$document: $target"
            done
    done >"$scratch/links"
    [ ! -s "$scratch/links" ] || fail "links to nothing: $(cat "$scratch/links")"
}

use() { # deb | archive
    case $1 in
    deb) prefix=/usr ;;
    archive) prefix=/usr/local ;;
    esac
    [ "$(command -v crosslane)" = "$prefix/bin/crosslane" ] || fail 'crosslane is not in PATH'
    as_user crosslane --version | grep -q '^crosslane [0-9]' || fail 'crosslane --version failed'
    bash -c ". $prefix/share/bash-completion/completions/crosslane && complete -p crosslane" >"$scratch/complete" ||
        fail 'no completion for bash'
    check_links "$prefix/share/doc/crosslane"
    carry_a_connection
    if has_compiler; then
        use_from_c
    else
        [ -z "$(find "$prefix/lib" -name '*.a' -name '*crosslane*')" ] || fail 'a static library without a compiler'
    fi
    ! command -v man >/dev/null || read_manual "$prefix"
}

check() { # WITH WHAT
    for package in deb archive; do
        files >"$scratch/before"
        install_package $package
        use $package
        remove_package $package
        files >"$scratch/after"
        diff "$scratch/before" "$scratch/after" || fail "$package: these files differ after its removal"
        echo "$release, $1: $package installed, used and removed"
    done
}

mount -t tmpfs tmpfs /dev/shm
chmod 1777 /dev/shm
apt update
check 'with nothing but apt'
apt install gcc libc6-dev pkg-config man-db
check 'with a C compiler and man'
