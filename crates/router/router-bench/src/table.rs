//! The routes to measure with: generated ones, or those of a file that a user brings.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use fib::import::{self, Route};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use thiserror::Error;

/// The most routes that are read of a file: four times the Internet's.
const ROUTES_MAX: usize = 5_000_000;

/// How compressed files begin, what such a file is called, and what unpacks it.
const COMPRESSED: [(&[u8], &str, &str); 4] = [
    (&[0x1f, 0x8b], "gzip", "gunzip -k"),
    (b"BZh", "bzip2", "bunzip2 -k"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "xz", "unxz -k"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "unzstd"),
];

/// What a file of routes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A dump of tables as collectors publish it (RFC 6396), unpacked.
    Mrt,
    /// A prefix a line, a next hop behind it or none.
    Prefixes,
}

/// Why there is no table of a file.
#[derive(Debug, Error)]
pub enum TableError {
    /// It cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is compressed.
    #[error("{0}: packed by {packer}; unpack it first: {unpack} {0}", path.display())]
    Compressed {
        /// Which.
        path: PathBuf,
        /// By what.
        packer: &'static str,
        /// What unpacks it.
        unpack: &'static str,
    },
    /// It does not hold together.
    #[error("{}: {source}", path.display())]
    Import {
        /// Which.
        path: PathBuf,
        /// Where, and why.
        source: import::Error,
    },
    /// It has no routes.
    #[error("{}: no routes in it; {remedy}", path.display())]
    Empty {
        /// Which.
        path: PathBuf,
        /// What to try.
        remedy: &'static str,
    },
    /// It has too many.
    #[error("{}: more than {ROUTES_MAX} routes; bring a part of it", path.display())]
    TooMany {
        /// Which.
        path: PathBuf,
    },
}

/// Routes, each prefix once.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// IPv4's.
    pub v4: Vec<Ipv4Net>,
    /// IPv6's.
    pub v6: Vec<Ipv6Net>,
    /// Of each route of IPv4, then of IPv6, the number of its next hop, from 0 on; nothing where all are the same.
    ways: Vec<u32>,
    /// Different next hops.
    next_hops: usize,
}

impl Table {
    /// As large as asked for, and as crowded as the Internet's: [`fib::generate`].
    pub fn generated(seed: u64, routes_v4: usize, routes_v6: usize) -> Table {
        let (v4, v6) = (fib::generate::v4(seed, routes_v4), fib::generate::v6(seed, routes_v6));
        Table { v4, v6, ways: Vec::new(), next_hops: 0 }
    }

    /// Of a file. A prefix that comes again keeps its first next hop.
    ///
    /// # Errors
    /// Names the file, and what is wrong with it.
    pub fn read(path: &Path, format: Format) -> Result<Table, TableError> {
        let failed = |source| TableError::Read { path: path.to_owned(), source };
        let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(failed)?);
        let begin = reader.fill_buf().map_err(failed)?;
        if let Some((_, packer, unpack)) = COMPRESSED.iter().find(|(magic, ..)| begin.starts_with(magic)) {
            return Err(TableError::Compressed { path: path.to_owned(), packer, unpack });
        }
        match format {
            Format::Mrt => Table::of(path, import::mrt(reader), "is it a dump of tables, TABLE_DUMP_V2?"),
            Format::Prefixes => Table::of(path, import::prefixes(reader), "write a prefix a line"),
        }
    }

    fn of(
        path: &Path,
        routes: impl Iterator<Item = Result<Route, import::Error>>,
        remedy: &'static str,
    ) -> Result<Table, TableError> {
        let path = || path.to_owned();
        let (mut table, mut taken) = (Table::default(), HashSet::new());
        let (mut ways_v4, mut ways_v6) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<Option<IpAddr>, u32> = HashMap::new();
        for route in routes {
            let Route { prefix, next_hop } = route.map_err(|source| TableError::Import { path: path(), source })?;
            if taken.len() == ROUTES_MAX {
                return Err(TableError::TooMany { path: path() });
            }
            if !taken.insert(prefix) {
                continue;
            }
            let number = numbers.len() as u32;
            let way = *numbers.entry(next_hop).or_insert(number);
            match prefix {
                IpNet::V4(prefix) => {
                    table.v4.push(prefix);
                    ways_v4.push(way);
                }
                IpNet::V6(prefix) => {
                    table.v6.push(prefix);
                    ways_v6.push(way);
                }
            }
        }
        if taken.is_empty() {
            return Err(TableError::Empty { path: path(), remedy });
        }
        table.next_hops = numbers.len();
        if table.next_hops > 1 {
            ways_v4.extend(ways_v6);
            table.ways = ways_v4;
        }
        Ok(table)
    }

    /// Different next hops; 0 of a generated table, which has none of its own.
    pub fn next_hops(&self) -> usize {
        self.next_hops
    }

    /// All routes, each with the number of its next hop, where the table has several.
    pub fn routes(&self) -> impl Iterator<Item = (IpNet, Option<usize>)> + '_ {
        let prefixes = self.v4.iter().copied().map(IpNet::V4).chain(self.v6.iter().copied().map(IpNet::V6));
        prefixes.enumerate().map(|(at, prefix)| (prefix, self.ways.get(at).map(|way| *way as usize)))
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
    fn a_list_is_a_table_with_each_prefix_once_and_its_first_next_hop() {
        let text = "10.0.0.0/8 192.0.2.1\n2001:db8::/32 2001:db8::9\n10.0.0.1/8 192.0.2.7\n10.1.0.0/16 192.0.2.1\n";
        let list = file(text.as_bytes());
        let table = Table::read(list.path(), Format::Prefixes).expect("a list");
        let found: Vec<(String, Option<usize>)> =
            table.routes().map(|(prefix, way)| (prefix.to_string(), way)).collect();
        let expected = [("10.0.0.0/8", Some(0)), ("10.1.0.0/16", Some(0)), ("2001:db8::/32", Some(1))];
        assert_eq!(found, expected.map(|(prefix, way)| (prefix.to_owned(), way)));
        assert_eq!(table.next_hops(), 2);
        let plain = Table::read(file(b"10.0.0.0/8\n10.1.0.0/16\n").path(), Format::Prefixes).expect("a list");
        assert!(plain.routes().all(|(_, way)| way.is_none()), "one way for all is none of its own");
    }

    #[test]
    fn a_file_that_is_no_table_is_one_line_that_names_it() {
        let message = |bytes: &[u8], format| {
            let file = file(bytes);
            let error = Table::read(file.path(), format).expect_err("no table").to_string();
            error.replace(&*file.path().to_string_lossy(), "FILE")
        };
        let gzip = message(&[0x1f, 0x8b, 8, 0], Format::Mrt);
        assert_eq!(gzip, "FILE: packed by gzip; unpack it first: gunzip -k FILE");
        let short = message(&[0; 7], Format::Mrt);
        assert_eq!(short, "FILE: record 1: truncated header; is this a complete, uncompressed MRT dump?");
        let line = message(b"# routes\n10.0.0.0/8\nhello\n", Format::Prefixes);
        assert!(line.starts_with("FILE: line 3: 'hello' is not a prefix; "), "{line}");
        assert_eq!(message(b"# none\n", Format::Prefixes), "FILE: no routes in it; write a prefix a line");
        let none = message(b"", Format::Mrt);
        assert_eq!(none, "FILE: no routes in it; is it a dump of tables, TABLE_DUMP_V2?");
        let missing = Table::read(Path::new("/nowhere/rib"), Format::Mrt).expect_err("no file").to_string();
        assert!(missing.starts_with("/nowhere/rib: No such file"), "{missing}");
    }
}
