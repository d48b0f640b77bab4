#!/usr/bin/env bash
# Builds the library and the tests of its crates for AArch64, boots Debian's kernel for it in an emulated machine, and
# runs there the tests and the suite of socket semantics, bare and over lanes. `./x exam` runs it.
# usage: tests/aarch64/run.sh WORK    a folder for packages, the guest image and the log
#
# A whole machine, because QEMU's emulation of single programs (qemu-user) lacks what lanes need: TCP_INFO has one
# integer there, and NETLINK_SOCK_DIAG does not exist, so that no connection meets its other end.
set -euo pipefail
[ $# = 1 ] || { echo 'usage: tests/aarch64/run.sh WORK' >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
mkdir -p "$1"
work=$(realpath "$1")
# The crates of lanes, fabric, paths, sockets, and what they stand on.
readonly here work crates=(volmem fabric fabric-conformance lane lane-c wait path segment stats-page meeting socket
    stream preload)
readonly target=aarch64-unknown-linux-gnu image=$work/image root=$work/root libraries=/usr/aarch64-linux-gnu/lib
readonly limit_s=14400
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# Flags of the suite as in tests/src/c.rs.
readonly suite_flags=(-O2 -g -std=gnu17 -pthread -Wall -Wextra -Werror -Wno-stringop-overflow -Wno-stringop-overread
    -Wno-nonnull -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)

# apt with its own lists, of this architecture only, so that the machine's do not change.
apt_of_guest() { # COMMAND ARGS...
    local command=$1 state=$work/apt
    shift
    mkdir -p "$state"/{lists,archives}/partial
    touch "$state/status"
    "$command" -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$state" \
        -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status" -o "Dir::Cache=$state" \
        -o APT::Sandbox::User=root "$@"
}

# Packages are unpacked, not installed.
fetch() {
    local kernel package
    [ ! -e "$root/fetched" ] || return 0
    rm -rf --one-file-system "$root"
    mkdir -p "$root"
    apt_of_guest apt-get update
    kernel=$(apt_of_guest apt-cache depends linux-image-cloud-arm64 | awk '/Depends: linux-image/ { print $2; exit }')
    (cd "$root" && apt_of_guest apt-get download "${kernel:?apt has no kernel for arm64}" busybox-static dash \
        coreutils sed libacl1 libselinux1 libpcre2-8-0)
    for package in "$root"/*.deb; do dpkg-deb -x "$package" "$root"; done
    rm -f "$root"/*.deb "$work"/apt/*.bin
    touch "$root/fetched"
}

build_tests() {
    cargo build --release --target $target -p preload
    cp "$CARGO_TARGET_DIR/$target/release/libcrosslane.so" "$image/tests/"
    # Lines of JSON: the programs, with their package and kind.
    cargo test --no-run --message-format=json --target $target "${crates[@]/#/--package=}" >"$work/build.json"
    python3 - "$work/build.json" <<'PYTHON' | while read -r crate name program; do
import json, pathlib, sys
for line in open(sys.argv[1]):
    built = json.loads(line)
    if built.get("executable") and built["profile"]["test"]:
        target = built["target"]
        name = target["name"] if target["kind"] == ["test"] else "unit"
        print(pathlib.Path(built["manifest_path"]).parent.name, name, built["executable"])
PYTHON
        mkdir -p "$image/tests/$crate"
        aarch64-linux-gnu-strip --strip-debug -o "$image/tests/$crate/$name" "$program"
    done
}

# Builds what tests compile while they run, because the guest has no compiler: its `cc` copies it. The plug-ins of the
# suite are those that the suite of this machine gives to its compiler.
build_what_tests_compile() {
    local suite=$work/semantics-here example=crates/sockets/lane-c/examples/in_place.c
    mkdir -p "$image/built" "$work/bin"
    cc "${suite_flags[@]}" -o "$suite" tests/c/*.c
    cat >"$work/bin/cc" <<SCRIPT
#!/bin/sh
# cc -shared -fPIC -o FOLDER/NAME.so FOLDER/NAME.c OPTIONS
aarch64-linux-gnu-gcc "\$@" -Wl,-rpath,'\$ORIGIN' && mv "\$4" "$image/built/" && exec $(command -v cc) "\$@"
SCRIPT
    chmod +x "$work/bin/cc"
    PATH=$work/bin:$PATH "$suite" a_plugin_that_binds_to_its_own_libraries_first_uses_connections \
        a_library_finds_plugins_by_its_own_search_path >"$work/plugins.log" 2>&1
    cp "$CARGO_TARGET_DIR/$target/debug/deps/libcrosslane_lane.so" "$image/built/libcrosslane_lane.so.0"
    aarch64-linux-gnu-gcc -std=gnu11 -O2 -I crates/sockets/lane-c/include -o "$image/built/in_place_static" $example \
        "$CARGO_TARGET_DIR/$target/debug/deps/libcrosslane_lane.a" -lgcc_s -lm
    aarch64-linux-gnu-gcc -std=gnu11 -O2 -I crates/sockets/lane-c/include -o "$image/built/in_place_shared" $example \
        "$image/built/libcrosslane_lane.so.0" -Wl,-rpath,/built
    cat >"$image/bin/cc" <<'SCRIPT'
#!/bin/sh
# Copies what was compiled before. A number at the end of the name is that of the process.
for word; do
    [ "${previous:-}" != -o ] || output=$word
    previous=$word
done
name=${output##*/}
mkdir -p "${output%/*}" && exec cp "/built/${name%.[0-9]*}" "$output"
SCRIPT
    chmod +x "$image/bin/cc"
}

