//! The root complex: translation, ordering, cache and memory for a request that has arrived at the host.

use sim::{Random, Span, Time};

use super::cache::{Cache, LineState};
use super::iommu::{Iommu, Lookup};
use super::line_rate::LineRate;
use super::memory::Memory;
use super::parameters::{CacheParameters, RootComplexParameters};
use super::port::Port;
use super::tails::Tail;
use crate::test::LINE_BYTES;

/// Number of recent reads kept, to detect concurrent reads of one line.
const RECENT_READS: usize = 1024;

/// The root complex with the memory system of the host.
#[derive(Clone, Debug)]
pub struct RootComplex {
    /// The IOMMU; absent if addresses are not translated.
    pub iommu: Option<Iommu>,
    /// Whether the device translates the addresses of its requests itself (ATS).
    has_translated_requests: bool,
    /// Last-level cache of the device's socket.
    pub cache: Cache,
    /// Memory that contains the window.
    pub memory: Memory,
    /// What bounds the rate of lines; both parts may be absent.
    bounds: LineBounds,
    port: Port,
    read: Span,
    line_interval: Span,
    write_order: Span,
    write_commit: Span,
    conflict: Span,
    jitter_ps: u64,
    snoop: Span,
    fetch: Span,
    dirty_eviction: Span,
    tail: Option<Tail>,
    random: Random,
    /// Completion of the last posted write, for which reads wait.
    posted_done: Time,
    /// For each index, the last line read that maps to it, and the time at which its data is available.
    recent: Vec<(u32, Time)>,
}

/// Parts that bound the rate of lines.
#[derive(Clone, Debug, Default)]
pub struct LineBounds {
    /// The order of writes, if it is strict and a host loses by it.
    pub strict_writes: Option<LineRate>,
    /// The links to the socket with the memory, if it is another one.
    pub socket_link: Option<LineRate>,
}

/// The bytes of a request.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Address of the first byte in the window.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u32,
}

/// The times at which the lines of a read are available.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadPlan {
    /// Time at which the request leaves the request queue and frees its credits.
    pub dequeued: Time,
    begun: Time,
    line_interval: Span,
    /// Time added to lines that come from memory, and to lines of which a core may have a newer copy.
    miss: Span,
    snoop: Span,
    /// Bit masks of these lines: bit k stands for line k.
    misses: u64,
    snoops: u64,
}

impl Extent {
    fn first_line(self) -> u32 {
        (self.address / LINE_BYTES) as u32
    }

    fn last_line(self) -> u32 {
        ((self.address + u64::from(self.bytes) - 1) / LINE_BYTES) as u32
    }

    fn lines(self) -> u32 {
        self.last_line() - self.first_line() + 1
    }

    /// Returns whether the request covers all of `line`.
    fn covers(self, line: u32) -> bool {
        let begin = u64::from(line) * LINE_BYTES;
        self.address <= begin && begin + LINE_BYTES <= self.address + u64::from(self.bytes)
    }
}

impl ReadPlan {
    /// Returns the time at which the data of line `index` of the request can leave.
    pub fn ready(&self, index: u32) -> Time {
        let bit = 1_u64 << index;
        let extra = if self.misses & bit != 0 {
            self.miss
        } else if self.snoops & bit != 0 {
            self.snoop
        } else {
            Span::ZERO
        };
        self.begun + extra + self.line_interval * u64::from(index)
    }
}

impl LineBounds {
    fn admit(part: &mut Option<LineRate>, arrived: Time, lines: u32) -> Span {
        part.as_mut().map_or(Span::ZERO, |part| part.admit(arrived, lines))
    }

    /// Returns how long a write waits that left translation at `arrived`.
    fn admit_write(&mut self, arrived: Time, lines: u32) -> Span {
        let wait = Self::admit(&mut self.strict_writes, arrived, lines);
        wait + Self::admit(&mut self.socket_link, arrived + wait, lines)
    }

    /// Returns how long a read of `lines` from memory waits whose request leaves the port at `arrived`.
    fn admit_read(&mut self, arrived: Time, lines: u32) -> Span {
        Self::admit(&mut self.socket_link, arrived, lines)
    }
}

