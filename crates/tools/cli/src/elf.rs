//! What kind of program a file is, as far as loading a library into it goes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Why the dynamic loader of this machine's C library would not load our library into a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It will: dynamic, of this architecture, linked to glibc.
    Dynamic,
    /// There is no loader in it.
    Static,
    /// Its loader is of another C library.
    OtherLoader(String),
    /// Made by the Go compiler: dynamic or not, its sockets are system calls of its own.
    Go,
    /// Another processor or word size.
    OtherMachine,
    /// Not an ELF file.
    NotElf,
    /// An ELF file that contradicts itself.
    Damaged,
}

const ELF_MAGIC: &[u8] = b"\x7fELF";
const CLASS_64: u8 = 2;
const DATA_LITTLE: u8 = 1;
const TYPE_EXECUTABLE: u16 = 2;
const TYPE_SHARED: u16 = 3;
const SEGMENT_INTERPRETER: u32 = 3;
/// `e_machine` of the architecture this command was built for.
const MACHINE: u16 = if cfg!(target_arch = "x86_64") {
    62
} else if cfg!(target_arch = "aarch64") {
    183
} else if cfg!(target_arch = "riscv64") {
    243
} else {
    0
};
const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
const SEGMENTS_MAX: u16 = 512;
const INTERPRETER_BYTES_MAX: u64 = 4096;
const SECTION_BYTES: usize = 64;
const SECTIONS_MAX: u16 = 4096;
const SECTION_NAMES_BYTES_MAX: u64 = 1 << 20;
/// Sections that Go's linker makes and `strip` leaves (cmd/link/internal/ld/elf.go): the second is missing where the
/// build id was set to nothing, the first in programs from before Go 1.13.
const SECTIONS_OF_GO: [&[u8]; 2] = [b".go.buildinfo", b".note.go.buildid"];

/// Looks at a program file.
pub fn inspect(path: &Path) -> io::Result<Kind> {
    let file = File::open(path)?;
    let mut header = [0; HEADER_BYTES];
    let bytes = read_start(&file, &mut header)?;
    if !header[..bytes].starts_with(ELF_MAGIC) {
        return Ok(Kind::NotElf);
    }
    if bytes < HEADER_BYTES {
        return Ok(Kind::Damaged);
    }
    if header[4] != CLASS_64 || header[5] != DATA_LITTLE || u16_at(&header, 18) != MACHINE {
        return Ok(Kind::OtherMachine);
    }
    if ![TYPE_EXECUTABLE, TYPE_SHARED].contains(&u16_at(&header, 16)) {
        return Ok(Kind::Damaged);
    }
    Ok(interpreter(&file, &header).map_or(Kind::Damaged, |interpreter| match interpreter {
        _ if is_from_go(&file, &header) => Kind::Go,
        None => Kind::Static,
        Some(loader) => kind_of_loader(loader),
    }))
}

/// Whether a file is a shared library of this machine.
pub fn is_library(path: &Path) -> bool {
    let mut header = [0; HEADER_BYTES];
    let whole = File::open(path).and_then(|file| file.read_exact_at(&mut header, 0)).is_ok();
    let ours = header[4] == CLASS_64 && header[5] == DATA_LITTLE && u16_at(&header, 18) == MACHINE;
    whole && header.starts_with(ELF_MAGIC) && ours && u16_at(&header, 16) == TYPE_SHARED
}

fn kind_of_loader(loader: String) -> Kind {
    let name = loader.rsplit('/').next().unwrap_or_default();
    let glibc = ["ld-linux", "ld64.so", "ld.so"].iter().any(|prefix| name.starts_with(prefix));
    if glibc { Kind::Dynamic } else { Kind::OtherLoader(loader) }
}

