//! Classifies programs by whether the dynamic loader loads a library into them.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use object::LittleEndian;
use object::elf;
use object::read::ReadCache;
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use rustix::fs::OFlags;

/// A kind of program. The dynamic loader of this machine's C library loads Crosslane's library into `Dynamic` only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Dynamically linked to glibc, for this architecture.
    Dynamic,
    /// Statically linked: it names no loader.
    Static,
    /// Its loader, named here, belongs to another C library.
    OtherLoader(String),
    /// Built by the Go compiler: dynamic or not, it makes system calls without the C library.
    Go,
    /// For another architecture, word size or byte order.
    OtherMachine,
    /// Not an ELF file.
    NotElf,
    /// An ELF file with invalid tables.
    Damaged,
}

/// The architecture that this command was built for.
const MACHINE: elf::Machine = if cfg!(target_arch = "x86_64") {
    elf::EM_X86_64
} else if cfg!(target_arch = "aarch64") {
    elf::EM_AARCH64
} else if cfg!(target_arch = "riscv64") {
    elf::EM_RISCV
} else {
    elf::EM_NONE
};
/// Sections that Go's linker writes and `strip` keeps (cmd/link/internal/ld/elf.go): the second is missing where the
/// build id was set to nothing, the first in programs built before Go 1.13.
const GO_SECTIONS: [&[u8]; 2] = [b".go.buildinfo", b".note.go.buildid"];

type Header = elf::FileHeader64<LittleEndian>;

/// Reads a program file and returns what kind of program it is.
pub fn inspect(path: &Path) -> io::Result<Kind> {
    let file = File::open(path)?;
    let start = read_start(&file, size_of::<elf::Ident>())?;
    if !start.starts_with(&elf::ELFMAG) {
        return Ok(Kind::NotElf);
    }
    let is_complete = start.len() == size_of::<elf::Ident>();
    if is_complete && start[4..6] != [elf::ELFCLASS64.0, elf::ELFDATA2LSB.0] {
        return Ok(Kind::OtherMachine);
    }
    Ok(kind_of(&ReadCache::new(file)).unwrap_or(Kind::Damaged))
}

/// Returns whether a file is a shared library for this machine.
pub fn is_library(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let data = ReadCache::new(file);
    Header::parse(&data)
        .is_ok_and(|header| header.e_machine(LittleEndian) == MACHINE && header.e_type(LittleEndian) == elf::ET_DYN)
}

/// The type of the note with the release of the library.
const RELEASE_NOTE: elf::NoteType = elf::NoteType(1);

/// Returns the release of Crosslane's library: the contents of its note.
pub fn release(path: &Path) -> Option<String> {
    let data = ReadCache::new(open_regular(path).ok()?);
    let header = Header::parse(&data).ok()?;
    for segment in header.program_headers(LittleEndian, &data).ok()? {
        let Ok(Some(mut notes)) = segment.notes(LittleEndian, &data) else { continue };
        while let Ok(Some(note)) = notes.next() {
            if note.name() == b"Crosslane" && note.n_type(LittleEndian) == RELEASE_NOTE {
                return String::from_utf8(note.desc().to_vec()).ok();
            }
        }
    }
    None
}

/// Opens a regular file. A pipe, which would have to be waited for, is refused.
fn open_regular(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Returns the kind of an ELF program of this word size and byte order; an error if its tables contradict each other.
fn kind_of(data: &ReadCache<File>) -> object::Result<Kind> {
    let header = Header::parse(data)?;
    if header.e_machine(LittleEndian) != MACHINE {
        return Ok(Kind::OtherMachine);
    }
    if ![elf::ET_EXEC, elf::ET_DYN].contains(&header.e_type(LittleEndian)) {
        return Ok(Kind::Damaged);
    }
    let segments = header.program_headers(LittleEndian, data)?;
    let is_loader = |segment: &&elf::ProgramHeader64<LittleEndian>| segment.p_type(LittleEndian) == elf::PT_INTERP;
    let loader = match segments.iter().find(is_loader) {
        Some(segment) => segment.interpreter(LittleEndian, data)?,
        None => None,
    };
    Ok(match loader {
        _ if is_from_go(header, data) => Kind::Go,
        None => Kind::Static,
        Some(loader) => kind_of_loader(String::from_utf8_lossy(loader).into_owned()),
    })
}

fn kind_of_loader(loader: String) -> Kind {
    let name = loader.rsplit('/').next().unwrap_or_default();
    let is_glibc = ["ld-linux", "ld64.so", "ld.so"].iter().any(|prefix| name.starts_with(prefix));
    if is_glibc { Kind::Dynamic } else { Kind::OtherLoader(loader) }
}

/// Returns whether the program has a section of Go's linker. No loader needs sections: where they are missing or
/// invalid, the answer is no.
fn is_from_go(header: &Header, data: &ReadCache<File>) -> bool {
    let Ok(sections) = header.sections(LittleEndian, data) else { return false };
    GO_SECTIONS.iter().any(|name| sections.section_by_name(LittleEndian, name).is_some())
}

/// Reads at most the first `bytes_max` bytes of a file.
pub fn read_start(file: &File, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut start = Vec::with_capacity(bytes_max);
    file.take(bytes_max as u64).read_to_end(&mut start)?;
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of_bytes(bytes: &[u8]) -> Kind {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        inspect(file.path()).unwrap()
    }

    #[test]
    fn this_test_is_a_dynamic_program() {
        assert_eq!(inspect(&std::env::current_exe().unwrap()).unwrap(), Kind::Dynamic);
    }

    #[test]
    fn a_pipe_at_the_path_of_a_library_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("libcrosslane.so");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(release(&pipe), None);
    }

    #[test]
    fn loaders_of_other_c_libraries_are_named() {
        assert_eq!(kind_of_loader("/lib64/ld-linux-x86-64.so.2".into()), Kind::Dynamic);
        assert_eq!(kind_of_loader("/lib/ld-linux-aarch64.so.1".into()), Kind::Dynamic);
        let musl = "/lib/ld-musl-x86_64.so.1".to_owned();
        assert_eq!(kind_of_loader(musl.clone()), Kind::OtherLoader(musl));
    }

    #[test]
    fn damaged_sections_are_ignored() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for at in 40..64 {
            let mut changed = whole[..4096].to_vec();
            changed[at] ^= 0x7f;
            let sections = [40..48, 58..64].iter().any(|fields| fields.contains(&at));
            assert!(!sections || kind_of_bytes(&changed) == Kind::Dynamic, "byte {at}");
        }
    }

    #[test]
    fn damage_is_recognised_in_every_field() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let start = &whole[..4096];
        assert_eq!(kind_of_bytes(start), Kind::Dynamic);
        assert_eq!(kind_of_bytes(b""), Kind::NotElf);
        assert_eq!(kind_of_bytes(b"#!/bin/sh\n"), Kind::NotElf);
        assert_eq!(kind_of_bytes(&start[..40]), Kind::Damaged);
        assert_eq!(kind_of_bytes(&start[..100]), Kind::Damaged);
        let with = |at: usize, value: u8| {
            let mut changed = start.to_vec();
            changed[at] = value;
            kind_of_bytes(&changed)
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
