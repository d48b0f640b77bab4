//! The kernel settings that a node changes, which a file remembers until they are restored.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use router_ports::{Leftover, Namespace, Sysctls};
use tracing::warn;

use super::settings::NodeSettings;
use crate::cluster::{Node as NodeConfig, NodePaths, all_sysctls};

/// Directory of the namespaces of `ip netns`.
const NAMESPACES: &str = "/run/netns";

/// Returns the path of a node's network namespace, if it has its own.
pub fn namespace_path(node: &NodeConfig) -> Option<PathBuf> {
    Some(Path::new(NAMESPACES).join(node.namespace.as_ref()?))
}

/// Returns an empty set for the settings that the node is about to change in the calling thread's network namespace,
/// with what it has left changed if it was killed.
pub fn remembered(settings: &NodeSettings) -> Sysctls {
    let file = settings.node_paths().sysctls();
    if Sysctls::is_damaged(&file) {
        let file = file.display();
        warn!("{file} is damaged: if the node was killed, check the sysctls that docs/router.md names");
    }
    Sysctls::remembered_in(&file, namespace_path(settings.node()).as_deref()).unwrap_or_else(|error| {
        let file = file.display();
        warn!("sysctls are not restored if the node is killed, because they are not remembered in {file}: {error}");
        Sysctls::new()
    })
}

/// Takes over what other killed nodes have left changed in the calling thread's network namespace: nodes of a cluster
/// file, or with a name, that is not used any more. No other node runs in the namespace.
pub fn take_over_others(sysctls: &mut Sysctls, settings: &NodeSettings) -> io::Result<()> {
    let own = settings.node_paths().sysctls();
    all_sysctls(settings.paths.base())
        .iter()
        .filter(|file| **file != own)
        .try_for_each(|file| sysctls.take_over_from(file))
}

/// Restores the kernel settings that a killed node has left changed. Returns the number of settings, or `None` if there
/// was nothing to restore: the network namespace is gone, was made anew, or is not known.
///
/// # Errors
/// The settings cannot be restored: the file is damaged, or the namespace cannot be entered.
pub fn restore_kernel_settings(node: &NodePaths) -> io::Result<Option<usize>> {
    let file = node.sysctls();
    if !file.exists() {
        return Ok(None);
    }
    if Sysctls::is_damaged(&file) {
        fs::remove_file(&file)?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is damaged"));
    }
    let (restored, is_named) = match Sysctls::namespace_of(&file) {
        Some(path) if !path.exists() => (Leftover::OfAnotherNamespace, true),
        Some(path) => (Namespace::at(&path)?.within(|| Sysctls::restore_leftover(&file))??, true),
        None => (Sysctls::restore_leftover(&file)?, false),
    };
    match restored {
        Leftover::Restored(count) => Ok(Some(count)),
        Leftover::OfAnotherNamespace => {
            // Without a path, the namespace may be another one than that of this command.
            if is_named {
                fs::remove_file(&file)?;
            }
            Ok(None)
        }
    }
}
