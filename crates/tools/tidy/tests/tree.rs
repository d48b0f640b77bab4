//! The repository keeps its own style.

use tidy::{Offence, check, report, tree};

#[test]
fn the_source_tree_keeps_to_the_style() {
    let sources = tree::sources(&tree::root()).expect("the repository is readable");
    let offences: Vec<Offence> = sources.iter().flat_map(check).collect();
    assert!(offences.is_empty(), "{} offences, see STYLE.md:\n{}", offences.len(), report(&offences));
}
