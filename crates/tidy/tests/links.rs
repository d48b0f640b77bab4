//! Documents point at files that are there.

use std::path::{Path, PathBuf};

use tidy::tree;

/// Every document below `folder`, but for those of outputs and hidden folders.
fn documents(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().expect("a folder of the repository").map(|entry| entry.expect("an entry").path());
    let named = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    entries
        .filter(|path| named(path) != "target" && !named(path).starts_with('.'))
        .flat_map(|path| match path.is_dir() && !path.is_symlink() {
            true => documents(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect()
}

/// The files that a document's links name, without what is elsewhere and without the place in the file.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
    links.filter(|link| !link.contains("://")).filter_map(|link| link.split('#').next()).filter(|link| !link.is_empty())
}

#[test]
fn links_between_documents_lead_somewhere() {
    let documents = documents(&tree::root());
    let mut links = 0;
    let mut broken = Vec::new();
    for document in &documents {
        let text = std::fs::read_to_string(document).expect("a document is text");
        for target in targets(&text) {
            links += 1;
            if !document.with_file_name(target).exists() {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(links > 100, "{links} links in {} documents: are they looked for in the right place?", documents.len());
    assert!(broken.is_empty(), "no such file:\n{}", broken.join("\n"));
}

#[test]
fn links_elsewhere_and_within_a_document_are_left_out() {
    let text = "[a](b.md), ![c](d/e.svg) [f](https://g.example/h) [i](#j) [k](../l.md#m) and (n)";
    assert_eq!(targets(text).collect::<Vec<_>>(), ["b.md", "d/e.svg", "../l.md"]);
}
