//! The stats page of this process, which `crosslane stat` reads.

use crate::process::settings::settings;
use crate::rack::location;
use stats_page::StatsPage;
use std::sync::OnceLock;

static PAGE: OnceLock<&'static StatsPage> = OnceLock::new();

/// Returns the page, which is created at the first call.
pub fn page() -> &'static StatsPage {
    PAGE.get_or_init(|| {
        let mut program = [0; _];
        let of_rack = || location::ensure_rack_dir(rustix::process::geteuid().as_raw());
        let rack = settings().stats.clone().unwrap_or_else(of_rack);
        StatsPage::create(&stats_page::PageConfig {
            rack: &rack,
            node: settings().node,
            program: stats_page::own_program_name(&mut program),
        })
    })
}

/// Returns the page, if there is one.
pub fn page_if_any() -> Option<&'static StatsPage> {
    PAGE.get().copied()
}

/// Records the memory of lanes, if there is a page.
pub(crate) fn note_lane_memory(bytes: u64, bytes_max: u64) {
    if let Some(page) = PAGE.get() {
        page.note_lane_memory(bytes, bytes_max);
    }
}
/// Gives a child of `fork` a page of its own, if its parent had one.
pub fn after_fork_in_child() {
    if let Some(page) = PAGE.get() {
        page.forked_child();
    }
}
