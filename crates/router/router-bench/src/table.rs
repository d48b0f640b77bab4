//! The routes for measurements: generated ones, or those of a user's file.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use fib::import::{self, Route};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use thiserror::Error;

/// The largest number of routes that are read from a file: four times the Internet's.
const ROUTES_MAX: usize = 5_000_000;

/// The first bytes of compressed files, the name of the format, and the command that decompresses them.
const COMPRESSED: [(&[u8], &str, &str); 4] = [
    (&[0x1f, 0x8b], "gzip", "gunzip -k"),
    (b"BZh", "bzip2", "bunzip2 -k"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "xz", "unxz -k"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "unzstd"),
];

/// The format of a file of routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// An uncompressed table dump as route collectors publish it (RFC 6396).
    Mrt,
    /// A prefix on each line, optionally followed by a next hop.
    Prefixes,
}

/// The reason why a file could not be read as a table.
#[derive(Debug, Error)]
pub enum TableError {
    /// The file cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is compressed.
    #[error("{0}: compressed with {format_name}; decompress it first: {command} {0}", path.display())]
    Compressed {
        /// The file.
        path: PathBuf,
        /// The compression format.
        format_name: &'static str,
        /// The command that decompresses it.
        command: &'static str,
    },
    /// The file is malformed.
    #[error("{}: {source}", path.display())]
    Import {
        /// The file.
        path: PathBuf,
        /// The location and kind of the error.
        source: import::Error,
    },
    /// The file has no routes.
    #[error("{}: no routes found; {remedy}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The remedy.
        remedy: &'static str,
    },
    /// The file has too many routes.
    #[error("{}: more than {ROUTES_MAX} routes; use a part of it", path.display())]
    TooMany {
        /// The file.
        path: PathBuf,
    },
}

/// A table of routes, each prefix once.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// IPv4 prefixes.
    pub v4: Vec<Ipv4Net>,
    /// IPv6 prefixes.
    pub v6: Vec<Ipv6Net>,
    /// The number of the next hop of each IPv4 route, then of each IPv6 route, counted from 0; empty if all are the
    /// same.
    next_hop_numbers: Vec<u32>,
    /// The number of different next hops.
    next_hops: usize,
}

impl Table {
    /// Generates a table of the given size with the prefix distribution of the Internet: [`fib::generate`].
    pub fn generated(seed: u64, routes_v4: usize, routes_v6: usize) -> Table {
        let (v4, v6) = (fib::generate::v4(seed, routes_v4), fib::generate::v6(seed, routes_v6));
        Table { v4, v6, next_hop_numbers: Vec::new(), next_hops: 0 }
    }

