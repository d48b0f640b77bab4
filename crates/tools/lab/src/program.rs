//! Programs of the host, for an image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

/// Debian's folders of programs, in addition to PATH.
const FOLDERS: [&str; 4] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];

/// Finds a program by its name or path.
pub fn find(name: &str) -> Result<PathBuf> {
    if name.contains('/') {
        let path = PathBuf::from(name);
        return if path.is_file() { Ok(path) } else { bail!("no program '{name}'; check the path") };
    }
    let search = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&search).chain(FOLDERS.map(PathBuf::from));
    let found = folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.is_file()));
    found.with_context(|| format!("no program '{name}' in PATH; install it"))
}

/// Returns the libraries that a program needs according to the dynamic loader, and the loader itself.
pub fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = run(Command::new("ldd").arg(program))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        bail!("'{}' lacks a library: {}", program.display(), line.trim());
    }
    // ldd returns exit code 1 for a static program, which has no libraries.
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// Returns whether a file is in ELF format.
pub fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns a program without debug information.
pub fn stripped(path: &Path) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new().context("a temporary file")?;
    let output = run(Command::new("strip").arg("-o").arg(file.path()).arg(path))?;
    if !output.status.success() {
        bail!("strip '{}': {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    fs::read(file.path()).with_context(|| path.display().to_string())
}

fn run(command: &mut Command) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.output().with_context(|| format!("{name}: cannot be started; install it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_with_its_libraries_and_its_loader() {
        let libraries = libraries(&find("sh").unwrap()).unwrap();
        let names: Vec<String> =
            libraries.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
        assert!(names.iter().any(|name| name.starts_with("libc.so")), "{names:?}");
        assert!(names.iter().any(|name| name.starts_with("ld-linux")), "{names:?}");
    }

    #[test]
    fn a_missing_program_is_named() {
        assert!(find("no-such-program").unwrap_err().to_string().contains("'no-such-program'"));
        assert!(find("/no/such").unwrap_err().to_string().contains("check the path"));
    }
}
