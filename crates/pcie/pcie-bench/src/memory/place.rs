//! Where pages lie and how large they are, as the kernel counts them.

use std::fmt;
use std::fs;

use crate::error::{Error, Result};

/// A transparent huge page, as x86-64 and arm64 (with base pages of 4 KB) have them.
const TRANSPARENT_BYTES: u64 = 2 << 20;

/// Of one mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Memory nodes that hold pages of it; none where the kernel knows no nodes.
    pub nodes: Vec<usize>,
    /// Bytes of its smallest page.
    pub page_bytes_min: u64,
    /// Bytes of its largest page.
    pub page_bytes_max: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (smallest, largest) = (self.page_bytes_min >> 10, self.page_bytes_max >> 10);
        match smallest == largest {
            true => write!(formatter, "in pages of {smallest} KB")?,
            false => write!(formatter, "in pages of {smallest} and {largest} KB")?,
        }
        match &self.nodes[..] {
            [] => Ok(()),
            [node] => write!(formatter, " on node {node}"),
            nodes => write!(formatter, " on nodes {nodes:?}"),
        }
    }
}

/// That of this process' mapping that begins at `address`, as far as it was touched.
///
/// # Errors
/// If the kernel does not tell.
pub fn of(address: usize) -> Result<Place> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| Error::system(format!("memory: {path}"), error));
    let Some((page_bytes_min, page_bytes_max)) = page_bytes(&read("/proc/self/smaps")?, address) else {
        return Error::failed("memory: /proc/self/smaps does not tell which pages the window is made of");
    };
    // A kernel without nodes has no such file.
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    Ok(Place { nodes: nodes(&maps, address), page_bytes_min, page_bytes_max })
}

/// The nodes that hold pages of the mapping at `address`, from the text of `numa_maps`.
fn nodes(maps: &str, address: usize) -> Vec<usize> {
    let line = maps.lines().find(|line| starts_at(line, ' ', address));
    let node = |word: &str| word.strip_prefix('N')?.split_once('=')?.0.parse().ok();
    line.unwrap_or_default().split(' ').filter_map(node).collect()
}

/// The smallest and the largest page of the mapping at `address`, from the text of `smaps`.
fn page_bytes(maps: &str, address: usize) -> Option<(u64, u64)> {
    let mut lines = maps.lines().skip_while(|line| !starts_at(line, '-', address)).skip(1);
    let mut kilobytes = |key: &str| -> Option<u64> {
        let line = lines.by_ref().find(|line| line.starts_with(key))?;
        line.strip_prefix(key)?.trim().trim_end_matches(" kB").parse().ok()
    };
    // In the order in which the kernel writes them.
    let page = kilobytes("KernelPageSize:")? << 10;
    let resident = kilobytes("Rss:")?;
    let in_huge = kilobytes("ShmemPmdMapped:").unwrap_or(0);
    Some(match in_huge {
        0 => (page, page),
        _ if in_huge == resident => (TRANSPARENT_BYTES, TRANSPARENT_BYTES),
        _ => (page, TRANSPARENT_BYTES),
    })
}

/// Whether a line begins with an address, up to `end`.
fn starts_at(line: &str, end: char, address: usize) -> bool {
    line.split_once(end).and_then(|(start, _)| usize::from_str_radix(start, 16).ok()) == Some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_read_from_the_line_of_the_mapping() {
        let maps = "7f00 default file=/x N0=4\n7f10 prefer:1 file=/N5=x shared N0=1 N1=3 kernelpagesize_kB=4\n";
        assert_eq!(nodes(maps, 0x7f10), [0, 1]);
        assert_eq!(nodes(maps, 0x1), [] as [usize; 0]);
    }

    fn smaps(kernel_page: u64, resident: u64, in_huge: u64) -> String {
        format!(
            "7e00-7f00 rw-s 0 00:01 2 /x\nKernelPageSize: 4 kB\nRss: 1 kB\nShmemPmdMapped: 0 kB\n\
             7f00-8f00 rw-s 00000000 00:01 1 /memfd:x (deleted)\nSize: 4096 kB\nKernelPageSize: {kernel_page:8} kB\n\
             MMUPageSize: 4 kB\nRss: {resident:8} kB\nShmemPmdMapped: {in_huge:8} kB\n"
        )
    }

    #[test]
    fn transparent_pages_count_by_what_is_in_them() {
        for (kernel_page, resident, in_huge, smallest, largest) in
            [(4, 8, 0, 4, 4), (4, 4096, 4096, 2048, 2048), (4, 4096, 2048, 4, 2048), (2048, 0, 0, 2048, 2048)]
        {
            let found = page_bytes(&smaps(kernel_page, resident, in_huge), 0x7f00);
            assert_eq!(found, Some((smallest << 10, largest << 10)));
        }
        assert_eq!(page_bytes(&smaps(4, 8, 0), 0x1), None);
    }

    #[test]
    fn a_place_reads_as_a_sentence_goes_on() {
        let place = |nodes: &[usize], page_bytes_min| {
            Place { nodes: nodes.to_vec(), page_bytes_min, page_bytes_max: 2 << 20 }.to_string()
        };
        assert_eq!(place(&[1], 2 << 20), "in pages of 2048 KB on node 1");
        assert_eq!(place(&[0, 1], 4096), "in pages of 4 and 2048 KB on nodes [0, 1]");
        assert_eq!(place(&[], 2 << 20), "in pages of 2048 KB");
    }
}
