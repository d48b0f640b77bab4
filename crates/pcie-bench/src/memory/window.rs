//! The memory that is measured.

use std::fs;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use volmem::{Mapping, Region};

use crate::error::{Error, Result};
use crate::lines;

/// Pages that the window is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pages {
    /// 4 KB.
    #[default]
    #[serde(rename = "4k")]
    Base,
    /// 2 MB, from the pool of huge pages.
    #[serde(rename = "2m")]
    Huge2M,
    /// 1 GB, from the pool of huge pages.
    #[serde(rename = "1g")]
    Huge1G,
}

impl Pages {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "4k",
            Self::Huge2M => "2m",
            Self::Huge1G => "1g",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Base => 4 << 10,
            Self::Huge2M => 2 << 20,
            Self::Huge1G => 1 << 30,
        }
    }

    fn flags(self) -> MemfdFlags {
        match self {
            Self::Base => MemfdFlags::CLOEXEC,
            Self::Huge2M => MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Self::Huge1G => MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        }
    }
}

/// Shared memory, as two processes would share it.
#[derive(Clone, Debug)]
pub struct Window {
    region: Region,
    window_bytes: usize,
}

impl Window {
    /// Maps memory for a window; no page is touched yet.
    ///
    /// # Errors
    /// Without enough pages of the kind.
    pub fn map(window_bytes: u64, pages: Pages) -> Result<Self> {
        let mapped_bytes = window_bytes.next_multiple_of(pages.bytes());
        let failed = |error: std::io::Error| match pages {
            Pages::Base => Error::system(format!("memory: {window_bytes} bytes in pages of 4k"), error),
            huge => no_huge_pages(huge, mapped_bytes / huge.bytes()),
        };
        let file = memfd_create("crosslane-pcie-bench", pages.flags()).map_err(|error| failed(error.into()))?;
        ftruncate(&file, mapped_bytes).map_err(|error| failed(error.into()))?;
        let mapping = Mapping::new(std::os::fd::AsFd::as_fd(&file), mapped_bytes as usize).map_err(failed)?;
        Ok(Self { region: Region::of_mapping(Arc::new(mapping)), window_bytes: window_bytes as usize })
    }

    /// Loads a transfer.
    #[inline]
    pub fn read(&self, address: u64, destination: &mut [u8]) {
        self.region.read(address as usize, destination);
    }

    /// Stores a transfer.
    #[inline]
    pub fn write(&self, address: u64, source: &[u8]) {
        self.region.write(address as usize, source);
    }

    /// Stores to every byte, so that the lines are in the caches of this core, as far as they fit.
    pub fn fill(&self, value: u8) {
        let page = [value; 4096];
        for start in (0..self.window_bytes).step_by(page.len()) {
            let bytes = page.len().min(self.window_bytes - start);
            self.region.write(start, &page[..bytes]);
        }
    }

    /// Sends every line to memory and out of all caches.
    pub fn flush(&self) {
        let base = self.region.pointer(0, self.window_bytes);
        // SAFETY: the span is the region's, which is mapped.
        unsafe { lines::flush(base.as_ptr(), self.window_bytes) };
    }

    /// Whether every page lies on a node, as the kernel counts them.
    ///
    /// # Errors
    /// Names the nodes it lies on instead.
    pub fn check_node(&self, node: usize) -> Result<()> {
        let Ok(maps) = fs::read_to_string("/proc/self/numa_maps") else { return Ok(()) };
        let address = self.region.pointer(0, 1).as_ptr().addr();
        let on = nodes_of(&maps, address);
        if on.iter().all(|found| *found == node) {
            return Ok(());
        }
        Error::failed(format!("memory: asked for pages on node {node}, got them on {on:?}: is that node full?"))
    }
}

fn no_huge_pages(pages: Pages, wanted: u64) -> Error {
    let kilobytes = pages.bytes() >> 10;
    Error::WrongUse(format!(
        "memory: no {wanted} free pages of {}; as root: echo {wanted} > \
         /sys/kernel/mm/hugepages/hugepages-{kilobytes}kB/nr_hugepages, or choose --pages 4k",
        pages.name()
    ))
}

/// The nodes that hold pages of the mapping at `address`, from the text of `numa_maps`.
fn nodes_of(maps: &str, address: usize) -> Vec<usize> {
    let line = maps
        .lines()
        .find(|line| line.split(' ').next().and_then(|start| usize::from_str_radix(start, 16).ok()) == Some(address));
    let node = |word: &str| word.strip_prefix('N')?.split_once('=')?.0.parse().ok();
    line.unwrap_or_default().split(' ').filter_map(node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_a_flush_changes_nothing() {
        let window = Window::map(8192, Pages::Base).unwrap();
        window.fill(7);
        window.write(100, &[1, 2, 3]);
        window.flush();
        let mut found = [0; 5];
        window.read(99, &mut found);
        assert_eq!(found, [7, 1, 2, 3, 7]);
        window.read(8191, &mut found[..1]);
        assert_eq!(found[0], 7);
        window.check_node(0).unwrap();
    }

    /// Whichever this machine has: the pool is its administrator's, so no test fills it.
    #[test]
    fn huge_pages_come_from_the_pool_or_are_refused() {
        match Window::map(8192, Pages::Huge2M) {
            Ok(window) => {
                window.fill(5);
                let mut found = [0; 1];
                window.read(8191, &mut found);
                assert_eq!((found[0], page_kilobytes(&window)), (5, 2048));
            }
            Err(error) => assert!(error.is_wrong_use() && error.to_string().contains("nr_hugepages"), "{error}"),
        }
        assert_eq!(page_kilobytes(&Window::map(8192, Pages::Base).unwrap()), 4);
    }

    /// What the kernel says of the mapping.
    fn page_kilobytes(window: &Window) -> u64 {
        let start = format!("{:x}-", window.region.pointer(0, 1).as_ptr().addr());
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let size = lines.find_map(|line| line.strip_prefix("KernelPageSize:")).unwrap();
        size.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn nodes_are_read_from_the_line_of_the_mapping() {
        let maps = "7f00 default file=/x N0=4\n7f10 default shared N0=1 N1=3 kernelpagesize_kB=4\n";
        assert_eq!(nodes_of(maps, 0x7f10), [0, 1]);
        assert_eq!(nodes_of(maps, 0x1), [] as [usize; 0]);
    }

    #[test]
    fn missing_huge_pages_are_named_with_their_number() {
        let text = no_huge_pages(Pages::Huge2M, 4).to_string();
        assert!(text.contains("echo 4") && text.contains("hugepages-2048kB") && text.contains("--pages 4k"), "{text}");
    }
}
