//! Sections of the project's documents as parts of manual pages.
//!
//! Only what the documents use is understood: headings, paragraphs, lists of one level, tables, code that is indented
//! or fenced, and within a line code, bold, italic and links.

use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

/// A block of a document.
#[derive(Debug, PartialEq, Eq)]
enum Block<'a> {
    Heading(&'a str),
    Paragraph(String),
    Item(String),
    Code(Vec<&'a str>),
    Table(Table<'a>),
}

/// A table: the heading above it, its heads, and the cells of each row.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Table<'a> {
    heading: &'a str,
    heads: Vec<&'a str>,
    rows: Vec<Vec<&'a str>>,
}

/// Returns the lines below a heading, up to the next heading of the same or of a higher level.
///
/// # Panics
/// If the document has no such heading: the documents are part of this program.
pub(super) fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let (mut at, mut is_code, mut found) = (0, false, None);
    for line in document.split_inclusive('\n') {
        let text = line.trim_start_matches('#');
        let level = line.len() - text.len();
        is_code ^= line.starts_with("```");
        match found {
            // A line of code may begin with a comment.
            _ if level == 0 || is_code => {}
            None if text.trim() == heading => found = Some((at + line.len(), level)),
            Some((start, of_section)) if level <= of_section => return &document[start..at],
            _ => {}
        }
        at += line.len();
    }
    let (start, _) = found.unwrap_or_else(|| panic!("no section '{heading}'"));
    &document[start..]
}

/// Returns what a document says before its first heading of the second level, and its sections with such headings.
pub(super) fn chapters(document: &str) -> (&str, Vec<(&str, &str)>) {
    let title_bytes = document.find('\n').map_or(0, |end| end + 1);
    let (introduction, rest) = document[title_bytes..].split_once("\n## ").unwrap_or((&document[title_bytes..], ""));
    let sections = rest.split("\n## ").filter(|section| !section.is_empty());
    (introduction, sections.map(|section| section.split_once('\n').unwrap_or((section, ""))).collect())
}

/// Appends a section.
pub(super) fn render(roff: &mut Roff, section: &str) {
    // A heading is a paragraph break by itself.
    let mut is_below_heading = true;
    for block in blocks(section) {
        let is_heading = matches!(block, Block::Heading(_));
        if !is_below_heading && matches!(block, Block::Paragraph(_) | Block::Code(_)) {
            roff.control("PP", []);
        }
        match block {
            Block::Heading(text) => {
                roff.control("SS", [text.replace('`', "").replace('"', "\\(dq").as_str()]);
            }
            Block::Paragraph(text) => _ = roff.text(inlines(&text)),
            Block::Item(text) => _ = roff.control("IP", ["\\(bu", "2"]).text(inlines(&text)),
            Block::Code(lines) => code(roff, &lines),
            Block::Table(table) => table.render(roff),
        }
        is_below_heading = is_heading;
    }
}

/// Returns the tables of a section.
#[cfg(test)]
pub(super) fn tables(section: &str) -> Vec<Table<'_>> {
    let table = |block| if let Block::Table(table) = block { Some(table) } else { None };
    blocks(section).into_iter().filter_map(table).collect()
}

/// Returns the code blocks of a section.
#[cfg(test)]
pub(super) fn code_blocks(section: &str) -> Vec<String> {
    let lines = |block| if let Block::Code(lines) = block { Some(lines.join("\n") + "\n") } else { None };
    blocks(section).into_iter().filter_map(lines).collect()
}

