//! Which memory is refused, and with which errors.

use super::*;
use crate::{Inbound, Link, LinkState, Outbound, train_both};
use std::fs::File;
use std::os::unix::fs::symlink;
use std::sync::atomic::AtomicU32;

/// A file or folder in tmpfs that is removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("fabric-dax-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        Self(Path::new("/dev/shm").join(name))
    }

    fn file(len_bytes: u64) -> Self {
        let scratch = Self::new();
        File::create_new(&scratch.0).unwrap().set_len(len_bytes).unwrap();
        scratch
    }

    fn resize(&self, len_bytes: u64) {
        File::options().write(true).open(&self.0).unwrap().set_len(len_bytes).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0).or_else(|_| fs::remove_dir_all(&self.0));
    }
}

fn refusal<T>(answer: Result<T, DaxError>) -> String {
    let text = answer.map(|_| ()).expect_err("not refused").to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn a_missing_path_is_refused_with_the_remedy() {
    let text = refusal(DaxMemory::open(Path::new("/dev/shm/fabric-nothing-here")));
    assert_says(&text, &["dax '/dev/shm/fabric-nothing-here': open: No such file", "; give a device"]);
}

#[test]
fn a_path_that_is_not_dax_memory_is_refused_with_what_it_is() {
    let null = refusal(DaxMemory::open(Path::new("/dev/null")));
    assert_says(&null, &["dax '/dev/null': a device of '", "mem', not of 'dax'; use /dev/daxX.Y"]);
    let text = refusal(DaxMemory::open(Path::new("/dev/shm")));
    assert_says(&text, &["dax '/dev/shm': open: Is a directory"]);
}

/// A file on an ordinary file system, if the folder for temporary files is on one.
#[test]
fn a_file_in_the_page_cache_is_refused() {
    let path = std::env::temp_dir().join(format!("fabric-dax-{}", std::process::id()));
    let file = File::create_new(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let is_tmpfs = fstatfs(&file).unwrap().f_type as u64 == TMPFS_MAGIC;
    let answer = DaxMemory::open(&path);
    fs::remove_file(&path).unwrap();
    if is_tmpfs {
        assert!(answer.is_ok());
    } else {
        assert_says(&refusal(answer), &["a file in the page cache of file system 0x"]);
    }
}

#[test]
fn a_length_that_is_not_whole_pages_is_refused() {
    for len_bytes in [0, 5000] {
        let scratch = Scratch::file(len_bytes);
        let text = refusal(DaxMemory::open(&scratch.0));
        assert_says(&text, &[&format!("': {len_bytes} bytes; make it a positive multiple of 4096 bytes")]);
    }
}

#[test]
fn memory_that_is_too_small_and_invalid_window_sizes_are_refused() {
    let scratch = Scratch::file(8192);
    let dax = DaxMemory::open(&scratch.0).unwrap();
    let text = refusal(dax.format(&dax.coherent(), 1024));
    assert_says(&text, &["8192 bytes, but two windows of 1024 bytes need 12288; make it larger"]);
    assert_says(&refusal(dax.format(&dax.coherent(), 100)), &["window of 100 bytes", "multiple of 64"]);
    assert_says(&refusal(dax.link(&dax.coherent(), Endpoint::A, 0)), &["window of 0 bytes"]);
}

#[test]
fn memory_that_is_not_formatted_or_for_other_windows_is_refused() {
    let scratch = Scratch::file(1 << 20);
    let dax = DaxMemory::open(&scratch.0).unwrap();
    let text = refusal(dax.link(&dax.coherent(), Endpoint::A, 1024));
    assert_says(&text, &["begins with 0x0, not 0x1", "; format it, if it is not in use"]);
    dax.format(&dax.coherent(), 1024).unwrap();
    assert!(dax.link(&dax.coherent(), Endpoint::A, 1024).is_ok());
    let text = refusal(dax.link(&dax.coherent(), Endpoint::B, 2048));
    assert_says(&text, &["formatted for windows of 1024 bytes, not 2048; ask for that size or format it again"]);
}

#[test]
fn a_file_that_has_shrunk_is_noticed() {
    let scratch = Scratch::file(1 << 20);
    let dax = DaxMemory::open(&scratch.0).unwrap();
    dax.check_length().unwrap();
    scratch.resize(4096);
    assert_says(&refusal(dax.check_length()), &["shrunk to 4096 bytes of 1048576; stop"]);
}

/// The extent of /dev/null according to a made-up sysfs.
fn described(subsystem: &str, size: &str, align: &str) -> Result<Extent, DaxError> {
    let sys = Scratch::new();
    let null = open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
    let device = sys.0.join("dev/char/1:3");
    fs::create_dir_all(&device).unwrap();
    symlink(format!("../../bus/{subsystem}"), device.join("subsystem")).unwrap();
    fs::write(device.join("size"), size).unwrap();
    fs::write(device.join("align"), align).unwrap();
    Extent::of(&null, Path::new("/dev/dax0.0"), &sys.0)
}

#[test]
fn a_dax_device_has_the_size_and_alignment_of_sysfs() {
    let extent = described("dax", "17179869184\n", "2097152\n").unwrap();
    assert_eq!(extent, Extent { len_bytes: 16 << 30, align_bytes: 2 << 20 });
    assert_says(&refusal(described("nd", "4096\n", "4096\n")), &["dax '/dev/dax0.0'", "not of 'dax'"]);
    assert_says(&refusal(described("dax", "many\n", "4096\n")), &["dax '/dev/dax0.0': sysfs size or align"]);
}

/// A link of two mappings, in a file with other contents.
#[test]
fn a_link_in_memory_with_any_contents_starts_zeroed_and_outlives_its_holders() {
    const WINDOW_BYTES: usize = 4096;
    let scratch = Scratch::new();
    fs::write(&scratch.0, vec![0xff; 5 * 4096]).unwrap();
    let dax = [(); 2].map(|()| DaxMemory::open(&scratch.0).unwrap());
    let memory = dax.each_ref().map(|dax| dax.non_coherent().unwrap());
    dax[0].format(&memory[0], WINDOW_BYTES).unwrap();
    let link = |index: usize, endpoint| dax[index].link(&memory[index], endpoint, WINDOW_BYTES).unwrap();
    let (mut a, mut b) = (link(0, Endpoint::A), link(1, Endpoint::B));
    assert!(train_both(&mut a, &mut b));
    let mut bytes = [1; WINDOW_BYTES];
    b.inbound().invalidate(0, WINDOW_BYTES);
    b.inbound().read(0, &mut bytes);
    assert_eq!(bytes, [0; WINDOW_BYTES]);
    a.outbound().write(0, b"before");
    a.outbound().flush();
    let epoch = a.epoch();
    let mut a = link(0, Endpoint::A);
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Down));
    assert!(train_both(&mut a, &mut b));
    assert!(a.epoch() > epoch);
    b.inbound().invalidate(0, 8);
    assert_eq!(b.inbound().load_u64(0, Ordering::Acquire), 0);
}