impl RootComplex {
    /// Returns an idle root complex.
    pub fn new(
        parameters: &RootComplexParameters,
        cache_parameters: &CacheParameters,
        (iommu, has_translated_requests): (Option<Iommu>, bool),
        (cache, memory, bounds): (Cache, Memory, LineBounds),
        (tail, conflict_ns): (Option<Tail>, f64),
        random: Random,
    ) -> Self {
        Self {
            iommu,
            has_translated_requests,
            cache,
            memory,
            bounds,
            port: Port::new(Span::from_ns(parameters.port_line_ns)),
            read: Span::from_ns(parameters.read_ns),
            line_interval: Span::from_ns(parameters.line_interval_ns),
            write_order: Span::from_ns(parameters.write_order_ns),
            write_commit: Span::from_ns(parameters.write_commit_ns),
            conflict: Span::from_ns(conflict_ns),
            jitter_ps: Span::from_ns(parameters.jitter_ns).ps(),
            snoop: Span::from_ns(cache_parameters.snoop_ns),
            fetch: Span::from_ns(cache_parameters.fetch_ns),
            dirty_eviction: Span::from_ns(cache_parameters.dirty_eviction_ns),
            tail,
            random,
            posted_done: Time::ZERO,
            recent: vec![(u32::MAX, Time::ZERO); RECENT_READS],
        }
    }

    fn translated(&mut self, arrived: Time, extent: Extent, is_read: bool) -> Time {
        if self.has_translated_requests {
            return arrived;
        }
        self.look_up(Lookup { arrived, address: extent.address, lines: extent.lines(), is_read })
    }

    /// Processes a translation request of the device, and returns the time at which the translation can leave.
    pub fn translate(&mut self, arrived: Time, address: u64) -> Time {
        self.look_up(Lookup { arrived, address, lines: 0, is_read: true })
    }

    fn look_up(&mut self, lookup: Lookup) -> Time {
        let Some(iommu) = &mut self.iommu else { return lookup.arrived };
        let (port, memory) = (&self.port, &self.memory);
        iommu.translate(lookup, |begun| {
            let wait = port.wait(begun);
            wait + memory.refresh_wait(begun + wait)
        })
    }

    /// Processes a write that arrived, and returns the time at which it frees its credits.
    pub fn write(&mut self, arrived: Time, extent: Extent) -> Time {
        let translated = self.translated(arrived, extent, false);
        let dequeued = translated + self.bounds.admit_write(translated, extent.lines());
        let mut extra = Span::ZERO;
        for line in extent.first_line()..=extent.last_line() {
            let written = self.cache.device_write(line);
            let is_merged = !written.was_hit && !extent.covers(line);
            let fetched = if is_merged { self.fetch + self.memory.refresh_wait(dequeued) } else { Span::ZERO };
            let evicted = if written.has_evicted { self.dirty_eviction } else { Span::ZERO };
            extra = extra.max(fetched).max(evicted);
        }
        self.posted_done = self.posted_done.max(dequeued + self.write_order + extra);
        dequeued + self.write_commit
    }

    /// Returns the time from which no line waits for a part that bounds their rate.
    pub fn lines_done(&self) -> Time {
        let parts = [&self.bounds.strict_writes, &self.bounds.socket_link].into_iter().flatten();
        parts.map(LineRate::free_at).fold(Time::ZERO, Time::max)
    }

    /// Processes a read that arrived. It does not pass posted writes.
    pub fn read(&mut self, arrived: Time, extent: Extent, has_tail: bool) -> ReadPlan {
        let dequeued = self.translated(arrived, extent, true);
        let jitter = Span::from_ps(if self.jitter_ps == 0 { 0 } else { self.random.below(self.jitter_ps) });
        let tail = match &self.tail {
            Some(tail) if has_tail => tail.draw(&mut self.random),
            _ => Span::ZERO,
        };
        let passes = self.port.admit(dequeued, extent.lines());
        let mut begun = passes.max(self.posted_done) + self.read + jitter + tail;
        let (mut misses, mut snoops) = (0_u64, 0_u64);
        for (index, line) in (extent.first_line()..=extent.last_line()).enumerate() {
            match self.cache.read(line) {
                LineState::Device => {}
                LineState::Host => snoops |= 1 << index,
                LineState::Absent => misses |= 1 << index,
            }
        }
        if misses | snoops != 0 && self.conflict > Span::ZERO {
            begun += self.conflict_wait(extent.first_line(), dequeued, begun + self.snoop);
        }
        let miss = match misses.count_ones() {
            0 => Span::ZERO,
            lines => self.bounds.admit_read(passes, lines) + self.memory.access(begun, lines),
        };
        ReadPlan { dequeued, begun, line_interval: self.line_interval, miss, snoop: self.snoop, misses, snoops }
    }

    /// Returns the wait of a read of a line for which an earlier read still waits: it is retried later.
    fn conflict_wait(&mut self, line: u32, at: Time, ready: Time) -> Span {
        let recent = &mut self.recent[line as usize % RECENT_READS];
        let is_busy = recent.0 == line && recent.1 > at;
        let wait = if is_busy { self.conflict } else { Span::ZERO };
        *recent = (line, ready + wait);
        wait
    }
}