/// Appends lines as they are.
pub(super) fn code(roff: &mut Roff, lines: &[&str]) {
    roff.control("RS", ["4"]).control("EX", []);
    lines.iter().for_each(|line| _ = roff.text([roman(*line)]));
    roff.control("EE", []).control("RE", []);
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut lines = text.lines().peekable();
    // Whether the next line continues the last block, if it is a paragraph or an item.
    let mut is_open = false;
    let mut heading = "";
    while let Some(line) = lines.next() {
        let was_open = std::mem::replace(&mut is_open, false);
        let item = line.strip_prefix("- ").or_else(|| line.strip_prefix("* "));
        if line.trim().is_empty() {
        } else if line.starts_with("```") {
            blocks.push(Block::Code(lines.by_ref().take_while(|line| !line.starts_with("```")).collect()));
        } else if line.starts_with('#') {
            heading = line.trim_start_matches(['#', ' ']);
            blocks.push(Block::Heading(heading));
        } else if line.starts_with('|') {
            let mut rows = vec![cells(line)];
            while let Some(line) = lines.next_if(|line| line.starts_with('|')) {
                rows.push(cells(line));
            }
            let heads = rows.remove(0);
            rows.remove(0); // the rule between heads and rows
            blocks.push(Block::Table(Table { heading, heads, rows }));
        } else if let Some(text) = item {
            blocks.push(Block::Item(text.to_owned()));
            is_open = true;
        } else if was_open && let Some(Block::Paragraph(text) | Block::Item(text)) = blocks.last_mut() {
            text.push(' ');
            text.push_str(line.trim());
            is_open = true;
        } else if let Some(line) = line.strip_prefix("    ") {
            let mut code = vec![line];
            while let Some(line) = lines.next_if(|line| line.is_empty() || line.starts_with("    ")) {
                code.push(line.get(4..).unwrap_or(""));
            }
            let end = code.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
            code.truncate(end);
            blocks.push(Block::Code(code));
        } else {
            blocks.push(Block::Paragraph(line.to_owned()));
            is_open = true;
        }
    }
    blocks
}

/// Returns the cells of a row. A bar in code separates nothing.
fn cells(line: &str) -> Vec<&str> {
    let mut is_code = false;
    let is_end = |letter: char| {
        is_code ^= letter == '`';
        letter == '|' && !is_code
    };
    let line = line.trim().trim_start_matches('|');
    let cells: Vec<&str> = line.split(is_end).map(str::trim).collect();
    cells[..cells.len() - 1].to_vec() // after the last bar there is nothing
}

impl Table<'_> {
    /// Returns the full names of the keys in the first cells of the rows; none if this is no table of a file's keys.
    /// The table of a key is before it, or before the first key of its cell, or in the head or the heading.
    #[cfg(test)]
    pub(super) fn keys(&self) -> Vec<String> {
        let of_head = self.heads[0].strip_prefix("`[").and_then(|head| head.strip_suffix("]`"));
        if self.heads[0] != "key" && of_head.is_none() {
            return Vec::new();
        }
        let of_heading = self.heading.strip_prefix("`[").and_then(|heading| heading.split("]`").next());
        let table = of_head.or(of_heading).unwrap_or("").trim_matches(['[', ']']);
        let mut keys = Vec::new();
        for row in &self.rows {
            let mut table = table;
            for key in row[0].split('`').skip(1).step_by(2).map(|key| key.trim_matches(['[', ']'])) {
                table = key.rsplit_once('.').map_or(table, |(table, _)| table);
                let name = key.rsplit('.').next().expect("a last part");
                keys.push(if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") });
            }
        }
        keys
    }

    fn render(&self, roff: &mut Roff) {
        if let Some(table) = self.heads[0].strip_prefix("`[") {
            let mut text = vec![roman("The table ")];
            text.extend([bold(format!("[{}", table.trim_end_matches('`'))), roman(":")]);
            roff.control("PP", []).text(text);
        }
        for row in &self.rows {
            roff.control("TP", []).text(inlines(row[0]));
            let mut text = Vec::new();
            for (head, cell) in self.heads.iter().zip(row).skip(1).filter(|(_, cell)| !cell.is_empty()) {
                if !text.is_empty() {
                    text.push(roman(" "));
                }
                if cell.starts_with("required") {
                    text.extend(inlines(&capitalised(cell)));
                } else {
                    if !["", "meaning", "value", "contents"].contains(head) {
                        text.extend(inlines(&capitalised(head)));
                        text.push(roman(": "));
                    }
                    text.extend(inlines(cell));
                }
                if !cell.ends_with(['.', '?', '!']) {
                    text.push(roman("."));
                }
            }
            roff.text(text);
        }
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Returns a text with its fonts: code and bold text are bold; a link is its text, with its address if it leads to
/// another site, and with the folder if it is the name of another document.
fn inlines(text: &str) -> Vec<Inline> {
    let mut inlines = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let found = match letter {
            '`' => enclosed(rest, "`").map(|(text, rest)| (vec![bold(text)], rest)),
            '*' if rest.starts_with("**") => {
                enclosed(rest, "**").map(|(text, rest)| (vec![bold(text.replace('`', ""))], rest))
            }
            '*' => enclosed(rest, "*").map(|(text, rest)| (vec![italic(text)], rest)),
            '[' => link(rest),
            _ => None,
        };
        if let Some((found, after)) = found {
            inlines.push(roman(std::mem::take(&mut plain)));
            inlines.extend(found);
            rest = after;
        } else {
            plain.push(letter);
            rest = &rest[letter.len_utf8()..];
        }
    }
    inlines.push(roman(plain));
    inlines
}

/// Returns the text between two marks, at the first of which `text` begins, and what follows.
fn enclosed<'a>(text: &'a str, mark: &str) -> Option<(&'a str, &'a str)> {
    let (inner, rest) = text.strip_prefix(mark)?.split_once(mark)?;
    (!inner.is_empty() && !inner.starts_with(' ') && !inner.ends_with(' ')).then_some((inner, rest))
}

