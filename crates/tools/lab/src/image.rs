//! A guest's file system: a cpio archive that the kernel unpacks into memory.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::newc::{Builder, ModeFileType, trailer};
use rustix::fs::MemfdFlags;

use crate::program;

const MODE_PROGRAM: u32 = 0o755;
const MODE_FILE: u32 = 0o644;

/// An archive under construction. Adding a path that exists already has no effect.
#[derive(Debug, Default)]
pub struct Image {
    archive: Vec<u8>,
    paths: BTreeSet<PathBuf>,
    entries: u32,
}

impl Image {
    /// Adds an executable script.
    pub fn script(&mut self, path: &str, text: &str) -> Result<()> {
        self.add(Path::new(path), MODE_PROGRAM, text.as_bytes())
    }

    /// Adds a file that is not executable.
    pub fn file(&mut self, path: &str, contents: &[u8]) -> Result<()> {
        self.add(Path::new(path), MODE_FILE, contents)
    }

    /// Adds a file of the host, executable if it is on the host.
    pub fn copy(&mut self, from: &Path, to: &str) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let permissions = fs::metadata(from).with_context(|| from.display().to_string())?.permissions();
        let mode = if permissions.mode() & 0o111 != 0 { MODE_PROGRAM } else { MODE_FILE };
        self.add(Path::new(to), mode, &read(from)?)
    }

    /// Adds a program or a library with the libraries that it needs. Removes debug information if `strip`.
    pub fn program(&mut self, from: &Path, to: &str, strip: bool) -> Result<()> {
        let contents = read(from)?;
        if !program::is_elf(&contents) {
            return self.add(Path::new(to), MODE_PROGRAM, &contents);
        }
        let contents = if strip { program::stripped(from)? } else { contents };
        self.add(Path::new(to), MODE_PROGRAM, &contents)?;
        for library in program::libraries(from)? {
            self.add(&library, MODE_PROGRAM, &read(&library)?)?;
        }
        Ok(())
    }

    /// Returns the archive as a memfd.
    pub fn finish(mut self) -> Result<OwnedFd> {
        trailer(&mut self.archive)?;
        let memory = rustix::fs::memfd_create("crosslane-lab-image", MemfdFlags::CLOEXEC)?;
        let mut file = fs::File::from(memory);
        file.write_all(&self.archive)?;
        Ok(file.into())
    }

    fn add(&mut self, path: &Path, mode: u32, contents: &[u8]) -> Result<()> {
        if !self.paths.insert(path.to_owned()) {
            return Ok(());
        }
        let folders: Vec<PathBuf> = path.ancestors().skip(1).map(Path::to_owned).collect();
        for folder in folders.into_iter().rev() {
            if folder.file_name().is_some() && self.paths.insert(folder.clone()) {
                self.write(&folder, MODE_PROGRAM, ModeFileType::Directory, b"")?;
            }
        }
        self.write(path, mode, ModeFileType::Regular, contents)
    }

    fn write(&mut self, path: &Path, mode: u32, kind: ModeFileType, contents: &[u8]) -> Result<()> {
        let name = path.strip_prefix("/").unwrap_or(path).to_str().context("a path that is not UTF-8")?;
        let bytes = u32::try_from(contents.len()).with_context(|| format!("{name}: too large for an image"))?;
        self.entries += 1; // Entries with the same inode number would be hard links.
        let entry = Builder::new(name).ino(self.entries).mode(mode).nlink(1).set_mode_file_type(kind);
        let mut writer = entry.write(&mut self.archive, bytes);
        writer.write_all(contents)?;
        writer.finish()?;
        Ok(())
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("'{}' cannot be read", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    /// Names, modes and contents of an archive's entries.
    fn entries(archive: OwnedFd) -> Vec<(String, u32, Vec<u8>)> {
        let mut file = fs::File::from(archive);
        file.rewind().unwrap();
        let mut found = Vec::new();
        loop {
            let mut reader = cpio::newc::Reader::new(file).unwrap();
            if reader.entry().is_trailer() {
                return found;
            }
            let mut contents = Vec::new();
            reader.read_to_end(&mut contents).unwrap();
            found.push((reader.entry().name().to_owned(), reader.entry().mode(), contents));
            file = reader.finish().unwrap();
        }
    }

    #[test]
    fn folders_come_before_their_files_and_paths_are_not_replaced() {
        let mut image = Image::default();
        image.script("/lab/bin/run", "first").unwrap();
        image.file("/lab/bin/run", b"second").unwrap();
        image.file("/lab/text", b"text").unwrap();
        let folder = |name: &str| (name.to_owned(), 0o040_755, Vec::new());
        let file = |name: &str, mode: u32, text: &str| (name.to_owned(), 0o100_000 | mode, text.as_bytes().to_vec());
        assert_eq!(
            entries(image.finish().unwrap()),
            [folder("lab"), folder("lab/bin"), file("lab/bin/run", 0o755, "first"), file("lab/text", 0o644, "text")]
        );
    }

    #[test]
    fn a_program_is_added_with_its_libraries() {
        let mut image = Image::default();
        image.program(&program::find("sh").unwrap(), "/usr/bin/sh", false).unwrap();
        let names: Vec<String> = entries(image.finish().unwrap()).into_iter().map(|entry| entry.0).collect();
        assert_eq!(names.iter().filter(|name| name.contains("libc.so")).count(), 1, "{names:?}");
        assert!(names.contains(&"usr/bin/sh".to_owned()));
    }
}
