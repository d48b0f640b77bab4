//! The memory that is measured.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use serde::{Deserialize, Serialize};
use volmem::{Mapping, Region};

use super::place::{self, Place};
use crate::error::{Error, Result};
use crate::lines;

/// Whether shared memory may have transparent huge pages.
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Words of a set of nodes, a bit each.
const NODE_WORDS: usize = 1024 / u64::BITS as usize;

/// Pages that the window is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pages {
    /// 4 KB.
    #[default]
    #[serde(rename = "4k")]
    Base,
    /// 2 MB, transparent: made by the kernel where it has memory in one piece.
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
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "4k",
            Self::Transparent => "thp",
            Self::Huge2M => "2m",
            Self::Huge1G => "1g",
        }
    }

    /// Bytes of one.
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

    /// Whether they come from the administrator's pool.
    fn is_pooled(self) -> bool {
        matches!(self, Self::Huge2M | Self::Huge1G)
    }
}

/// Shared memory, as two processes would share it.
#[derive(Clone, Debug)]
pub struct Window {
    region: Region,
    window_bytes: usize,
    mapped_bytes: u64,
    pages: Pages,
}

impl Window {
    /// Maps memory for a window; no page is touched yet.
    ///
    /// # Errors
    /// Without enough pages of the kind.
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

    /// Says which pages are wanted, where the kernel has a choice.
    fn advise(&self) -> Result<()> {
        let advice = match self.pages {
            Pages::Base => Advice::LinuxNoHugepage,
            Pages::Transparent => Advice::LinuxHugepage,
            Pages::Huge2M | Pages::Huge1G => return Ok(()),
        };
        let base = self.region.pointer(0, self.window_bytes);
        // SAFETY: the span is the region's mapping; which pages it is made of changes nothing that can be read there.
        match unsafe { madvise(base.as_ptr().cast(), self.mapped_bytes as usize, advice) } {
            // A kernel that knows no huge pages makes none.
            Err(Errno::INVAL) if self.pages == Pages::Base => Ok(()),
            done => done.map_err(|error| Error::system(format!("memory: pages of {}", self.pages.name()), error)),
        }
    }

    /// Asks for pages of a node whoever touches them first, and that they stay there: left to itself, the kernel moves
    /// pages towards the core that uses them, which undoes a remote window.
    ///
    /// # Errors
    /// What the kernel says, unless it is that a container may not ask: then who touches first decides, and the check
    /// of the place says what became of it.
    pub fn prefer(&self, node: usize) -> Result<()> {
        let mut set = [0_u64; NODE_WORDS];
        let bits = u64::BITS as usize;
        let Some(word) = set.get_mut(node / bits) else {
            return Error::failed(format!("memory: node {node} has too large a number; this program knows 0 to 1023"));
        };
        *word = 1 << (node % bits);
        let base = self.region.pointer(0, self.window_bytes);
        // SAFETY: the span is the region's mapping, and the kernel reads the bits of `set` and no more: it takes one
        // off their number. Where pages lie changes nothing that can be read in them.
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
            _ => Err(Error::system(format!("memory: asking for pages of node {node}"), refused)),
        }
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

    /// Where the window lies, once it was filled: of the pages asked for, and on `node` if one is given.
    ///
    /// # Errors
    /// Says which pages, or pages of which nodes, there are instead.
    pub fn place(&self, node: Option<usize>) -> Result<Place> {
        let place = place::of(self.region.pointer(0, 1).as_ptr().addr())?;
        let (wanted, name) = (self.pages.bytes(), self.pages.name());
        if place.page_bytes_min < wanted {
            return Error::failed(format!(
                "memory: asked for pages of {name}, got them {place}: memory is in small pieces; as root: \
                 echo 1 > /proc/sys/vm/compact_memory, or choose --pages 2m|4k"
            ));
        }
        if place.page_bytes_max > wanted {
            return Error::failed(format!("memory: asked for pages of {name}, got them {place}; see {TRANSPARENT}"));
        }
        match (node, &place.nodes[..]) {
            (None, _) => Ok(place),
            (Some(node), [one]) if *one == node => Ok(place),
            (Some(node), []) => {
                Error::failed(format!("memory: /proc/self/numa_maps does not tell whether pages lie on node {node}"))
            }
            (Some(node), _) if self.pages.is_pooled() => {
                Err(no_huge_pages(self.pages, self.mapped_bytes / wanted, Some(node)))
            }
            (Some(node), found) => Error::failed(format!(
                "memory: asked for pages on node {node}, got them on {found:?}: is that node full?"
            )),
        }
    }
}

/// Whether the kernel makes huge pages of shared memory; `setting` is its answer, such as `always [advise] never`.
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

/// That the pool has too few, of one node or at all.
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
        assert_eq!(window.place(None).unwrap().page_bytes_max, 4096);
    }

    /// Whichever this machine has: the pool is its administrator's, so no test fills it. A guest of the lab has all.
    #[test]
    fn huge_pages_are_huge_or_refused_with_the_remedy() {
        for (pages, remedy) in [(Pages::Huge2M, "nr_hugepages"), (Pages::Transparent, "--pages")] {
            let filled = Window::map(8192, pages).and_then(|window| {
                window.fill(5);
                let mut found = [0; 1];
                window.read(8191, &mut found);
                assert_eq!(found, [5]);
                window.place(None)
            });
            match filled {
                Ok(place) => assert_eq!(place.page_bytes_min, 2 << 20),
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
