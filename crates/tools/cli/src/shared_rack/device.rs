//! `crosslane rack-dir device`: specifies a shared rack as a device of the Container Device Interface (version 0.3.0),
//! so that `--device crosslane/rack=NAME` gives a container the rack, the library and the variables.

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
const FOLDER_MODE: u32 = 0o755;

/// Options of `crosslane rack-dir device`.
#[derive(clap::Args)]
pub struct Options {
    /// The shared rack
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The name of the device, which is crosslane/rack=NAME
    #[arg(long, default_value = "shared")]
    name: String,
    /// Directory of CDI specifications that the container engine reads
    #[arg(long, value_name = "DIR", default_value = "/etc/cdi")]
    to: PathBuf,
    /// Library to preload [default: libcrosslane.so beside this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Remove the specification
    #[arg(long, conflicts_with = "library")]
    remove: bool,
}

/// Writes or removes the specification of the device.
pub fn main(options: &Options) -> Result<()> {
    require_root("device")?;
    check_name(&options.name)?;
    let path = options.to.join(format!("crosslane-{}.json", options.name));
    let shown = path.display();
    let rack = absolute(&options.directory)?;
    let found = read(&path)?;
    match &found {
        Some(Specified::Other) => {
            bail!(WrongUse::of(format!("'{shown}' was not written by crosslane rack-dir device; remove it yourself")))
        }
        Some(Specified::Rack(other)) if *other != rack => {
            let other = other.display();
            bail!(WrongUse::of(format!("'{shown}' is the device of rack '{other}'; give --name another name")))
        }
        _ => {}
    }
    if options.remove {
        if found.is_none() {
            return output::print(&format!("There is no {shown}: nothing to do.\n"));
        }
        fs::remove_file(&path).with_context(|| format!("'{shown}' cannot be removed; rm it"))?;
        return output::print(&format!("Removed {shown}.\n"));
    }
    let missing = || {
        let rack = rack.display();
        WrongUse::of(format!("'{rack}' is no shared rack; crosslane rack-dir create {rack} --group GROUP"))
    };
    rack_dir::shared(&rack)?.ok_or_else(missing)?;
    let library = library::find_for_units(options.library.as_deref())?;
    let specification = specify(&options.name, &rack, &library)?;
    write(&path, &specification)
        .with_context(|| format!("'{shown}' cannot be written; choose another place by --to"))?;
    let device = format!("{KIND}={}", options.name);
    output::print(&format!("Wrote {shown}. A container gets the rack by: podman run --device {device}\n"))
}

fn check_name(name: &str) -> Result<()> {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    // Before version 0.5.0, a name begins with a letter.
    let has_ends = name.bytes().next().is_some_and(|first| first.is_ascii_alphabetic())
        && name.bytes().last().is_some_and(|last| last.is_ascii_alphanumeric());
    if has_ends && name.len() <= 63 && name.bytes().all(is_inner) {
        return Ok(());
    }
    let what = "give a letter, then letters, digits and '-_.' between them, 63 at most";
    Err(WrongUse::of(format!("--name: '{}' cannot name a device; {what}", name.escape_debug())).into())
}

/// Returns the specification of a device.
fn specify(name: &str, rack: &Path, library: &library::LoaderName) -> Result<Value> {
    let text = |path: &Path| -> Result<String> {
        let shown = path.to_string_lossy();
        let shown = shown.escape_debug();
        let unusable = || WrongUse::of(format!("'{shown}' is not UTF-8 or has control characters; move it"));
        Ok(path.to_str().filter(|path| !path.contains(char::is_control)).ok_or_else(unusable)?.to_owned())
    };
    // Other files beside the library are not the container's to see, and must not hide its own.
    let is_for_it_alone = library.folder.file_name().is_some_and(|name| name == "crosslane");
    let mounted = if is_for_it_alone { &library.folder } else { &library.file };
    let (rack, mounted) = (text(rack)?, text(mounted)?);
    // Not `FOLDER/$LIB/...`, because an image may have another library directory than the machine.
    let preload = text(Path::new(&library::preload_name(&library.file)))?;
    let mount = |path: &str, rights: &[&str]| json!({"hostPath": path, "containerPath": path, "options": rights});
    let edits = json!({
        "env": [format!("LD_PRELOAD={preload}"), format!("CROSSLANE_RACK={rack}")],
        "mounts": [
            mount(&rack, &["bind", "rw", "nosuid", "nodev", "noexec"]),
            mount(&mounted, &["bind", "ro", "nosuid", "nodev"]),
        ],
    });
    let devices = json!([{"name": name, "containerEdits": edits}]);
    Ok(json!({"cdiVersion": SPECIFICATION, "kind": KIND, "devices": devices}))
}

/// What a file specifies.
enum Specified {
    /// A rack: this command has written it.
    Rack(PathBuf),
    /// Something else.
    Other,
}

/// Reads a file; `None` if there is none.
fn read(path: &Path) -> Result<Option<Specified>> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("'{}' cannot be read; check it", path.display()))?,
    };
    let found: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let variables = found["devices"][0]["containerEdits"]["env"].as_array().filter(|_| found["kind"] == KIND);
    let rack = variables.into_iter().flatten().find_map(|value| value.as_str()?.strip_prefix("CROSSLANE_RACK="));
    Ok(Some(rack.map_or(Specified::Other, |rack| Specified::Rack(rack.into()))))
}

fn write(path: &Path, specification: &Value) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if !folder.exists() {
        fs::create_dir_all(folder)?;
        // Container engines without root read it too.
        fs::set_permissions(folder, fs::Permissions::from_mode(FOLDER_MODE))?;
    }
    // Container engines read only names that end with '.json' or '.yaml'.
    let mut file = tempfile::Builder::new().prefix(".crosslane-").tempfile_in(folder)?;
    file.write_all(format!("{specification:#}\n").as_bytes())?;
    file.as_file().set_permissions(fs::Permissions::from_mode(FILE_MODE))?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
