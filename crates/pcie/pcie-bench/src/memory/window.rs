//! The memory under test.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use serde::{Deserialize, Serialize};
use volmem::{Mapping, Region};

use super::placement::{self, PagePlacement};
use crate::cache_lines;
use crate::error::{Error, Result};

/// The setting of transparent huge pages for shared memory.
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Words of a node mask, which has one bit for each node.
const NODE_WORDS: usize = 1024 / u64::BITS as usize;

/// Page size of the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pages {
    /// 4 KB.
    #[default]
    #[serde(rename = "4k")]
    Base,
    /// 2 MB, transparent: used by the kernel where contiguous memory is available.
    #[serde(rename = "thp")]
    Transparent,
    /// 2 MB, from the pool of huge pages.
    #[serde(rename = "2m")]
    Huge2M,
    /// 1 GB, from the pool of huge pages.
    #[serde(rename = "1g")]
    Huge1G,
}

impl Pages {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "4k",
            Self::Transparent => "thp",
            Self::Huge2M => "2m",
            Self::Huge1G => "1g",
        }
    }

    /// Returns the bytes of a page.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Base => 4 << 10,
            Self::Transparent | Self::Huge2M => 2 << 20,
            Self::Huge1G => 1 << 30,
        }
    }

    fn flags(self) -> MemfdFlags {
        match self {
            Self::Base | Self::Transparent => MemfdFlags::CLOEXEC,
            Self::Huge2M => MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Self::Huge1G => MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        }
    }

    /// Returns whether the pages come from the pool that the administrator sizes.
    fn is_pooled(self) -> bool {
        matches!(self, Self::Huge2M | Self::Huge1G)
    }
}

/// Shared memory as the window of a test.
#[derive(Clone, Debug)]
pub struct Window {
    region: Region,
    window_bytes: usize,
    mapped_bytes: u64,
    pages: Pages,
}

impl Window {
    /// Maps memory for a window without touching a page.
    ///
    /// # Errors
    /// There are not enough pages of this size.
    pub fn map(window_bytes: u64, pages: Pages) -> Result<Self> {
        if pages == Pages::Transparent {
            check_transparent(fs::read_to_string(TRANSPARENT).ok().as_deref())?;
        }
        let mapped_bytes = window_bytes.next_multiple_of(pages.bytes());
        let failed = |error: io::Error| {
            if pages.is_pooled() {
                return no_huge_pages(pages, mapped_bytes / pages.bytes(), None);
            }
            Error::system(format!("memory: {window_bytes} bytes in pages of {}", pages.name()), error)
        };
        let file = memfd_create("crosslane-pcie-bench", pages.flags()).map_err(|error| failed(error.into()))?;
        ftruncate(&file, mapped_bytes).map_err(|error| failed(error.into()))?;
        let mapping = Mapping::new(file.as_fd(), mapped_bytes as usize).map_err(failed)?;
        let region = Region::of_mapping(Arc::new(mapping));
        let window = Self { region, window_bytes: window_bytes as usize, mapped_bytes, pages };
        window.advise()?;
        Ok(window)
    }

    /// Advises the kernel on the page size where it has a choice.
    fn advise(&self) -> Result<()> {
        let advice = match self.pages {
            Pages::Base => Advice::LinuxNoHugepage,
            Pages::Transparent => Advice::LinuxHugepage,
            Pages::Huge2M | Pages::Huge1G => return Ok(()),
        };
        let base = self.region.pointer(0, self.window_bytes);
        // SAFETY: the span is the mapping of the region, which lives as long as `self`. The advice changes the page
        // size and not the contents.
        match unsafe { madvise(base.as_ptr().cast(), self.mapped_bytes as usize, advice) } {
            // A kernel without huge pages uses base pages in any case.
            Err(Errno::INVAL) if self.pages == Pages::Base => Ok(()),
            done => done.map_err(|error| Error::system(format!("memory: pages of {}", self.pages.name()), error)),
        }
    }

