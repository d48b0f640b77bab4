#!/usr/bin/env bash
# Builds the packages of the commit twice, compares the bytes, checks the Debian package by lintian, and installs, uses
# and removes both packages in fresh roots of Debian 12 and 13. Needs root for the roots; `./x exam` runs it.
# usage: tests/packages/run.sh WORK    a folder for builds and roots
set -euo pipefail
[ $# = 1 ] || { echo 'usage: tests/packages/run.sh WORK' >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
repository=$PWD
rm -rf --one-file-system "$1"
mkdir -p "$1"
work=$(realpath "$1")
commit=$(git rev-parse HEAD) # also if another one follows meanwhile
readonly repository work commit suites=(bookworm trixie)
trap 'rm -rf --one-file-system "$work"/root-* "$work"/first "$work"/second' EXIT

# What a build must not depend on differs between the two: the folder, the time zone, the umask.
build() { # FOLDER
    git clone --quiet "$repository" "$1"
    git -C "$1" checkout --quiet --detach "$commit"
    "$1/scripts/package" package >"$1.log" 2>&1 || { echo "the packages cannot be built: see $1.log" >&2; exit 1; }
}

build_twice() {
    build "$work/first"
    (umask 077 && TZ=Asia/Tokyo LC_ALL=C build "$work/second/in/another/folder")
    mv "$work/first/target/packages" "$work/packages"
    local file
    for file in "$work"/packages/*; do
        cmp "$file" "$work/second/in/another/folder/target/packages/${file##*/}"
    done
    rm -rf "$work/first" "$work/second"
    echo "the packages of ${commit::12}, built twice, have the same bytes:"
    (cd "$work/packages" && sha256sum -- *)
}

# Prints the mirror of Debian that this machine's apt uses; nothing if it uses none, where debootstrap has a default.
mirror() {
    # shellcheck disable=SC2016 # a format of apt's
    apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1
}

make_root() { # SUITE
    local mirror
    mirror=$(mirror)
    # In a mount namespace, so that whatever debootstrap mounts ends with it.
    unshare --mount debootstrap --variant=minbase "$1" "$work/root-$1" ${mirror:+"$mirror"} \
        >"$work/debootstrap-$1.log" 2>&1 || {
        echo "a root of $1 cannot be made: see $work/debootstrap-$1.log" >&2
        exit 1
    }
    mkdir "$work/root-$1/packages"
    cp "$work"/packages/* tests/packages/{in-root.sh,echo.pl} crates/sockets/lane-c/examples/in_place.c \
        "$work/root-$1/packages"
}

# Mounts and processes are in namespaces, which end with the script in them.
check_in_root() { # SUITE
    make_root "$1"
    unshare --mount --pid --fork --kill-child --mount-proc --root="$work/root-$1" --wd=/packages \
        /bin/sh /packages/in-root.sh
    rm -rf --one-file-system "$work/root-$1"
}

# apt's proxy, also for debootstrap and for apt in the roots.
eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
[ -z "${http_proxy:-}" ] || export http_proxy

build_twice
lintian --allow-root --fail-on error,warning "$work"/packages/*.deb
echo 'lintian has no error and no warning'
for suite in "${suites[@]}"; do check_in_root "$suite"; done