fn link(text: &str) -> Option<(Vec<Inline>, &str)> {
    let (shown, rest) = text.strip_prefix('[')?.split_once("](")?;
    let (address, rest) = rest.split_once(')')?;
    if shown.contains('[') {
        return None;
    }
    let mut found = self::inlines(shown);
    if shown == address {
        found.insert(0, roman("docs/"));
    }
    if address.contains("://") {
        found.push(roman(format!(" <{address}>")));
    }
    Some((found, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = r"# A

intro

## B

One `key` and
**more**, [see](x.md), [y.md](y.md), 2 * 3 * 4.

    code

      deeper

After.

### C

| key | meaning | default |
|---|---|---|
| `a` | is `x|y` | 1 |
| `r` | | required with `a` |
| `b.c`, `d` | *not* a | |

- first
  line
- second

## D

```toml
# x
[x]
```
";

    const RENDERED: &str = r"One \fBkey\fR and \fBmore\fR, see, docs/y.md, 2 * 3 * 4.
.PP
.RS 4
.EX
code

  deeper
.EE
.RE
.PP
After.
.SS C
.TP
\fBa\fR
is \fBx|y\fR. Default: 1.
.TP
\fBr\fR
Required with \fBa\fR.
.TP
\fBb.c\fR, \fBd\fR
\fInot\fR a.
.IP \(bu 2
first line
.IP \(bu 2
second
";

    fn rendered(heading: &str) -> String {
        let mut roff = Roff::new();
        render(&mut roff, section(DOCUMENT, heading));
        roff.to_roff()
    }

    #[test]
    fn a_document_is_an_introduction_and_chapters() {
        let (introduction, chapters) = chapters(DOCUMENT);
        assert_eq!(introduction.trim(), "intro");
        assert_eq!(chapters[0].0, "B");
        assert_eq!(super::chapters("# A\nonly"), ("only", Vec::new()));
    }

    #[test]
    fn a_section_ends_at_the_next_heading_of_its_level() {
        assert!(section(DOCUMENT, "B").trim_end().ends_with("- second"));
        assert_eq!(section(DOCUMENT, "D"), "\n```toml\n# x\n[x]\n```\n");
    }

    #[test]
    fn each_block_is_rendered() {
        assert_eq!(rendered("B"), RENDERED);
        assert_eq!(rendered("D"), ".RS 4\n.EX\n# x\n[x]\n.EE\n.RE\n");
    }

    #[test]
    fn keys_are_those_of_the_first_column() {
        let tables = tables(section(DOCUMENT, "C"));
        assert_eq!(tables[0].keys(), ["a", "r", "b.c", "b.d"]);
        let rows = || vec![vec!["`a`, `b`", "1"]];
        let table = Table { heads: vec!["`[t.u]`", "default"], rows: rows(), ..Table::default() };
        assert_eq!(table.keys(), ["t.u.a", "t.u.b"]);
        let table = Table { heading: "`[[t]]`: more", heads: vec!["key"], rows: rows() };
        assert_eq!(table.keys(), ["t.a", "t.b"]);
        assert!(Table { heads: vec!["kind"], rows: rows(), ..Table::default() }.keys().is_empty());
    }
}