    /// Requests pages of a node, regardless of which core touches them first, and keeps them there: by default the
    /// kernel moves pages towards the core that uses them, which would make a remote window local.
    ///
    /// # Errors
    /// The error of the kernel, except that a container may not set a policy (`EPERM`, `ENOSYS`). In that case first
    /// touch decides, and [`Self::placement`] checks the result.
    pub fn prefer(&self, node: usize) -> Result<()> {
        let mut set = [0_u64; NODE_WORDS];
        let bits = u64::BITS as usize;
        let Some(word) = set.get_mut(node / bits) else {
            return Error::failed(format!(
                "memory: node {node} is out of range; this program supports nodes 0 to 1023"
            ));
        };
        *word = 1 << (node % bits);
        let base = self.region.pointer(0, self.window_bytes);
        // SAFETY: the span is the mapping of the region, which lives as long as `self`. The kernel reads only the bits
        // of `set`, because it subtracts one from the number of bits. The placement of pages does not affect their
        // contents.
        let code = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                base.as_ptr(),
                self.mapped_bytes,
                libc::MPOL_PREFERRED,
                set.as_ptr(),
                NODE_WORDS * bits + 1,
                0,
            )
        };
        let refused = io::Error::last_os_error();
        match code {
            0 => Ok(()),
            _ if refused.raw_os_error().is_some_and(|code| [libc::EPERM, libc::ENOSYS].contains(&code)) => Ok(()),
            _ => Err(Error::system(format!("memory: requesting pages of node {node}"), refused)),
        }
    }

    /// Loads `destination.len()` bytes at `address`.
    #[inline]
    pub fn read(&self, address: u64, destination: &mut [u8]) {
        self.region.read(address as usize, destination);
    }

    /// Stores `source` at `address`.
    #[inline]
    pub fn write(&self, address: u64, source: &[u8]) {
        self.region.write(address as usize, source);
    }

    /// Stores `value` to every byte, so that the caches of this core hold as many of the lines as fit.
    pub fn fill(&self, value: u8) {
        let page = [value; 4096];
        for start in (0..self.window_bytes).step_by(page.len()) {
            let bytes = page.len().min(self.window_bytes - start);
            self.region.write(start, &page[..bytes]);
        }
    }

    /// Flushes every line from all caches to memory.
    pub fn flush(&self) {
        let base = self.region.pointer(0, self.window_bytes);
        // SAFETY: the span is within the region, which is mapped as long as `self` lives.
        unsafe { cache_lines::flush(base.as_ptr(), self.window_bytes) };
    }

    /// Returns the placement of a window that was filled, if it has the page size requested, and is on `node` if one is
    /// given.
    ///
    /// # Errors
    /// The window has another page size or is on another node; the message states which.
    pub fn placement(&self, node: Option<usize>) -> Result<PagePlacement> {
        let placement = placement::of(self.region.pointer(0, 1).as_ptr().addr())?;
        let (wanted, name) = (self.pages.bytes(), self.pages.name());
        if placement.page_bytes_min < wanted {
            return Error::failed(format!(
                "memory: requested pages of {name}, but the window is {placement}: memory is fragmented; as root: \
                 echo 1 > /proc/sys/vm/compact_memory, or choose --pages 2m|4k"
            ));
        }
        if placement.page_bytes_max > wanted {
            return Error::failed(format!(
                "memory: requested pages of {name}, but the window is {placement}; see {TRANSPARENT}"
            ));
        }
        match (node, &placement.nodes[..]) {
            (None, _) => Ok(placement),
            (Some(node), [one]) if *one == node => Ok(placement),
            (Some(node), []) => {
                Error::failed(format!("memory: /proc/self/numa_maps does not report whether pages are on node {node}"))
            }
            (Some(node), _) if self.pages.is_pooled() => {
                Err(no_huge_pages(self.pages, self.mapped_bytes / wanted, Some(node)))
            }
            (Some(node), found) => Error::failed(format!(
                "memory: requested pages on node {node}, but they are on nodes {found:?}; \
                 check whether node {node} has free memory"
            )),
        }
    }
}

