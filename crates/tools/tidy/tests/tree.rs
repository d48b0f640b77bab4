//! The repository keeps its own style.

use tidy::{Violation, check, report, tree};

#[test]
fn the_source_tree_keeps_to_the_style() {
    let sources = tree::sources(&tree::root()).expect("the repository is readable");
    let violations: Vec<Violation> = sources.iter().flat_map(check).collect();
    assert!(violations.is_empty(), "{} violations, see STYLE.md:\n{}", violations.len(), report(&violations));
}
