use std::collections::BTreeSet;
use std::path::Path;

use clap::CommandFactory;
use netsim::scenario::Scenario;
use netsim::workload::SizeDistribution;
use pcie::host::Parameters;
use pcie::model::latency::PciePath;
use pcie::model::nic::NicModel;
use rack::RackFile;
use router_node::cluster::ClusterFile;
use socket::rack::rules::Rules;

use super::*;

/// Parses a text. Returns the error.
type Parse = fn(&str) -> Result<(), String>;

fn error_of<T, E: ToString>(result: Result<T, E>) -> Result<(), String> {
    result.map(|_| ()).map_err(|error| error.to_string())
}

fn distribution(text: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sizes.toml");
    std::fs::write(&path, text).expect("a file");
    error_of(SizeDistribution::find(path.to_str().expect("UTF-8")))
}

/// The name of a format, its parser, and a text for each of its tables that the parser refuses for its key `zzz`.
type Parser = (&'static str, Parse, &'static [(&'static str, &'static str)]);

const PARSERS: &[Parser] = &[
    (
        "crosslane-rack",
        |text| error_of(RackFile::parse(Path::new("f"), format!("version = 1\n{text}").as_bytes())),
        &[
            ("", "zzz = 1"),
            ("device", "[device]\nzzz = 1"),
            ("link", "[link]\nzzz = 1"),
            ("proxy", "[proxy]\nzzz = 1"),
            ("timeouts", "[timeouts]\nzzz = 1"),
            ("partitions", "[[partitions]]\nzzz = 1"),
            ("nodes", "[[nodes]]\nzzz = 1"),
            ("access", "[[access]]\nzzz = 1"),
        ],
    ),
    ("crosslane-rules", |text| error_of(Rules::parse(text.as_bytes())), &[]),
    (
        "crosslane-cluster",
        |text| error_of(ClusterFile::parse("f", format!("version = 1\n{text}").as_bytes())),
        &[
            ("", "zzz = 1"),
            ("interconnect", "[interconnect]\nzzz = 1"),
            ("timeouts", "[timeouts]\nzzz = 1"),
            ("nodes", "[[nodes]]\nzzz = 1"),
            ("nodes.ports", "[[nodes]]\n[[nodes.ports]]\nzzz = 1"),
            ("nodes.routes", "[[nodes]]\n[[nodes.routes]]\nzzz = 1"),
        ],
    ),
    (
        "crosslane-scenario",
        |text| error_of(Scenario::parse("f", text)),
        &[
            ("", "zzz = 1"),
            ("topology", "[topology]\nzzz = 1"),
            ("topology.lines", "[topology]\nlines = [{ zzz = 1 }]"),
            ("switches", "[switches]\nzzz = 1"),
            ("lines", "[lines]\nzzz = 1"),
            ("lines.bursts", "[lines]\nbursts = { zzz = 1 }"),
            ("workload", "[workload]\nzzz = 1"),
            ("transport", "[transport]\nzzz = 1"),
            ("transport.irn", "[transport.irn]\nzzz = 1"),
            ("transport.bdp-window", "[transport.bdp-window]\nzzz = 1"),
            ("transport.dctcp", "[transport.dctcp]\nzzz = 1"),
            ("transport.dcqcn", "[transport.dcqcn]\nzzz = 1"),
            ("transport.swift", "[transport.swift]\nzzz = 1"),
            ("transport.timely", "[transport.timely]\nzzz = 1"),
        ],
    ),
    ("crosslane-distribution", distribution, &[("", "zzz = 1")]),
    (
        "crosslane-pcie-system",
        |text| error_of(Parameters::parse("f", text)),
        &[
            ("", "zzz = 1"),
            ("prediction", "[prediction]\nzzz = 1"),
            ("link", "[link]\nzzz = 1"),
            ("wire", "[wire]\nzzz = 1"),
            ("credits", "[credits]\nzzz = 1"),
            ("device", "[device]\nzzz = 1"),
            ("root_complex", "[root_complex]\nzzz = 1"),
            ("iommu", "[iommu]\nzzz = 1"),
            ("cache", "[cache]\nzzz = 1"),
            ("memory", "[memory]\nzzz = 1"),
            ("numa", "[numa]\nzzz = 1"),
            ("tails", "[tails]\nzzz = 1"),
        ],
    ),
    (
        "crosslane-pcie-nic",
        |text| error_of(NicModel::parse("f", text)),
        &[("", "zzz = 1"), ("transmit", "[[transmit]]\nzzz = 1"), ("receive", "[[receive]]\nzzz = 1")],
    ),
    (
        "crosslane-pcie-path",
        |text| error_of(PciePath::parse("f", text)),
        &[("", "zzz = 1"), ("links", "[[links]]\nzzz = 1"), ("links.switch", "[[links]]\n[links.switch]\nzzz = 1")],
    ),
];

