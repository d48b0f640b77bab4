//! The guests' kernel: Debian's cloud kernel package or Ubuntu's kernel package for virtual machines, unpacked or
//! installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Environment variable with the folder of the unpacked package.
const VARIABLE: &str = "LAB_KERNEL";
/// Folder into which `./x` unpacks the package, relative to the root of the repository.
const UNPACKED: &str = "target/x/guest";
/// Maximum depth of module dependencies.
const DEPTH_MAX: u32 = 16;

/// Compression suffixes of modules in Debian and Ubuntu, and the programs that unpack them.
const UNPACKERS: [(&str, &str); 2] = [(".xz", "xz"), (".zst", "zstd")];

/// A kernel and its modules.
#[derive(Clone, Debug)]
pub struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

/// File name of a module in the guest, and its code.
pub type Module = (String, Vec<u8>);

impl Kernel {
    /// Finds the kernel that the environment names, or that `./x` has unpacked, or that is installed.
    pub fn find() -> Result<Self> {
        let named = std::env::var_os(VARIABLE).map(PathBuf::from);
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..").join(UNPACKED);
        let folders = named.map_or_else(|| vec![repository, PathBuf::from("/")], |folder| vec![folder]);
        folders.iter().find_map(|folder| Self::within(folder)).with_context(|| {
            let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
            format!(
                "no cloud kernel of Debian in {}; './x lab' fetches one, or name its unpacked package in {VARIABLE}",
                folders.join(" or ")
            )
        })
    }

    fn within(folder: &Path) -> Option<Self> {
        let entries = fs::read_dir(folder.join("boot")).ok()?.flatten();
        let versions =
            entries.filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned()));
        // Cloud kernels contain drivers that are modules in other kernels.
        let version = versions.max_by_key(|version| (version.contains("cloud"), version.clone()))?;
        let kernel = Self {
            image: folder.join("boot").join(format!("vmlinuz-{version}")),
            modules: folder.join("lib/modules").join(&version),
        };
        kernel.modules.is_dir().then_some(kernel)
    }

    /// Returns the path of the kernel image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Returns the named modules and their dependencies, each after its dependencies.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<Module>> {
        let mut found = Vec::new();
        for name in names {
            self.add(name, DEPTH_MAX, &mut found)?;
        }
        Ok(found)
    }

    /// Returns whether the module is built into the kernel.
    fn is_built_in(&self, file: &str) -> bool {
        let list = fs::read_to_string(self.modules.join("modules.builtin")).unwrap_or_default();
        list.lines().any(|path| path.rsplit('/').next().is_some_and(|name| name.replace('-', "_") == file))
    }

    fn add(&self, name: &str, depth: u32, found: &mut Vec<Module>) -> Result<()> {
        let file = format!("{}.ko", name.replace('-', "_"));
        if found.iter().any(|(known, _)| *known == file) {
            return Ok(());
        }
        let depth = depth.checked_sub(1).with_context(|| format!("module {name}: depends on itself"))?;
        let Some(path) = find_module(&self.modules, &file) else {
            ensure!(self.is_built_in(&file), "no module {name} in {}", self.modules.display());
            return Ok(());
        };
        let code = read_module(&path)?;
        for dependency in dependencies(&code) {
            self.add(&dependency, depth, found)?;
        }
        found.push((file, code));
        Ok(())
    }
}

/// Finds the file of a module, whose name may have `-` instead of `_`, and which may be compressed.
fn find_module(folder: &Path, file: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    entries.into_iter().find_map(|entry| {
        let kind = entry.file_type().ok()?;
        if kind.is_dir() {
            return find_module(&entry.path(), file);
        }
        let name = entry.file_name().to_string_lossy().replace('-', "_");
        let uncompressed = UNPACKERS.iter().find_map(|(extension, _)| name.strip_suffix(extension));
        (uncompressed.unwrap_or(&name) == file).then(|| entry.path())
    })
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let name = path.to_string_lossy();
    let Some((_, unpacker)) = UNPACKERS.iter().find(|(extension, _)| name.ends_with(extension)) else {
        return fs::read(path).with_context(|| name.into_owned());
    };
    let output = Command::new(unpacker).arg("-dc").arg(path).output();
    let output = output.with_context(|| format!("{unpacker}: install it to unpack {name}"))?;
    if !output.status.success() {
        bail!("{unpacker} -dc {name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Reads a module's dependencies: `depends=a,b` among the strings of its section `.modinfo`.
fn dependencies(code: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = code.windows(KEY.len()).position(|bytes| bytes == KEY) else { return Vec::new() };
    let rest = &code[start + KEY.len()..];
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    let names = String::from_utf8_lossy(&rest[..end]).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(folder: &Path, file: &str, depends: &str) {
        fs::write(folder.join(file), format!("ELF\0license=GPL\0depends={depends}\0name=x\0")).unwrap();
    }

    #[test]
    fn a_module_comes_once_after_its_dependencies_unless_it_is_built_in() {
        let folder = tempfile::tempdir().unwrap();
        let modules = folder.path().join("lib/modules/6-cloud");
        fs::create_dir_all(folder.path().join("boot")).unwrap();
        fs::create_dir_all(modules.join("kernel/drivers")).unwrap();
        fs::write(folder.path().join("boot/vmlinuz-6-cloud"), "").unwrap();
        module(&modules.join("kernel/drivers"), "vfio-pci.ko", "vfio-pci-core,vfio,irq_bypass");
        module(&modules.join("kernel"), "vfio-pci-core.ko", "vfio");
        for (file, unpacker) in [("vfio.ko", "zstd"), ("loop3.ko", "xz")] {
            module(&modules, file, "");
            assert!(Command::new(unpacker).arg("-q").arg(modules.join(file)).status().unwrap().success());
        }
        let _ = fs::remove_file(modules.join("vfio.ko")); // zstd keeps its input.
        fs::write(modules.join("modules.builtin"), "kernel/virt/irq-bypass.ko\n").unwrap();
        module(&modules, "loop.ko", "loop2");
        module(&modules, "loop2.ko", "loop");

        let kernel = Kernel::within(folder.path()).unwrap();
        let found = kernel.modules(&["vfio-pci", "vfio"]).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["vfio.ko", "vfio_pci_core.ko", "vfio_pci.ko"]);
        assert_eq!(kernel.modules(&["loop3"]).unwrap()[0].0, "loop3.ko");
        assert!(kernel.modules(&["loop"]).unwrap_err().to_string().contains("itself"));
        assert!(kernel.modules(&["missing"]).unwrap_err().to_string().contains("no module missing"));
    }
}