/// Checks that the kernel uses huge pages for shared memory. `setting` is the text of the setting, such as `always
/// [advise] never`.
fn check_transparent(setting: Option<&str>) -> Result<()> {
    let Some(setting) = setting else {
        return Error::wrong_use("memory: this kernel has no transparent huge pages; choose --pages 4k|2m|1g");
    };
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or_default();
    if !["never", "deny"].contains(&chosen) {
        return Ok(());
    }
    Error::wrong_use(format!(
        "memory: transparent huge pages of shared memory are off ('{chosen}'); as root: echo advise > {TRANSPARENT}, \
         or choose --pages 4k|2m|1g"
    ))
}

/// Returns the error that the pool, of one node or of the machine, has too few huge pages.
fn no_huge_pages(pages: Pages, wanted: u64, node: Option<usize>) -> Error {
    let kilobytes = pages.bytes() >> 10;
    let (of_node, folder) = match node {
        Some(node) => (format!(" on node {node}"), format!("/sys/devices/system/node/node{node}/hugepages")),
        None => (String::new(), "/sys/kernel/mm/hugepages".to_owned()),
    };
    Error::WrongUse(format!(
        "memory: no {wanted} free pages of {}{of_node}; as root: echo {wanted} > \
         {folder}/hugepages-{kilobytes}kB/nr_hugepages, or choose --pages 4k",
        pages.name()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_are_read_back_after_a_flush() {
        let window = Window::map(8192, Pages::Base).unwrap();
        window.fill(7);
        window.write(100, &[1, 2, 3]);
        window.flush();
        let mut found = [0; 5];
        window.read(99, &mut found);
        assert_eq!(found, [7, 1, 2, 3, 7]);
        window.read(8191, &mut found[..1]);
        assert_eq!(found[0], 7);
        assert_eq!(window.placement(None).unwrap().page_bytes_max, 4096);
    }

    /// Accepts both outcomes, because only the administrator can fill the pool. A guest of the lab has all page sizes.
    #[test]
    fn huge_pages_are_huge_or_refused_with_the_remedy() {
        for (pages, remedy) in [(Pages::Huge2M, "nr_hugepages"), (Pages::Transparent, "--pages")] {
            let filled = Window::map(8192, pages).and_then(|window| {
                window.fill(5);
                let mut found = [0; 1];
                window.read(8191, &mut found);
                assert_eq!(found, [5]);
                window.placement(None)
            });
            match filled {
                Ok(placement) => assert_eq!(placement.page_bytes_min, 2 << 20),
                Err(error) => assert!(error.to_string().contains(remedy), "{error}"),
            }
        }
    }

    #[test]
    fn transparent_pages_are_refused_where_they_are_off() {
        for on in ["[always] within_size advise never deny force\n", "always within_size [advise] never deny force\n"] {
            assert!(check_transparent(Some(on)).is_ok());
        }
        for off in [Some("always within_size advise [never] deny force\n"), Some("always advise never [deny]\n"), None]
        {
            let error = check_transparent(off).unwrap_err();
            assert!(error.is_wrong_use() && error.to_string().contains("--pages 4k"), "{error}");
        }
    }

    #[test]
    fn missing_huge_pages_are_named_with_their_number_and_node() {
        let text = no_huge_pages(Pages::Huge2M, 4, None).to_string();
        assert!(text.contains("echo 4") && text.contains("hugepages-2048kB") && text.contains("--pages 4k"), "{text}");
        let text = no_huge_pages(Pages::Huge1G, 1, Some(3)).to_string();
        assert!(text.contains("1g on node 3") && text.contains("node3/hugepages/hugepages-1048576kB"), "{text}");
    }
}
