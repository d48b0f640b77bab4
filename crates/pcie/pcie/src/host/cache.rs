//! The last-level cache, with the few ways into which a device's writes allocate (DDIO).

use crate::test::LINE_BYTES;

/// An empty way.
const EMPTY: u32 = 0;
/// Bits below the line's number.
const FLAG_BITS: u32 = 1;
/// The CPU wrote the line and may have a newer copy.
const HOST: u32 = 1;

/// Which lines of the window are in the cache. Sets follow the address, for the published windows are contiguous.
#[derive(Clone, Debug)]
pub struct Cache {
    sets: u32,
    ways: u32,
    ddio_ways: u32,
    /// `ways` entries a set; the device's ways come first, most recently written first.
    entries: Vec<u32>,
    /// The way that the CPU's next write of a line that is not there takes, a set.
    next_way: Vec<u16>,
}

/// What a read finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A line that a device wrote.
    Device,
    /// A line that the CPU wrote.
    Host,
    /// Nothing.
    Nothing,
}

/// What a device's write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The line was there.
    pub was_hit: bool,
    /// Another line had to go to memory for it.
    pub has_evicted: bool,
}

fn entry(line: u32, flag: u32) -> u32 {
    ((line + 1) << FLAG_BITS) | flag
}

fn is(entry: u32, line: u32) -> bool {
    entry >> FLAG_BITS == line + 1
}

impl Cache {
    /// An empty cache.
    ///
    /// # Panics
    /// When there is not at least one set of at least one way.
    pub fn new(bytes: u64, ways: u32, ddio_ways: u32) -> Self {
        let sets = (bytes / LINE_BYTES / u64::from(ways)) as u32;
        assert!(sets > 0 && ddio_ways <= ways, "{bytes} bytes in {ways} ways, {ddio_ways} of them a device's");
        let entries = vec![EMPTY; (sets * ways) as usize];
        Self { sets, ways, ddio_ways, entries, next_way: vec![0; sets as usize] }
    }

    fn set(&mut self, line: u32) -> &mut [u32] {
        let first = (line % self.sets * self.ways) as usize;
        &mut self.entries[first..first + self.ways as usize]
    }

    /// A device reads: nothing moves.
    pub fn read(&self, line: u32) -> Found {
        let first = (line % self.sets * self.ways) as usize;
        let set = &self.entries[first..first + self.ways as usize];
        match set.iter().find(|entry| is(**entry, line)) {
            Some(entry) if entry & HOST != 0 => Found::Host,
            Some(_) => Found::Device,
            None => Found::Nothing,
        }
    }

    /// A device writes: in place where the line is, else into the oldest of its own ways.
    pub fn device_write(&mut self, line: u32) -> Written {
        let ddio_ways = self.ddio_ways as usize;
        let set = self.set(line);
        let found = set.iter().position(|entry| is(*entry, line));
        if let Some(way) = found {
            set[way] = entry(line, 0);
            if way < ddio_ways {
                set[..=way].rotate_right(1);
            }
            return Written { was_hit: true, has_evicted: false };
        }
        let Some(last) = ddio_ways.checked_sub(1) else { return Written { was_hit: false, has_evicted: false } };
        let has_evicted = set[last] != EMPTY;
        set[last] = entry(line, 0);
        set[..ddio_ways].rotate_right(1);
        Written { was_hit: false, has_evicted }
    }

    /// The CPU writes: any way, oldest first.
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

    /// The CPU writes lines 0 to `lines` of an empty cache in order, but for those that later ones drive out.
    pub fn host_fill(&mut self, lines: u32) {
        // Whole rounds are left out, so that each line takes the way that it always would.
        let round = self.sets * self.ways;
        let first = (lines / round).saturating_sub(1) * round;
        (first..lines).for_each(|line| self.host_write(line));
    }

    /// A device writes lines 0 to `lines` of an empty cache in order, but for those that later ones drive out.
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
        (0..lines).filter(|line| cache.read(*line) != Found::Nothing).count() as u32
    }

    #[test]
    fn a_device_fills_its_ways_only() {
        let mut cache = Cache::new(64 * 1000, 20, 2);
        for line in 0..1000 {
            cache.device_write(line);
        }
        assert_eq!(resident(&cache, 1000), 100, "two of twenty ways");
        assert_eq!(cache.read(999), Found::Device);
        assert_eq!(cache.read(0), Found::Nothing);
    }

    #[test]
    fn filling_leaves_out_only_what_nobody_would_see() {
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
    fn the_cpu_fills_them_all_and_the_last_lines_stay() {
        let mut cache = Cache::new(64 * 1000, 20, 2);
        for line in 0..1500 {
            cache.host_write(line);
        }
        assert_eq!(resident(&cache, 1500), 1000);
        assert_eq!(cache.read(1499), Found::Host);
        assert_eq!(cache.read(499), Found::Nothing);
    }

    #[test]
    fn writes_hit_what_is_there_and_evict_what_is_old() {
        let mut cache = Cache::new(64 * 4, 4, 2);
        assert_eq!(cache.device_write(0), Written { was_hit: false, has_evicted: false });
        assert_eq!(cache.device_write(1), Written { was_hit: false, has_evicted: false });
        assert_eq!(cache.device_write(0), Written { was_hit: true, has_evicted: false });
        assert_eq!(cache.device_write(2), Written { was_hit: false, has_evicted: true });
        assert_eq!([cache.read(0), cache.read(1)], [Found::Device, Found::Nothing], "the older one went");
    }

    #[test]
    fn without_ways_of_its_own_a_device_writes_past_the_cache() {
        let mut cache = Cache::new(64 * 4, 4, 0);
        assert_eq!(cache.device_write(0), Written { was_hit: false, has_evicted: false });
        assert_eq!(cache.read(0), Found::Nothing);
    }
}
