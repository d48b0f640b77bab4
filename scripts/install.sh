#!/bin/sh
# Installs Crosslane from the folder that this script is in, or removes an installation.
# usage: install.sh [--prefix DIR] [--uninstall]
set -eu
umask 022

fail() {
    printf 'crosslane: %s\n' "$*" >&2
    exit 2
}

prefix=/usr/local
action=install
while [ $# -gt 0 ]; do
    case $1 in
    --prefix)
        [ $# -ge 2 ] || fail "--prefix: the directory is missing; give one, such as --prefix /opt/crosslane"
        prefix=$2
        shift
        ;;
    --prefix=*) prefix=${1#--prefix=} ;;
    --uninstall) action=uninstall ;;
    --check) action=check ;; # whether the prefix can be written to, before a build for it
    -h | --help)
        echo 'usage: install.sh [--prefix DIR] [--uninstall]     (default: --prefix /usr/local)'
        exit 0
        ;;
    *) fail "no option '$1'; usage: install.sh [--prefix DIR] [--uninstall]" ;;
    esac
    shift
done
case $prefix in
/*) ;;
'') fail "--prefix: the directory is empty; give one, such as --prefix /opt/crosslane" ;;
*) prefix=$PWD/$prefix ;;
esac
case $prefix in
*[[:space:]:]*)
    fail "--prefix '$prefix' contains a blank or a colon, which LD_PRELOAD cannot contain; choose another"
    ;;
esac
# The names of installed files, and with a slash at the end of folders that the installation made, one a line, relative
# to the prefix.
list=share/crosslane/installed-files

check_writable() { # DIRECTORY
    directory=$1
    while [ ! -e "$directory" ]; do directory=$(dirname "$directory"); done
    [ -d "$directory" ] || fail "'$directory' is not a directory; choose another with --prefix"
    [ -w "$directory" ] || fail "'$directory' is not writable; run this as root, or choose another with --prefix"
}

remove() { # the names on stdin: files, and folders if they are empty, each after what is in it
    while IFS= read -r name; do
        case $name in
        '' | /* | *..*) ;;
        */) rmdir "$prefix/$name" 2>/dev/null || true ;;
        *) rm -f "$prefix/$name" ;;
        esac
    done
}

make_folder() { # FOLDER: relative to the prefix; notes those that are made
    [ ! -d "$prefix/$1" ] || return 0
    [ "$1" = . ] || make_folder "$(dirname "$1")"
    mkdir "$prefix/$1"
    printf '%s/\n' "$1" >>"$folders"
}

refresh_loader() {
    [ "$(id -u)" != 0 ] || ldconfig 2>/dev/null || true
}

if [ $action = uninstall ]; then
    [ -f "$prefix/$list" ] || fail "nothing is installed in '$prefix': no '$prefix/$list'; check --prefix"
    check_writable "$prefix/share/crosslane"
    LC_ALL=C sort -r "$prefix/$list" | remove
    refresh_loader
    echo "removed from $prefix"
    exit 0
fi

for folder in "" bin lib share; do check_writable "$prefix/$folder"; done
[ $action = install ] || exit 0
here=$(cd "$(dirname "$0")" && pwd)
for name in bin/crosslane lib/crosslane/libcrosslane.so; do
    [ -f "$here/$name" ] || fail "'$here/$name' is missing; unpack the archive anew, as a whole"
done

# Prints the folder that glibc's loader replaces $LIB by (ld.so(8)): the one in which it finds the library.
loader_folder() {
    probe=$(mktemp -d)
    for folder in lib/x86_64-linux-gnu lib64 lib; do
        mkdir -p "$probe/$folder"
        cp "$here/lib/crosslane/libcrosslane.so" "$probe/$folder"
        # shellcheck disable=SC2016 # the loader replaces $LIB
        message=$(CROSSLANE_OFF=1 LD_PRELOAD="$probe/"'$LIB/libcrosslane.so' env true 2>&1) || true
        rm "$probe/$folder/libcrosslane.so"
        [ -n "$message" ] || break
        folder=
    done
    rm -r "$probe"
    printf '%s' "$folder"
}
loader=$(loader_folder)
[ -n "$loader" ] ||
    fail "glibc's loader cannot load '$here/lib/crosslane/libcrosslane.so'; use a machine with x86-64 and glibc 2.34"

mkdir -p "$prefix" 2>/dev/null || fail "'$prefix' cannot be created; choose another with --prefix"
new=$(mktemp)
folders=$(mktemp)
trap 'rm -f "$new" "$folders"' EXIT
[ ! -f "$prefix/$list" ] || grep '/$' "$prefix/$list" >"$folders" || true
(cd "$here" && find . -path './?*/*' \( -type f -o -type l \) -print | sed 's|^\./||') | while IFS= read -r name; do
    target=$name
    [ "$name" != lib/crosslane/libcrosslane.so ] || target=lib/crosslane/$loader/libcrosslane.so
    make_folder "$(dirname "$target")"
    # Renamed into place, as running programs may have the former file mapped.
    cp -P "$here/$name" "$prefix/$target.new"
    mv -f "$prefix/$target.new" "$prefix/$target"
    printf '%s\n' "$target" >>"$new"
done
make_folder "${list%/*}"
printf '%s\n' "$list" >>"$new"
if [ -f "$prefix/$list" ]; then
    # What an earlier release had, and this one has not; a folder stays if anything is in it.
    grep -vxFf "$new" "$prefix/$list" | LC_ALL=C sort -r | remove
fi
while IFS= read -r name; do [ ! -d "$prefix/$name" ] || printf '%s\n' "$name" >>"$new"; done <"$folders"
LC_ALL=C sort "$new" >"$prefix/$list"
chmod 644 "$prefix/$list"
refresh_loader
echo "installed $("$prefix/bin/crosslane" --version | head -n 1) in $prefix"
case :$PATH: in
*:"$prefix/bin":*) ;;
*) echo "add $prefix/bin to PATH, and $prefix/share/man to MANPATH" ;;
esac
