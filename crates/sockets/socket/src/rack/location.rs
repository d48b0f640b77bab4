//! Where the rack directory of a user is.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::io::Errno;

use super::private::make_private;
use super::shared::{SharedRack, SharedRackError};
use super::users::{self, UserMap};

/// The possible locations of racks, from the environment at the time when the library was loaded.
#[derive(Clone, Debug, Default)]
struct Environment {
    rack: Option<OsString>,
    runtime: Option<OsString>,
}

static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();

/// Reads the location of the rack from the environment. Called while the library is loaded, because the program may
/// later change its environment or its working directory.
pub fn remember_environment() {
    let absolute = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty())?;
        Some(std::path::absolute(&value).map_or(value, PathBuf::into_os_string))
    };
    ENVIRONMENT.get_or_init(|| Environment { rack: absolute("CROSSLANE_RACK"), runtime: absolute("XDG_RUNTIME_DIR") });
}

fn environment() -> Environment {
    remember_environment();
    ENVIRONMENT.get().cloned().unwrap_or_default()
}

/// Returns a warning if the environment names a directory that does not exist.
pub fn missing_configured_directory() -> Option<String> {
    let named = PathBuf::from(environment().rack?);
    let shown = named.display();
    match rustix::fs::stat(&named) {
        Err(Errno::NOENT | Errno::NOTDIR) => {
            Some(format!("rack '{shown}' is not there; correct CROSSLANE_RACK, or mkdir -m 700 '{shown}'"))
        }
        _ => None,
    }
}

/// Whether the environment names a shared rack, once that was examined.
static SHARED: OnceLock<Result<Option<SharedRack>, SharedRackError>> = OnceLock::new();

/// Returns the rack that several users share, if the environment names one.
///
/// # Errors
/// Why a directory that is meant to be shared cannot be.
pub fn shared() -> Result<Option<&'static SharedRack>, SharedRackError> {
    let examine = || environment().rack.map_or(Ok(None), |named| SharedRack::of(Path::new(&named)));
    SHARED.get_or_init(examine).as_ref().map(Option::as_ref).map_err(Clone::clone)
}

/// Returns the rack directory of a user, as [`rack_dir`] does, and creates it if it is missing and the default one, or
/// the user's in a shared rack: the name of any other may be mistyped.
pub fn ensure_rack_dir(uid: u32) -> PathBuf {
    let rack = rack_dir(uid);
    if let Ok(Some(shared)) = shared() {
        let _ = shared.ensure_user_directory(&users::of_this_process().unwrap_or_else(|_| UserMap::identity()));
    } else if environment().rack.is_none() {
        // If that fails, opening the directory fails as well.
        let _ = make_private(rustix::fs::CWD, rack.as_os_str().as_bytes());
    }
    rack
}

/// Returns the rack directory of a user: in a shared rack, the user's directory there.
pub fn rack_dir(uid: u32) -> PathBuf {
    if let Ok(Some(shared)) = shared() {
        let on_machine = users::of_this_process().ok().and_then(|map| map.on_machine(uid));
        return shared.user_directory(on_machine.unwrap_or(uid));
    }
    let environment = environment();
    stats_page::rack_dir(
        |name| match name {
            "CROSSLANE_RACK" => environment.rack.clone(),
            "XDG_RUNTIME_DIR" => environment.runtime.clone(),
            _ => None,
        },
        uid,
    )
}