# Finds a file of the packages: newer releases have everything below /usr.
in_root() { # PATH
    local path
    for path in "$root/$1" "$root/usr/$1"; do
        [ ! -e "$path" ] || { echo "$path" && return; }
    done
    echo "no $1 in the packages of the guest" >&2
    return 1
}

add_module() { # NAME
    local path
    path=$(echo "$(in_root lib/modules)"/*/kernel/"$1".ko*)
    cp "$path" "$image/modules/"
    case $path in
    *.xz) unxz "$image/modules/${path##*/}" ;;
    esac
}

build_image() {
    local name
    rm -rf --one-file-system "$image"
    mkdir -p "$image"/{bin,etc,lib,modules,tests,root,usr/bin}
    cp "$(in_root bin/busybox)" "$image/bin/"
    # The suite runs these, which the library must be able to enter: busybox is linked statically.
    for name in dash cat rm sed true; do cp "$(in_root "bin/$name")" "$image/usr/bin/"; done
    ln -s dash "$image/usr/bin/sh"
    for name in libacl.so.1 libselinux.so.1 libpcre2-8.so.0; do
        cp -L "$(in_root "lib/aarch64-linux-gnu/$name")" "$image/lib/"
    done
    for name in ld-linux-aarch64.so.1 lib{c.so.6,m.so.6,dl.so.2,pthread.so.0,rt.so.1,gcc_s.so.1}; do
        cp -L "$libraries/$name" "$image/lib/"
    done
    for name in net/ipv4/inet_diag net/ipv4/tcp_diag net/unix/unix_diag drivers/net/veth; do
        add_module "$name"
    done
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$image/etc/passwd"
    cp "$here/guest.sh" "$image/init"
    cp "$here/left-out.txt" "$image/left-out"
    build_tests
    aarch64-linux-gnu-gcc "${suite_flags[@]}" -o "$image/tests/semantics" tests/c/*.c
    build_what_tests_compile
    (cd "$image" && find . | cpio -o -H newc 2>/dev/null | gzip -1 >"$work/image.gz")
}

# A model whose pointers need no authentication, which is slow to emulate.
boot() {
    timeout $limit_s qemu-system-aarch64 -machine virt -cpu neoverse-n1 -accel tcg,thread=multi -smp 2 -m 3G \
        -nographic -no-reboot -nodefaults -serial stdio -kernel "$(echo "$root"/boot/vmlinuz-*)" \
        -initrd "$work/image.gz" -append 'console=ttyAMA0 quiet panic=1' </dev/null |
        sed -u 's/\r$//' >"$work/guest.log"
    grep -xq 'guest ends' "$work/guest.log" || {
        echo "the guest did not end in $limit_s s, or stopped: see $work/guest.log" >&2
        exit 1
    }
}

# Prints the names of a table of tests/tests/semantics.rs.
table() { # NAME
    awk "/^const $1:/, /^}?\\];/" tests/tests/semantics.rs | sed -nE 's/.*check: "([a-z0-9_]+)".*/\1/p'
}

# Evaluates the log. Each program ends with a line `test result:`, which ./x counts.
evaluate() {
    awk -v "differ=$(table EXPLAINED | tr '\n' ' ')" -v "races=$(table KERNEL_RACES | tr '\n' ' ')" '
        BEGIN {
            for (count = split(differ, words, " "); count > 0; count--) differs[words[count]] = 1
            for (count = split(races, words, " "); count > 0; count--) is_race[words[count]] = 1
        }
        function fail(text) { print text; failed++ }
        /^kernel / { print }
        /^program / {
            program = $2; passed = failed = skipped = explained = 0; result = ""
            print "     Running " program
        }
        /^test .* FAILED$/ { print }
        /^test result:/ { result = $0 } # also those of children: the last one counts
        program ~ /^semantics-/ && /^(ok|FAIL|skip) / {
            name = $2; sub(/:$/, "", name)
            is_different = program == "semantics-lanes" && (name in differs)
            if ($1 == "skip") { skipped++; print }
            else if ($1 == "ok" && is_different) fail("FAIL " name " passes over lanes: is any connection on one?")
            else if ($1 == "ok") passed++
            else if (is_different) explained++
            else if ((name in is_race) && /event\.events is 21 /) passed++
            else fail($0)
        }
        /^[0-9]+ ok, [0-9]+ failed, [0-9]+ skipped$/ {
            result = sprintf("test result: %s. %d passed; %d failed; %d differ as explained; %d skipped",
                failed ? "FAILED" : "ok", passed, failed, explained, skipped)
        }
        /^status / {
            print result ? result : program " ended with status " $2 " and no result"
            if (result !~ /^test result: ok/) is_bad = 1
        }
        END { exit is_bad }' "$work/guest.log"
}

fetch
build_image
boot
status=0
evaluate || status=$?
echo 'left out:'
grep -vE '^(#|$)' "$here/left-out.txt" | sed 's/^/    /' || echo '    nothing'
exit $status
