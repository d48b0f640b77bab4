//! The last-level cache, in which the writes of a device allocate only a few ways (DDIO).

use crate::test::LINE_BYTES;

/// Entry of an empty way.
const EMPTY: u32 = 0;
/// Number of flag bits below the line number.
const FLAG_BITS: u32 = 1;
/// Flag: the CPU wrote the line, so a core may have a newer copy.
const HOST: u32 = 1;

/// The lines of the window in the cache. The set is the line number modulo the number of sets, because the published
/// windows are contiguous.
#[derive(Clone, Debug)]
pub struct Cache {
    sets: u32,
    ways: u32,
    ddio_ways: u32,
    /// `ways` entries for each set. The device's ways come first, the most recently written first.
    entries: Vec<u32>,
    /// For each set, the way that the next line written by the CPU and not present takes.
    next_way: Vec<u16>,
}

/// The state of a line that a read finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineState {
    /// Present, written by a device.
    Device,
    /// Present, written by the CPU.
    Host,
    /// Not in the cache.
    Absent,
}

/// The effect of a device's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOutcome {
    /// The line was present.
    pub was_hit: bool,
    /// Another line was evicted to memory.
    pub has_evicted: bool,
}

fn entry(line: u32, flag: u32) -> u32 {
    ((line + 1) << FLAG_BITS) | flag
}

fn is(entry: u32, line: u32) -> bool {
    entry >> FLAG_BITS == line + 1
}

impl Cache {
    /// Returns an empty cache.
    ///
    /// # Panics
    /// There is not at least one set with one way, or the device has more ways than there are.
    pub fn new(bytes: u64, ways: u32, ddio_ways: u32) -> Self {
        let sets = (bytes / LINE_BYTES / u64::from(ways)) as u32;
        assert!(sets > 0 && ddio_ways <= ways, "{bytes} bytes in {ways} ways, {ddio_ways} of them for the device");
        let entries = vec![EMPTY; (sets * ways) as usize];
        Self { sets, ways, ddio_ways, entries, next_way: vec![0; sets as usize] }
    }

    fn set(&mut self, line: u32) -> &mut [u32] {
        let first = (line % self.sets * self.ways) as usize;
        &mut self.entries[first..first + self.ways as usize]
    }

    /// Reads a line for a device, which does not change the cache.
    pub fn read(&self, line: u32) -> LineState {
        let first = (line % self.sets * self.ways) as usize;
        let set = &self.entries[first..first + self.ways as usize];
        match set.iter().find(|entry| is(**entry, line)) {
            Some(entry) if entry & HOST != 0 => LineState::Host,
            Some(_) => LineState::Device,
            None => LineState::Absent,
        }
    }

    /// Writes a line for a device: in place if it is present, otherwise into the oldest of the device's ways.
    pub fn device_write(&mut self, line: u32) -> WriteOutcome {
        let ddio_ways = self.ddio_ways as usize;
        let set = self.set(line);
        let found = set.iter().position(|entry| is(*entry, line));
        if let Some(way) = found {
            set[way] = entry(line, 0);
            if way < ddio_ways {
                set[..=way].rotate_right(1);
            }
            return WriteOutcome { was_hit: true, has_evicted: false };
        }
        let Some(last) = ddio_ways.checked_sub(1) else { return WriteOutcome { was_hit: false, has_evicted: false } };
        let has_evicted = set[last] != EMPTY;
        set[last] = entry(line, 0);
        set[..ddio_ways].rotate_right(1);
        WriteOutcome { was_hit: false, has_evicted }
    }

    /// Writes a line for the CPU: in place if it is present, otherwise into any way, in rotation.
    pub fn host_write(&mut self, line: u32) {
        let way = usize::from(self.next_way[(line % self.sets) as usize]);
        let set = self.set(line);
        if let Some(found) = set.iter_mut().find(|entry| is(**entry, line)) {
            *found = entry(line, HOST);
            return;
        }
        set[way] = entry(line, HOST);
        let ways = set.len();
        self.next_way[(line % self.sets) as usize] = ((way + 1) % ways) as u16;
    }

