//! The documentation of parameter files says of each key what the code says.

/// Returns the fields of the public structures in a source, with the comment of each and its name in files.
fn fields(source: &str) -> Vec<(String, String)> {
    let (mut fields, mut comment, mut renamed) = (Vec::new(), Vec::new(), None);
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("    /// ") {
            comment.push(text);
        } else if let Some(name) = line.split("rename = \"").nth(1) {
            renamed = name.split('"').next();
        } else if let Some((name, _)) = line.strip_prefix("    pub ").and_then(|rest| rest.split_once(": ")) {
            let is_field = !name.contains(['(', ' ']);
            fields.extend(is_field.then(|| (renamed.unwrap_or(name).to_owned(), comment.join(" "))));
            (comment, renamed) = (Vec::new(), None);
        } else if !line.trim_start().starts_with("#[") {
            (comment, renamed) = (Vec::new(), None);
        }
    }
    fields
}

#[test]
fn the_page_has_the_comment_of_each_key() {
    let page = include_str!("../../../../docs/pcie-system.md");
    let link = include_str!("../src/link.rs").split("pub struct Link {").nth(1).expect("a structure");
    let link = link.split("\n}").next().expect("an end");
    let parameters = include_str!("../src/host/parameters.rs").split("\nimpl ").next().expect("the structures");
    let prediction = include_str!("../src/host/prediction.rs").split("\nimpl ").next().expect("the structure");
    let fields: Vec<_> = [parameters, link, prediction].into_iter().flat_map(fields).collect();
    assert!(fields.len() > 70, "{} fields", fields.len());
    for (name, comment) in fields {
        assert!(!comment.is_empty(), "{name}");
        // A table is a section, with its comment below the heading.
        let row = format!("{name}` | {comment} |");
        let section = format!("### `[{name}]`\n\n{comment}\n");
        assert!(page.contains(&row) || page.contains(&section), "docs/pcie-system.md lacks {row}");
    }
}
