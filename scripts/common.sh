# Shared by ./x and the scripts in this folder; sourced from the root of the repository.

export CARGO_TARGET_DIR="$PWD/target"               # where the built command is expected
export PATH="$PATH:$HOME/.cargo/bin:/usr/sbin:/sbin" # where rustup and nginx are, in case the shell's PATH lacks them
export LAB_KERNEL="$PWD/target/x/guest"             # the kernel of guests
readonly work="$PWD/target/x"                       # logs
readonly mdbook_version=0.5.4
export mdbook=$work/mdbook/bin/mdbook

say() { printf 'x: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
misuse() { say "$*"; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }
has_nightly() { have rustup && rustup run nightly cargo "$@" >/dev/null 2>&1; }

rust_channel() { sed -nE 's/^channel = "(.*)"/\1/p' rust-toolchain.toml; }
has_channel() { rustup toolchain list | grep -q "^$(rust_channel)-"; }

# Selects the stable toolchain if that of rust-toolchain.toml could not be installed.
choose_toolchain() { ! have rustup || has_channel || export RUSTUP_TOOLCHAIN=stable; }
