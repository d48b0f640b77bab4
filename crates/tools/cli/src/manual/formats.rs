//! The manual pages of file formats (section 5).
//!
//! What the keys of a file mean is written once, in the project's documents, which the pages are made of. The tests
//! below hold the documents against the parsers: they name the keys that a parser accepts, and no others.

use anyhow::{Context, Result};
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use rack::{Backend, Rack, Trust};
use serde_json::Value;

use super::{markdown, schema};

/// The manual page of a file format.
pub(super) struct Format {
    /// The page's name.
    pub name: &'static str,
    /// What the file is, in a phrase.
    summary: &'static str,
    /// The commands that read or write it, with their option or argument; values are in capitals.
    pub commands: &'static [&'static str],
    description: &'static str,
    keys: Keys,
    example: Option<fn() -> String>,
}

/// A document: its name and its text.
type Document = (&'static str, &'static str);

/// Where the meanings of the keys come from.
enum Keys {
    /// Sections of a document with their headings there, and in the page. The first one has the keys.
    Document(Document, &'static [(&'static str, &'static str)]),
    /// A JSON schema: definitions with their headings.
    Schema(&'static str, &'static [(&'static str, &'static str)]),
}

const NETSIM: Document = ("docs/netsim.md", include_str!("../../../../../docs/netsim.md"));
const PCIE_MODEL: Document = ("docs/pcie-model.md", include_str!("../../../../../docs/pcie-model.md"));

/// The formats of all files that users write, or that several commands exchange.
pub(super) const FORMATS: &[Format] = &[
    Format {
        name: "crosslane-rack",
        summary: "rack file: machines joined by memory windows",
        commands: &[
            "crosslane up --rack FILE",
            "crosslane status --rack FILE",
            "crosslane down --rack FILE",
            "crosslane run --rack FILE",
            "crosslane rack push --rack FILE",
            "crosslane rack show --rack FILE",
            "crosslane rack example",
        ],
        description: "A rack file describes the nodes of a rack, the device that joins them, the layout of the windows \
                      and the access rules. All nodes of a rack use the same file, or the same keys in etcd.",
        keys: Keys::Document(
            ("docs/rack.md", include_str!("../../../../../docs/rack.md")),
            &[("The file", "KEYS"), ("In etcd", "IN ETCD"), ("The directory of a running rack", "FILES")],
        ),
        example: Some(|| Rack::example(2, Backend::Shm, None, Trust::Proxy).to_string()),
    },
    Format {
        name: "crosslane-rules",
        summary: "rules of a shared rack: whose clients may reach whose servers",
        commands: &["crosslane rack-dir allow DIR", "crosslane rack-dir create DIR", "crosslane rack-dir show DIR"],
        description: "The file 'rules' of a shared rack directory says which users' programs may have lanes to each \
                      other.",
        keys: Keys::Document(
            ("docs/shared-racks.md", include_str!("../../../../../docs/shared-racks.md")),
            &[("The rules", "RULES"), ("What is checked", "FILES"), ("Errors", "ERRORS")],
        ),
        example: None,
    },
    Format {
        name: "crosslane-cluster",
        summary: "cluster file: router nodes that forward as one router",
        commands: &[
            "crosslane router up --cluster FILE",
            "crosslane router status --cluster FILE",
            "crosslane router reload --cluster FILE",
            "crosslane router down --cluster FILE",
            "crosslane router example",
        ],
        description: "A cluster file describes the nodes of a router, their ports, and what joins the nodes.",
        keys: Keys::Document(
            ("docs/router.md", include_str!("../../../../../docs/router.md")),
            &[("cluster.toml", "KEYS"), ("Reloading the file", "CHANGES"), ("Packet filters", "PACKET FILTERS")],
        ),
        example: Some(|| router_node::cluster::example(3)),
    },
    Format {
        name: "crosslane-scenario",
        summary: "scenario file of the packet simulator",
        commands: &["crosslane rnic sim run FILE"],
        description: "A scenario file describes a network, its load and its NICs.",
        keys: Keys::Document(NETSIM, &[("Files", "KEYS")]),
        example: None,
    },
    Format {
        name: "crosslane-distribution",
        summary: "distribution of flow sizes for the packet simulator",
        commands: &["crosslane rnic sim run FILE", "crosslane rnic sim fct --workload FILE"],
        description: "A distribution file gives the sizes of flows that arrive at random. A scenario file names it by \
                      its key workload.distribution.",
        keys: Keys::Document(NETSIM, &[("Distributions of flow sizes", "KEYS")]),
        example: Some(|| include_str!("../../../../rdma/netsim/distributions/web-search.toml").to_owned()),
    },
    Format {
        name: "crosslane-pcie-system",
        summary: "parameter file of a simulated host with its PCIe link and device",
        commands: &[
            "crosslane pcie bench --device sim:FILE",
            "crosslane pcie sweep --device sim:FILE",
            "crosslane pcie fit --write DIR",
        ],
        description: "A parameter file describes a host, a device and the link between them, which are simulated in \
                      virtual time. The device of a command is sim:FILE.toml, or sim:SYSTEM for a built-in one.",
        keys: Keys::Document(
            ("docs/pcie-system.md", include_str!("../../../../../docs/pcie-system.md")),
            &[("Keys", "KEYS")],
        ),
        example: Some(|| include_str!("../../../../pcie/pcie/systems/hsw.toml").to_owned()),
    },
    Format {
        name: "crosslane-pcie-nic",
        summary: "model of a network card: its PCIe traffic for each packet",
        commands: &["crosslane pcie nic --nic FILE"],
        description: "A card file lists the accesses by which a network card and its driver move packets over PCIe.",
        keys: Keys::Document(PCIE_MODEL, &[("Cards", "KEYS")]),
        example: Some(|| include_str!("../../../../pcie/pcie/nics/simple.toml").to_owned()),
    },
    Format {
        name: "crosslane-pcie-path",
        summary: "path of a PCIe transfer: links, switches, root complex, memory",
        commands: &["crosslane pcie latency --path FILE"],
        description: "A path file describes what a transfer passes between a device and memory.",
        keys: Keys::Document(PCIE_MODEL, &[("Minimum latency", "KEYS")]),
        example: Some(|| include_str!("../../../../pcie/pcie/paths/direct.toml").to_owned()),
    },
    Format {
        name: "crosslane-pcie-result",
        summary: "results of PCIe benchmarks, in JSON",
        commands: &[
            "crosslane pcie bench --json",
            "crosslane pcie sweep --json",
            "crosslane pcie import FILE",
            "crosslane pcie compare FILE FILE",
        ],
        description: "A result file has one result, or a list of them. The format is crosslane-pcie/1.",
        keys: Keys::Schema(
            include_str!("../../../../../docs/pcie-result.schema.json"),
            &[
                ("result", "Each result"),
                ("latency", "Results of latency tests"),
                ("bandwidth", "Results of bandwidth tests"),
                ("link", "link"),
            ],
        ),
        example: None,
    },
];

impl Format {
    /// Returns whether the command of this page, such as `crosslane-rack-push`, reads or writes such files.
    pub fn is_of(&self, page: &str) -> bool {
        self.commands.iter().any(|command| command_page(command) == page)
    }