/// The loader the program asks for; an error when the program's tables do not hold together.
fn interpreter(file: &File, header: &[u8; HEADER_BYTES]) -> Result<Option<String>, io::Error> {
    let damaged = || io::Error::from(io::ErrorKind::InvalidData);
    let (table, entry_bytes, entries) = (u64_at(header, 32), u16_at(header, 54), u16_at(header, 56));
    if entries > 0 && usize::from(entry_bytes) != SEGMENT_BYTES || entries > SEGMENTS_MAX {
        return Err(damaged());
    }
    let mut segments = vec![0; usize::from(entries) * SEGMENT_BYTES];
    file.read_exact_at(&mut segments, table)?;
    let Some(segment) = segments.chunks_exact(SEGMENT_BYTES).find(|segment| u32_at(segment, 0) == SEGMENT_INTERPRETER)
    else {
        return Ok(None);
    };
    let (offset, bytes) = (u64_at(segment, 8), u64_at(segment, 32));
    if bytes == 0 || bytes > INTERPRETER_BYTES_MAX {
        return Err(damaged());
    }
    let mut name = vec![0; bytes as usize];
    file.read_exact_at(&mut name, offset)?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(Some(String::from_utf8_lossy(&name[..end]).into_owned()))
}

/// Whether the names of the program's sections say so. No loader needs sections: where they are missing or make no
/// sense, they say nothing.
fn is_from_go(file: &File, header: &[u8; HEADER_BYTES]) -> bool {
    let names = section_names(file, header).unwrap_or_default();
    names.split(|byte| *byte == 0).any(|name| SECTIONS_OF_GO.contains(&name))
}

/// The names of all sections, each with a zero behind it.
fn section_names(file: &File, header: &[u8; HEADER_BYTES]) -> io::Result<Vec<u8>> {
    let (table, entry_bytes) = (u64_at(header, 40), u16_at(header, 58));
    let (entries, of_names) = (u16_at(header, 60), u16_at(header, 62));
    if usize::from(entry_bytes) != SECTION_BYTES || entries > SECTIONS_MAX || of_names >= entries {
        return Ok(Vec::new());
    }
    let mut section = [0; SECTION_BYTES];
    file.read_exact_at(&mut section, table.saturating_add(u64::from(of_names) * SECTION_BYTES as u64))?;
    let (offset, bytes) = (u64_at(&section, 24), u64_at(&section, 32));
    let mut names = vec![0; bytes.min(SECTION_NAMES_BYTES_MAX) as usize];
    file.read_exact_at(&mut names, offset)?;
    Ok(names)
}

/// The first bytes of a file, fewer than the buffer where it ends.
pub fn read_start(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(bytes: &[u8]) -> Kind {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        inspect(file.path()).unwrap()
    }

    #[test]
    fn this_test_is_a_dynamic_program() {
        assert_eq!(inspect(&std::env::current_exe().unwrap()).unwrap(), Kind::Dynamic);
    }

    #[test]
    fn loaders_of_other_c_libraries_are_named() {
        assert_eq!(kind_of_loader("/lib64/ld-linux-x86-64.so.2".into()), Kind::Dynamic);
        assert_eq!(kind_of_loader("/lib/ld-linux-aarch64.so.1".into()), Kind::Dynamic);
        let musl = "/lib/ld-musl-x86_64.so.1".to_owned();
        assert_eq!(kind_of_loader(musl.clone()), Kind::OtherLoader(musl));
    }

    #[test]
    fn damaged_sections_say_nothing() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for at in 40..64 {
            let mut changed = whole[..4096].to_vec();
            changed[at] ^= 0x7f;
            let sections = [40..48, 58..64].iter().any(|fields| fields.contains(&at));
            assert!(!sections || kind_of(&changed) == Kind::Dynamic, "byte {at}");
        }
    }

    #[test]
    fn damage_is_recognised_wherever_it_is() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let start = &whole[..4096];
        assert_eq!(kind_of(start), Kind::Dynamic);
        assert_eq!(kind_of(b""), Kind::NotElf);
        assert_eq!(kind_of(b"#!/bin/sh\n"), Kind::NotElf);
        assert_eq!(kind_of(&start[..40]), Kind::Damaged);
        assert_eq!(kind_of(&start[..100]), Kind::Damaged);
        let with = |at: usize, value: u8| {
            let mut changed = start.to_vec();
            changed[at] = value;
            kind_of(&changed)
        };
        assert_eq!(with(4, 1), Kind::OtherMachine);
        assert_eq!(with(18, 3), Kind::OtherMachine);
        assert_eq!(with(16, 1), Kind::Damaged);
        assert_eq!(with(39, 0xff), Kind::Damaged, "the segment table lies beyond the file");
        assert_eq!(with(54, 1), Kind::Damaged);
        assert_eq!(with(57, 0xff), Kind::Damaged);
        for at in 0..1024 {
            with(at, 0xff);
            with(at, 0x00);
        }
    }
}
