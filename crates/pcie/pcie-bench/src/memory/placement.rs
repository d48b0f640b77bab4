//! NUMA nodes and sizes of the pages of a mapping, as the kernel reports them.

use std::fmt;
use std::fs;

use crate::error::{Error, Result};

/// Size of a transparent huge page on x86-64 and on arm64 with base pages of 4 KB.
const TRANSPARENT_BYTES: u64 = 2 << 20;

/// Placement of the pages of a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePlacement {
    /// Memory nodes with pages of the mapping; empty if the kernel does not support NUMA.
    pub nodes: Vec<usize>,
    /// Bytes of the smallest page.
    pub page_bytes_min: u64,
    /// Bytes of the largest page.
    pub page_bytes_max: u64,
}

impl fmt::Display for PagePlacement {
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

/// Returns the placement of the mapping of this process that begins at `address`, of the pages touched so far.
///
/// # Errors
/// The kernel does not report it.
pub fn of(address: usize) -> Result<PagePlacement> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| Error::system(format!("memory: {path}"), error));
    let Some((page_bytes_min, page_bytes_max)) = page_bytes(&read("/proc/self/smaps")?, address) else {
        return Error::failed("memory: /proc/self/smaps does not report the page size of the window");
    };
    // A kernel without NUMA support has no such file.
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    Ok(PagePlacement { nodes: nodes(&maps, address), page_bytes_min, page_bytes_max })
}

/// Returns the nodes with pages of the mapping at `address`, from the text of `numa_maps`.
fn nodes(maps: &str, address: usize) -> Vec<usize> {
    let line = maps.lines().find(|line| starts_at(line, ' ', address));
    let node = |word: &str| word.strip_prefix('N')?.split_once('=')?.0.parse().ok();
    line.unwrap_or_default().split(' ').filter_map(node).collect()
}

/// Returns the smallest and the largest page size of the mapping at `address`, from the text of `smaps`.
fn page_bytes(maps: &str, address: usize) -> Option<(u64, u64)> {
    let mut lines = maps.lines().skip_while(|line| !starts_at(line, '-', address)).skip(1);
    let mut kilobytes = |key: &str| -> Option<u64> {
        let line = lines.by_ref().find(|line| line.starts_with(key))?;
        line.strip_prefix(key)?.trim().trim_end_matches(" kB").parse().ok()
    };
    // These keys are in the order in which the kernel writes them.
    let page = kilobytes("KernelPageSize:")? << 10;
    let resident = kilobytes("Rss:")?;
    let in_huge = kilobytes("ShmemPmdMapped:").unwrap_or(0);
    Some(match in_huge {
        0 => (page, page),
        _ if in_huge == resident => (TRANSPARENT_BYTES, TRANSPARENT_BYTES),
        _ => (page, TRANSPARENT_BYTES),
    })
}

/// Returns whether the part of a line before `end` is the address.
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
    fn transparent_pages_are_recognised_by_the_resident_bytes_in_them() {
        for (kernel_page, resident, in_huge, smallest, largest) in
            [(4, 8, 0, 4, 4), (4, 4096, 4096, 2048, 2048), (4, 4096, 2048, 4, 2048), (2048, 0, 0, 2048, 2048)]
        {
            let found = page_bytes(&smaps(kernel_page, resident, in_huge), 0x7f00);
            assert_eq!(found, Some((smallest << 10, largest << 10)));
        }
        assert_eq!(page_bytes(&smaps(4, 8, 0), 0x1), None);
    }

    #[test]
    fn a_placement_is_displayed_as_a_phrase() {
        let placement = |nodes: &[usize], page_bytes_min| {
            PagePlacement { nodes: nodes.to_vec(), page_bytes_min, page_bytes_max: 2 << 20 }.to_string()
        };
        assert_eq!(placement(&[1], 2 << 20), "in pages of 2048 KB on node 1");
        assert_eq!(placement(&[0, 1], 4096), "in pages of 4 and 2048 KB on nodes [0, 1]");
        assert_eq!(placement(&[], 2 << 20), "in pages of 2048 KB");
    }
}