    /// Reads a table from a file. A repeated prefix keeps its first next hop.
    ///
    /// # Errors
    /// Names the file and the defect.
    pub fn read(path: &Path, format: Format) -> Result<Table, TableError> {
        let failed = |source| TableError::Read { path: path.to_owned(), source };
        let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(failed)?);
        let begin = reader.fill_buf().map_err(failed)?;
        if let Some((_, format_name, command)) = COMPRESSED.iter().find(|(magic, ..)| begin.starts_with(magic)) {
            return Err(TableError::Compressed { path: path.to_owned(), format_name, command });
        }
        match format {
            Format::Mrt => Table::from_routes(path, import::mrt(reader), "is it a table dump (TABLE_DUMP_V2)?"),
            Format::Prefixes => Table::from_routes(path, import::prefixes(reader), "write one prefix per line"),
        }
    }

    fn from_routes(
        path: &Path,
        routes: impl Iterator<Item = Result<Route, import::Error>>,
        remedy: &'static str,
    ) -> Result<Table, TableError> {
        let path = || path.to_owned();
        let (mut table, mut seen) = (Table::default(), HashSet::new());
        let (mut next_hops_v4, mut next_hops_v6) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<Option<IpAddr>, u32> = HashMap::new();
        for route in routes {
            let Route { prefix, next_hop } = route.map_err(|source| TableError::Import { path: path(), source })?;
            if seen.len() == ROUTES_MAX {
                return Err(TableError::TooMany { path: path() });
            }
            if !seen.insert(prefix) {
                continue;
            }
            let number = numbers.len() as u32;
            let next_hop_number = *numbers.entry(next_hop).or_insert(number);
            match prefix {
                IpNet::V4(prefix) => {
                    table.v4.push(prefix);
                    next_hops_v4.push(next_hop_number);
                }
                IpNet::V6(prefix) => {
                    table.v6.push(prefix);
                    next_hops_v6.push(next_hop_number);
                }
            }
        }
        if seen.is_empty() {
            return Err(TableError::Empty { path: path(), remedy });
        }
        table.next_hops = numbers.len();
        if table.next_hops > 1 {
            next_hops_v4.extend(next_hops_v6);
            table.next_hop_numbers = next_hops_v4;
        }
        Ok(table)
    }

    /// Returns the number of different next hops; 0 for a generated table, which has none.
    pub fn next_hops(&self) -> usize {
        self.next_hops
    }

    /// Returns all routes, each with the number of its next hop if the table has several.
    pub fn routes(&self) -> impl Iterator<Item = (IpNet, Option<usize>)> + '_ {
        let prefixes = self.v4.iter().copied().map(IpNet::V4).chain(self.v6.iter().copied().map(IpNet::V6));
        prefixes.enumerate().map(|(at, prefix)| {
            (prefix, self.next_hop_numbers.get(at).map(|next_hop_number| *next_hop_number as usize))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(bytes).expect("room");
        file
    }

    #[test]
    fn a_list_is_a_table_of_distinct_prefixes_with_their_first_next_hop() {
        let text = "10.0.0.0/8 192.0.2.1\n2001:db8::/32 2001:db8::9\n10.0.0.1/8 192.0.2.7\n10.1.0.0/16 192.0.2.1\n";
        let list = file(text.as_bytes());
        let table = Table::read(list.path(), Format::Prefixes).expect("a list");
        let found: Vec<(String, Option<usize>)> =
            table.routes().map(|(prefix, next_hop_number)| (prefix.to_string(), next_hop_number)).collect();
        let expected = [("10.0.0.0/8", Some(0)), ("10.1.0.0/16", Some(0)), ("2001:db8::/32", Some(1))];
        assert_eq!(found, expected.map(|(prefix, next_hop_number)| (prefix.to_owned(), next_hop_number)));
        assert_eq!(table.next_hops(), 2);
        let plain = Table::read(file(b"10.0.0.0/8\n10.1.0.0/16\n").path(), Format::Prefixes).expect("a list");
        assert!(
            plain.routes().all(|(_, next_hop_number)| next_hop_number.is_none()),
            "one next hop for all routes is not numbered"
        );
    }

    #[test]
    fn the_error_of_an_invalid_file_is_one_line_that_names_it() {
        let message = |bytes: &[u8], format| {
            let file = file(bytes);
            let error = Table::read(file.path(), format).expect_err("no table").to_string();
            error.replace(&*file.path().to_string_lossy(), "FILE")
        };
        let gzip = message(&[0x1f, 0x8b, 8, 0], Format::Mrt);
        assert_eq!(gzip, "FILE: compressed with gzip; decompress it first: gunzip -k FILE");
        let short = message(&[0; 7], Format::Mrt);
        assert_eq!(short, "FILE: record 1: truncated header; is this a complete, uncompressed MRT dump?");
        let line = message(b"# routes\n10.0.0.0/8\nhello\n", Format::Prefixes);
        assert!(line.starts_with("FILE: line 3: 'hello' is not a prefix; "), "{line}");
        assert_eq!(message(b"# none\n", Format::Prefixes), "FILE: no routes found; write one prefix per line");
        let none = message(b"", Format::Mrt);
        assert_eq!(none, "FILE: no routes found; is it a table dump (TABLE_DUMP_V2)?");
        let missing = Table::read(Path::new("/nowhere/rib"), Format::Mrt).expect_err("no file").to_string();
        assert!(missing.starts_with("/nowhere/rib: No such file"), "{missing}");
    }
}
