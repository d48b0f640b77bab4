//! Dependencies between crates point down the layers.

use std::collections::BTreeMap;

use tidy::tree;

/// The folders of `crates/`, from the bottom up.
const LAYERS: [&str; 8] = ["base", "pcie", "fabric", "sockets", "rack", "rdma", "router", "tools"];

/// Returns the names of the dependencies in a manifest, of every kind.
fn dependencies(manifest: &str) -> Vec<&str> {
    let mut is_in_section = false;
    let mut found = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            is_in_section = line.trim_end_matches(']').ends_with("dependencies");
        } else if is_in_section {
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            found.extend((!name.is_empty() && !name.starts_with('#')).then_some(name));
        }
    }
    found
}

fn level(layer: &str) -> usize {
    LAYERS.iter().position(|known| *known == layer).unwrap_or_else(|| panic!("crates/{layer}: no such layer"))
}

#[test]
fn no_crate_depends_on_a_layer_above_its_own() {
    let sources = tree::sources(&tree::root()).expect("the repository is readable");
    let manifests: Vec<(&str, &str, &str)> = sources
        .iter()
        .filter_map(|source| {
            let inner = source.path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml")?;
            let (layer, name) = inner.split_once('/')?;
            Some((layer, name, source.text.as_str()))
        })
        .collect();
    let layers: BTreeMap<&str, &str> = manifests.iter().map(|(layer, name, _)| (*name, *layer)).collect();
    assert!(layers.len() > 30, "{} crates: is the tree read from the right place?", layers.len());
    for (layer, name, manifest) in manifests {
        for dependency in dependencies(manifest) {
            let Some(below) = layers.get(dependency) else { continue };
            assert!(
                level(below) <= level(layer),
                "{name} ({layer}) depends on {dependency} ({below}), which is above it"
            );
        }
    }
}

#[test]
fn dependencies_of_every_kind_are_found() {
    let manifest = "[package]\nname = \"a\"\n[dependencies]\nb.workspace = true\n# c\n\
                    [dev-dependencies]\nd = { path = \"x\" }\n";
    assert_eq!(dependencies(manifest), ["b", "d"]);
}