    /// Has the same effect as the CPU writing lines 0 to `lines` of an empty cache in order, but omits lines that later
    /// ones evict.
    pub fn host_fill(&mut self, lines: u32) {
        // Only whole rounds are omitted, so that each line takes the same way as without the omission.
        let round = self.sets * self.ways;
        let first = (lines / round).saturating_sub(1) * round;
        (first..lines).for_each(|line| self.host_write(line));
    }

    /// Has the same effect as a device writing lines 0 to `lines` of an empty cache in order, but omits lines that
    /// later ones evict.
    pub fn device_fill(&mut self, lines: u32) {
        let first = lines.saturating_sub(self.sets * self.ddio_ways);
        (first..lines).for_each(|line| {
            self.device_write(line);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(cache: &Cache, lines: u32) -> u32 {
        (0..lines).filter(|line| cache.read(*line) != LineState::Absent).count() as u32
    }

    #[test]
    fn a_device_fills_its_ways_only() {
        let mut cache = Cache::new(64 * 1000, 20, 2);
        for line in 0..1000 {
            cache.device_write(line);
        }
        assert_eq!(resident(&cache, 1000), 100, "two of twenty ways");
        assert_eq!(cache.read(999), LineState::Device);
        assert_eq!(cache.read(0), LineState::Absent);
    }

    #[test]
    fn a_fill_equals_individual_writes() {
        for (bytes, ways, ddio_ways) in [(64 * 40, 4, 2), (64 * 21, 3, 1), (64 * 16, 4, 0), (64 * 12, 2, 2)] {
            for lines in 0..200 {
                let empty = Cache::new(bytes, ways, ddio_ways);
                let [mut host, mut device, mut host_filled, mut device_filled] = [(); 4].map(|()| empty.clone());
                (0..lines).for_each(|line| host.host_write(line));
                (0..lines).for_each(|line| _ = device.device_write(line));
                host_filled.host_fill(lines);
                device_filled.device_fill(lines);
                assert_eq!((host.entries, host.next_way), (host_filled.entries, host_filled.next_way), "{lines}");
                assert_eq!(device.entries, device_filled.entries, "{lines} in {bytes}, {ways}, {ddio_ways}");
            }
        }
    }

    #[test]
    fn the_cpu_fills_all_ways_and_the_last_lines_stay() {
        let mut cache = Cache::new(64 * 1000, 20, 2);
        for line in 0..1500 {
            cache.host_write(line);
        }
        assert_eq!(resident(&cache, 1500), 1000);
        assert_eq!(cache.read(1499), LineState::Host);
        assert_eq!(cache.read(499), LineState::Absent);
    }

    #[test]
    fn writes_hit_lines_that_are_present_and_evict_the_oldest() {
        let mut cache = Cache::new(64 * 4, 4, 2);
        assert_eq!(cache.device_write(0), WriteOutcome { was_hit: false, has_evicted: false });
        assert_eq!(cache.device_write(1), WriteOutcome { was_hit: false, has_evicted: false });
        assert_eq!(cache.device_write(0), WriteOutcome { was_hit: true, has_evicted: false });
        assert_eq!(cache.device_write(2), WriteOutcome { was_hit: false, has_evicted: true });
        assert_eq!([cache.read(0), cache.read(1)], [LineState::Device, LineState::Absent], "the older one was evicted");
    }

    #[test]
    fn without_ddio_ways_a_device_writes_to_memory() {
        let mut cache = Cache::new(64 * 4, 4, 0);
        assert_eq!(cache.device_write(0), WriteOutcome { was_hit: false, has_evicted: false });
        assert_eq!(cache.read(0), LineState::Absent);
    }
}