/// Returns the full names of the keys that a parser accepts in a table.
fn accepted(parse: Parse, table: &str, text: &str) -> Vec<String> {
    let error = parse(text).expect_err(text);
    let (_, expected) = error.split_once("expected ").unwrap_or_else(|| panic!("{text}: {error}"));
    assert!(error.contains("zzz"), "{text}: {error}");
    let expected = expected.split("; see ").next().expect("a part");
    let names = expected.split(['`', '\'']).skip(1).step_by(2);
    names.map(|name| if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") }).collect()
}

fn documented(format: &Format) -> BTreeSet<String> {
    let Keys::Document((_, document), sections) = format.keys else { return BTreeSet::new() };
    markdown::tables(markdown::section(document, sections[0].0)).iter().flat_map(markdown::Table::keys).collect()
}

fn format(name: &str) -> &'static Format {
    FORMATS.iter().find(|format| format.name == name).expect("a format")
}

#[test]
fn each_page_has_the_keys_that_its_parser_accepts_and_no_others() {
    let documents = FORMATS.iter().filter(|format| matches!(format.keys, Keys::Document(..)));
    assert_eq!(documents.count(), PARSERS.len());
    for (name, parse, tables) in PARSERS {
        let accepted: BTreeSet<String> =
            tables.iter().flat_map(|(table, text)| accepted(*parse, table, text)).collect();
        let documented = documented(format(name));
        for key in &accepted {
            let below = format!("{key}.");
            let is_documented = documented.contains(key) || documented.iter().any(|other| other.starts_with(&below));
            assert!(is_documented, "{name}: the document lacks '{key}'; it has {documented:?}");
        }
        for key in &documented {
            assert!(accepted.contains(key), "{name}: no key '{key}'; the file has {accepted:?}");
        }
    }
}

#[test]
fn each_example_is_a_valid_file() {
    for (name, parse, _) in PARSERS {
        let Keys::Document((_, document), sections) = format(name).keys else { panic!("{name}: no document") };
        let example = match format(name).example {
            Some(example) => example(),
            None => markdown::code_blocks(markdown::section(document, sections[0].0)).remove(0),
        };
        // The parsers of racks and clusters above put the version first.
        let is_first = example.contains("version = 1\n") && *name != "crosslane-scenario";
        let text = if is_first { example.replacen("version = 1\n", "", 1) } else { example.clone() };
        parse(&text).unwrap_or_else(|error| panic!("{name}: {error}\n{example}"));
    }
}

#[test]
fn the_commands_of_a_format_exist() {
    for line in FORMATS.iter().flat_map(|format| format.commands) {
        let mut command = crate::Arguments::command();
        for word in line.split(' ').skip(1).filter(|word| !is_value(word)) {
            if let Some(option) = word.strip_prefix("--") {
                assert!(command.get_arguments().any(|known| known.get_long() == Some(option)), "{line}");
            } else {
                command = command.find_subcommand(word).unwrap_or_else(|| panic!("{line}")).clone();
            }
        }
    }
}

#[test]
fn keys_of_a_schema_are_listed_with_their_values() {
    let mut page = Vec::new();
    format("crosslane-pcie-result").page(&mut page).expect("a page");
    let page = String::from_utf8(page).expect("UTF-8");
    for part in [
        "\\fBtest\\fR\nOne of \"lat\\-rd\", \"lat\\-wrrd\", \"bw\\-rd\", \"bw\\-wr\", \"bw\\-rdwr\". Required.\n",
        "\\fBsize_bytes\\fR\nof one transfer. Integer from 1 to 4096. Required.\n",
        "\\fBprediction.rests_on\\fR\n",
        "\\fBlink\\fR\nObject: see link.\n",
        ".SS link\n",
        "\\fBp50_ns\\fR\nNumber, at least 0. Required.\n",
    ] {
        assert!(page.contains(part), "{part}\n{page}");
    }
}
