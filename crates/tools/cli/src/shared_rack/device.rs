//! `crosslane rack-dir device`: describes a shared rack as a device of the Container Device Interface (specification
//! 0.3.0), so that `--device crosslane/rack=NAME` gives a container the rack, the library and the variables.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{absolute, require_root};
use crate::wrong_use::WrongUse;
use crate::{library, output, rack_dir};

/// The oldest version that has all that is used: container engines refuse later ones than they know.
const SPECIFICATION: &str = "0.3.0";
/// Vendor and class of the device.
const KIND: &str = "crosslane/rack";
const FILE_MODE: u32 = 0o644;

/// Options of `crosslane rack-dir device`.
#[derive(clap::Args)]
pub struct Options {
    /// The shared rack
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The name of the device, which is crosslane/rack=NAME
    #[arg(long, default_value = "shared")]
    name: String,
    /// Folder of descriptions that the container engine reads
    #[arg(long, value_name = "FOLDER", default_value = "/etc/cdi")]
    to: PathBuf,
    /// Library to preload [default: libcrosslane.so beside this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Remove the description
    #[arg(long, conflicts_with = "library")]
    remove: bool,
}

/// Writes or removes the description.
pub fn main(options: &Options) -> Result<()> {
    require_root("device")?;
    check_name(&options.name)?;
    let path = options.to.join(format!("crosslane-{}.json", options.name));
    let shown = path.display();
    let is_ours = is_own(&path)?;
    if is_ours == Some(false) {
        bail!(WrongUse::of(format!("'{shown}' was not written by crosslane rack-dir device; remove it yourself")));
    }
    if options.remove {
        if is_ours.is_none() {
            return output::print(&format!("There is no {shown}: nothing to do.\n"));
        }
        fs::remove_file(&path).with_context(|| format!("'{shown}' cannot be removed; rm it"))?;
        return output::print(&format!("Removed {shown}.\n"));
    }
    let rack = absolute(&options.directory)?;
    let missing = || {
        let rack = rack.display();
        WrongUse::of(format!("'{rack}' is no shared rack; crosslane rack-dir create {rack} --group GROUP"))
    };
    rack_dir::shared(&rack)?.ok_or_else(missing)?;
    let library = library::find_for_units(options.library.as_deref())?;
    let description = describe(&options.name, &rack, &library)?;
    write(&path, &description).with_context(|| format!("'{shown}' cannot be written; free space there"))?;
    let device = format!("{KIND}={}", options.name);
    output::print(&format!("Wrote {shown}. A container gets the rack by: podman run --device {device}\n"))
}

fn check_name(name: &str) -> Result<()> {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let ends = [name.bytes().next(), name.bytes().last()];
    let has_ends = ends.iter().all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()));
    if has_ends && name.len() <= 63 && name.bytes().all(is_inner) {
        return Ok(());
    }
    let what = "give letters, digits and '-_.' between them, 63 at most";
    Err(WrongUse::of(format!("--name: '{}' cannot name a device; {what}", name.escape_debug())).into())
}

/// Returns the description of a device.
fn describe(name: &str, rack: &Path, library: &library::LoaderName) -> Result<Value> {
    let text = |path: &Path| -> Result<String> {
        let shown = path.display();
        let found = path.to_str().filter(|path| !path.contains(char::is_control));
        let found =
            found.ok_or_else(|| WrongUse::of(format!("'{shown}' has characters that JSON has not; move it")))?;
        Ok(found.to_owned())
    };
    let (rack, folder) = (text(rack)?, text(&library.folder)?);
    let mount = |path: &str, rights: &[&str]| json!({"hostPath": path, "containerPath": path, "options": rights});
    let edits = json!({
        "env": [format!("LD_PRELOAD={}", library.name), format!("CROSSLANE_RACK={rack}")],
        "mounts": [
            mount(&rack, &["bind", "rw", "nosuid", "nodev", "noexec"]),
            mount(&folder, &["bind", "ro", "nosuid", "nodev"]),
        ],
    });
    let devices = json!([{"name": name, "containerEdits": edits}]);
    Ok(json!({"cdiVersion": SPECIFICATION, "kind": KIND, "devices": devices}))
}

/// Returns whether a file is a description that this command has written; `None` if there is none.
fn is_own(path: &Path) -> Result<Option<bool>> {
    match fs::read(path) {
        Ok(bytes) => {
            let found: Option<Value> = serde_json::from_slice(&bytes).ok();
            Ok(Some(found.is_some_and(|found| found["kind"] == KIND)))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("'{}' cannot be read; check it", path.display())),
    }
}

fn write(path: &Path, description: &Value) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    // Engines read only names that end with '.json' or '.yaml'.
    let mut file = tempfile::Builder::new().prefix(".crosslane-").tempfile_in(folder)?;
    file.write_all(format!("{description:#}\n").as_bytes())?;
    file.as_file().set_permissions(fs::Permissions::from_mode(FILE_MODE))?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