    /// Writes the page without its title.
    pub fn page(&self, page: &mut Vec<u8>) -> Result<()> {
        let mut roff = Roff::new();
        roff.control("SH", ["NAME"]).text([roman(format!("{} - {}", self.name, self.summary))]);
        roff.control("SH", ["SYNOPSIS"]);
        for (index, command) in self.commands.iter().enumerate() {
            if index > 0 {
                roff.control("br", []);
            }
            let words = command.split(' ').map(|word| if is_value(word) { italic(word) } else { bold(word) });
            roff.text(words.flat_map(|word| [word, roman(" ")]).collect::<Vec<_>>());
        }
        roff.control("SH", ["DESCRIPTION"]).text([roman(self.description)]);
        match self.keys {
            Keys::Document((_, document), sections) => {
                for (heading, title) in sections {
                    roff.control("SH", [*title]);
                    markdown::render(&mut roff, markdown::section(document, heading));
                }
            }
            Keys::Schema(text, definitions) => {
                let schema: Value = serde_json::from_str(text).context("the schema of results")?;
                roff.control("SH", ["KEYS"]);
                schema::render(&mut roff, &schema, definitions);
            }
        }
        if let Some(example) = self.example {
            roff.control("SH", ["EXAMPLE"]);
            markdown::code(&mut roff, &example().lines().collect::<Vec<_>>());
        }
        roff.control("SH", ["SEE ALSO"]).text(self.see_also());
        roff.to_writer(page)?;
        Ok(())
    }

    fn see_also(&self) -> Vec<Inline> {
        let pages: Vec<String> = self.commands.iter().map(|command| command_page(command)).collect();
        let with_comma = |(index, page)| [roman(if index > 0 { ", " } else { "" }), bold(page), roman("(1)")];
        let document = match self.keys {
            Keys::Document((name, _), _) => Some(roman(format!(", {name} of the documentation"))),
            Keys::Schema(..) => None,
        };
        pages.into_iter().enumerate().flat_map(with_comma).chain(document).collect()
    }
}

/// Returns the manual page of a command line: its words before the first option or value, joined.
fn command_page(command: &str) -> String {
    let is_command = |word: &&str| !word.starts_with("--") && !is_value(word);
    command.split(' ').take_while(is_command).collect::<Vec<_>>().join("-")
}

fn is_value(word: &str) -> bool {
    word.ends_with(char::is_uppercase)
}

#[cfg(test)]
mod tests;
