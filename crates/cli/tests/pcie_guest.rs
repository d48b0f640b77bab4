//! `crosslane pcie bench` on the BAR of an ivshmem device, inside a QEMU guest: Debian's kernel, busybox and our
//! program.
//!
//! The guest is emulated (no KVM is needed), so its times mean nothing; what is tested is that the way through sysfs to
//! a real BAR works.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
for device in /sys/bus/pci/devices/*; do
    /bin/busybox grep -q 0x1110 "$device/device" && address=${device##*/}
done
bench() { /bin/crosslane pcie bench --device "pci:$address" --samples 1000 "$@" 2>&1; echo "exit $?"; }
echo 1 > "/sys/bus/pci/devices/$address/enable"
for test in lat-rd lat-wrrd bw-rd bw-wr bw-rdwr; do bench --test $test --overwrite --json; done
bench --test bw-wr
bench --test lat-rd --bar 5
bench --test lat-rd --window 2M
/bin/busybox poweroff -f
"#;

fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The kernel that Debian's package installed, or the one named by GUEST_KERNEL.
fn kernel() -> PathBuf {
    if let Some(path) = std::env::var_os("GUEST_KERNEL") {
        return path.into();
    }
    let boot = fs::read_dir("/boot").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut kernels: Vec<PathBuf> = boot
        .filter(|path| path.to_string_lossy().contains("vmlinuz-") && path.to_string_lossy().contains("cloud"))
        .collect();
    kernels.sort();
    kernels.pop().expect("install linux-image-cloud-amd64, or name a kernel in GUEST_KERNEL")
}

/// A root file system in memory: busybox, our program and the libraries it names.
fn initramfs(folder: &Path) -> PathBuf {
    let root = folder.join("root");
    for directory in ["bin", "proc", "sys", "dev"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    let program = env!("CARGO_BIN_EXE_crosslane");
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("install busybox-static");
    fs::copy(program, root.join("bin/crosslane")).unwrap();
    run(Command::new("strip").arg(root.join("bin/crosslane")));
    for library in run(Command::new("ldd").arg(program)).split_whitespace().filter(|word| word.starts_with('/')) {
        let copy = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(library, copy).unwrap();
    }
    fs::write(root.join("init"), INIT).unwrap();
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755)).unwrap();
    let image = folder.join("initramfs");
    let pack = format!("cd '{}' && find . | cpio --quiet -o -H newc > '{}'", root.display(), image.display());
    run(Command::new("sh").args(["-c", &pack]));
    image
}

#[test]
#[ignore = "needs QEMU, busybox-static, cpio and Debian's cloud kernel; boots a guest"]
fn every_test_runs_on_ivshmem_and_what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = Command::new("timeout");
    guest.args(["300", "qemu-system-x86_64", "-accel", "tcg", "-m", "512", "-nographic", "-no-reboot"]);
    guest.arg("-kernel").arg(kernel()).arg("-initrd").arg(initramfs(folder.path()));
    guest.args(["-append", "console=ttyS0 quiet panic=-1"]);
    guest.args(["-object", "memory-backend-ram,id=window,size=1M,share=on", "-device", "ivshmem-plain,memdev=window"]);
    let console = run(&mut guest);
    let exits: Vec<&str> = console.lines().filter_map(|line| line.trim().strip_prefix("exit ")).collect();
    assert_eq!(exits, ["0", "0", "0", "0", "0", "2", "2", "2"], "{console}");
    for words in ["\"test\":\"lat-rd\"", "\"test\":\"bw-rdwr\"", "--overwrite", "no BAR 5", "1048576 bytes"] {
        assert!(console.contains(words), "{words:?} in {console}");
    }
}
