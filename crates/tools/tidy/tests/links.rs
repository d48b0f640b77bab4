//! Links between documents lead to files that exist.

use tidy::tree;

/// Returns the files to which a document links, without anchors; links to other sites are left out.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
    links.filter(|link| !link.contains("://")).filter_map(|link| link.split('#').next()).filter(|link| !link.is_empty())
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = tree::root();
    let mut documents = tree::sources(&root).expect("the repository is readable");
    documents.retain(|source| source.extension() == "md");
    let mut links = 0;
    let mut broken = Vec::new();
    for document in &documents {
        for target in targets(&document.text) {
            links += 1;
            if !root.join(&document.path).with_file_name(target).exists() {
                broken.push(format!("{}: {target}", document.path));
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
