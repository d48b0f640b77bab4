//! Runs a test: the device issues requests, the link carries them, the host completes them.
//!
//! Every resource between the device and the host's queue serves in order, so the path of a request to the host is
//! computed when it is issued. Completions arrive out of order and are the events. A tag that becomes free issues the
//! next request, but never before the event that freed it, so that time never goes backwards.

use std::collections::VecDeque;

use sim::{EventQueue, Random, Span, Time};

use super::cache::Cache;
use super::credits::CreditPool;
use super::device_tlb::DeviceTlb;
use super::iommu::Iommu;
use super::line_rate::LineRate;
use super::memory::Memory;
use super::packets;
use super::parameters::Parameters;
use super::root_complex::{Extent, LineBounds, ReadPlan, RootComplex};
use super::tails::Tail;
use super::wire::Wire;
use super::{HostError, Interface, Summary};
use crate::test::{Cache as CacheState, Iommu as Translation, Kind, LINE_BYTES, Numa, Order, Test};

/// Bits of the offset in a page of 4 KB and of 2 MB.
const PAGE_SHIFT_4K: u32 = 12;
const PAGE_SHIFT_2M: u32 = 21;
/// Idle time of the device between two latencies, with a random addition of up to the same length, so that the samples
/// do not beat with the timer or with the host's refresh.
const REST_NS: f64 = 1000.0;
/// Latest time at which a transfer begins: half of the range of [`Time`], of which the requests in flight need the rest
/// at most.
const BEGIN_MAX: Time = Time::from_ps(1 << 63);

/// A read request that is not complete.
#[derive(Clone, Copy, Debug, Default)]
struct Read {
    plan: ReadPlan,
    /// Address of the first byte, of the first byte of the next completion, and of the end.
    begin: u64,
    next: u64,
    end: u64,
    is_combined: bool,
}

/// Event: the data of the next completion for the read with this tag is available.
#[derive(Clone, Copy, Debug)]
struct CompletionReady {
    tag: u16,
}

/// A run in progress.
pub struct Run<'a> {
    parameters: &'a Parameters,
    test: &'a Test,
    interface: Interface,
    up: Wire,
    down: Wire,
    posted: CreditPool,
    non_posted: CreditPool,
    completion: CreditPool,
    update: Span,
    host: RootComplex,
    queue: EventQueue<CompletionReady>,
    reads: Vec<Read>,
    /// Free tags with the times from which they are free.
    tags: VecDeque<(Time, u16)>,
    addresses: AddressGenerator,
    device_tlb: Option<DeviceTlb>,
    /// Transfers of a bandwidth test whose addresses are not drawn yet.
    undrawn: u64,
    random: Random,
    last_arrived: Time,
    engine: EngineState,
}

/// The times from which the device's engines are free.
#[derive(Clone, Debug, Default)]
struct EngineState {
    read: Time,
    write: Time,
    bus: Time,
    issued: Time,
}

/// Generates the addresses of transfers.
#[derive(Clone, Debug)]
struct AddressGenerator {
    random: Random,
    units: u64,
    next: u64,
    order: Order,
}

impl AddressGenerator {
    /// Returns the address of the next transfer. As in the published firmware, a random order draws a unit for each
    /// transfer, possibly the same one twice in a row.
    fn draw(&mut self, test: &Test) -> u64 {
        let unit = match self.order {
            Order::Random => self.random.below(self.units),
            Order::Sequential => {
                let unit = self.next;
                self.next = (unit + 1) % self.units;
                unit
            }
        };
        test.address_of(unit)
    }
}

/// Returns the bits of the offset in a page of the IOMMU, if it translates addresses.
fn page_shift(test: &Test) -> Option<u32> {
    match test.iommu {
        Translation::Off => None,
        Translation::Pages4K => Some(PAGE_SHIFT_4K),
        Translation::Pages2M => Some(PAGE_SHIFT_2M),
    }
}

fn host(parameters: &Parameters, test: &Test, has_ats: bool) -> RootComplex {
    let random = |component| Random::new(test.seed, component);
    let iommu = page_shift(test).map(|shift| Iommu::new(&parameters.iommu, shift, test.window_bytes, random("iommu")));
    let (hop_ns, conflict_ns, link_gbps) = match test.numa {
        Numa::Local => (0.0, parameters.root_complex.conflict_ns, None),
        Numa::Remote => (parameters.numa.hop_ns, parameters.numa.conflict_ns, parameters.numa.link_gbps),
    };
    let strict_gbps = parameters.root_complex.strict_write_gbps.filter(|_| !parameters.device.relaxed_ordering);
    let bounds =
        LineBounds { strict_writes: strict_gbps.map(LineRate::new), socket_link: link_gbps.map(LineRate::new) };
    let memory = Memory::new(&parameters.memory, hop_ns, random("memory"));
    let (cache, tail) = (warmed_cache(parameters, test), parameters.tails.as_ref().map(Tail::new));
    let (iommu, memory) = ((iommu, has_ats), (cache, memory, bounds));
    let random = random("root complex");
    RootComplex::new(&parameters.root_complex, &parameters.cache, iommu, memory, (tail, conflict_ns), random)
}

/// Returns the cache of the device's socket in the state that the test requires. Lines that the CPU of another socket
/// wrote are in the cache of that socket; the published figures show no difference between that cache and the memory
/// there.
fn warmed_cache(parameters: &Parameters, test: &Test) -> Cache {
    let bytes = (parameters.cache.mib * f64::from(1 << 20)) as u64;
    let mut cache = Cache::new(bytes, parameters.cache.ways, parameters.cache.ddio_ways);
    let lines = (test.window_bytes / LINE_BYTES) as u32;
    match (test.cache, test.numa) {
        (CacheState::HostWarm, Numa::Local) => cache.host_fill(lines),
        (CacheState::DeviceWarm, _) => cache.device_fill(lines),
        (CacheState::Cold, _) | (CacheState::HostWarm, Numa::Remote) => {}
    }
    cache
}

impl<'a> Run<'a> {
    /// Prepares a run.
    pub fn new(parameters: &'a Parameters, test: &'a Test, interface: Interface) -> Self {
        let (link, wire, credits) = (&parameters.link, &parameters.wire, &parameters.credits);
        let random = |component| Random::new(test.seed, component);
        let addresses =
            AddressGenerator { random: random("addresses"), units: test.units(), next: 0, order: test.order };
        let device_tlb = page_shift(test)
            .and_then(|shift| DeviceTlb::new(&parameters.device, shift, test.window_bytes, random("device TLB")));
        Self {
            parameters,
            test,
            interface,
            up: Wire::new(link, wire, wire.up_dllp_share, random("link up")),
            down: Wire::new(link, wire, wire.down_dllp_share, random("link down")),
            posted: CreditPool::new(credits.posted()),
            non_posted: CreditPool::new(credits.non_posted()),
            completion: CreditPool::new(credits.completion()),
            update: Span::from_ns(credits.update_ns),
            host: host(parameters, test, device_tlb.is_some()),
            queue: EventQueue::new(),
            reads: vec![Read::default(); parameters.device.tags as usize],
            tags: (0..parameters.device.tags as u16).map(|tag| (Time::ZERO, tag)).collect(),
            addresses,
            device_tlb,
            undrawn: test.samples * if test.test == Kind::BwRdwr { 2 } else { 1 },
            random: random("device"),
            last_arrived: Time::ZERO,
            engine: EngineState::default(),
        }
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// Virtual time does not suffice for all samples.
    pub fn run(mut self, sink: &mut dyn FnMut(f64)) -> Result<Summary, HostError> {
        let elapsed = if self.test.test.is_latency() { self.latencies(sink)? } else { self.bandwidth()? };
        let (misses, lookups) = self.host.iommu.as_ref().map_or((0, 0), |iommu| (iommu.misses, iommu.lookups));
        Ok(Summary {
            transfers: self.test.samples,
            size_bytes: self.test.size_bytes,
            elapsed_ns: elapsed.ns(),
            tlps: self.up.packets + self.down.packets,
            replays: self.up.replays + self.down.replays,
            iotlb_misses: misses,
            iotlb_lookups: lookups,
        })
    }

    /// Returns an error if virtual time has come so far that it might not suffice for another transfer.
    fn check_time(&self, at: Time, transfers: u64) -> Result<(), HostError> {
        if at > BEGIN_MAX { Err(HostError::TooLong { transfers, samples: self.test.samples }) } else { Ok(()) }
    }

    // --- latencies: one transfer at a time -------------------------------------------------------------------------

    fn latencies(&mut self, sink: &mut dyn FnMut(f64)) -> Result<Span, HostError> {
        let step_ns = self.parameters.device.timer_step_ns;
        let steps_at = |time: Time| (time.since(Time::ZERO).ns() / step_ns).floor();
        let rest = Span::from_ns(REST_NS);
        let mut begun = Time::ZERO;
        for index in 0..self.test.samples {
            self.check_time(begun, index)?;
            let address = self.addresses.draw(self.test);
            let done = self.latency(begun, address);
            sink((steps_at(done) - steps_at(begun)) * step_ns);
            begun = done + rest + Span::from_ps(self.random.below(rest.ps()));
        }
        Ok(begun.since(Time::ZERO))
    }

    /// Returns the time at which the program detects the completion of the transfer that begins at `begun`.
    fn latency(&mut self, begun: Time, address: u64) -> Time {
        let mut read_at = self.translated_at(begun, address);
        if self.test.test == Kind::LatWrrd {
            read_at = self.send_write(read_at, address) + self.write_done();
        }
        let interval = Span::from_ns(self.parameters.device.read_interval_ns);
        let end = address + u64::from(self.test.size_bytes);
        let mut next = address;
        while next < end {
            let Some(free) = self.tag_free() else {
                self.step();
                continue;
            };
            next = self.send_read(read_at.max(free), next, end);
            read_at += interval;
        }
        while self.step() {}
        self.last_arrived + self.read_done()
    }

    /// Returns the time from the last packet of a write to the read that follows.
    fn write_done(&self) -> Span {
        let device = &self.parameters.device;
        match self.interface {
            Interface::Command => Span::from_ns(device.command_write_ns),
            Interface::Dma => {
                let bytes = self.test.size_bytes;
                let bursts_more = bytes.div_ceil(device.write_burst_bytes) - 1;
                let bursts_ns = device.write_burst_ns * f64::from(bursts_more);
                Span::from_ns(device.write_done_ns + device.write_byte_ns * f64::from(bytes) + bursts_ns)
            }
        }
    }

    /// Returns the time from the last completion of a read until the program detects it.
    fn read_done(&self) -> Span {
        let device = &self.parameters.device;
        let bytes_ns = device.receive_byte_ns * f64::from(self.test.size_bytes);
        let split_ns = if u64::from(self.test.size_bytes) > LINE_BYTES { device.split_ns } else { 0.0 };
        Span::from_ns(match self.interface {
            Interface::Command => device.command_done_ns + bytes_ns,
            Interface::Dma => device.tag_ns + device.dma_done_ns + bytes_ns + split_ns,
        })
    }

    // --- bandwidth: as much as tags, engines and credits allow -----------------------------------------------------

    fn bandwidth(&mut self) -> Result<Span, HostError> {
        let (reads, writes) = match self.test.test {
            Kind::BwWr => (false, true),
            Kind::BwRdwr => (true, true),
            _ => (true, false),
        };
        let mut last_written = Time::ZERO;
        for index in 0..self.test.samples {
            self.check_time(self.engine.issued.max(last_written), index)?;
            if reads {
                self.issue_read();
            }
            if writes {
                last_written = self.issue_write();
            }
        }
        while self.step() {}
        // A written packet may still be on its way to the wire, or its lines between sockets.
        let last = self.last_arrived.max(last_written).max(self.up.free_at()).max(self.host.lines_done());
        Ok(last.since(Time::ZERO))
    }

    /// Reserves the engines for one transfer: that of its own direction, free from `own`, and the bus.
    fn issue(&mut self, own: Time) -> Time {
        let device = &self.parameters.device;
        let bus_ns = device.bus_transfer_ns + f64::from(self.test.size_bytes) * 8.0 / device.bus_gbps;
        let at = own.max(self.engine.bus).max(self.engine.issued);
        self.engine.bus = at + Span::from_ns(bus_ns);
        self.engine.issued = at;
        at
    }

    /// Returns the address of the next transfer, and the time from which the device knows its translation.
    fn next_transfer(&mut self) -> (u64, Time) {
        while self.undrawn > 0 && self.device_tlb.as_ref().is_some_and(DeviceTlb::has_room_ahead) {
            self.undrawn -= 1;
            let address = self.addresses.draw(self.test);
            let translated = self.translated_at(self.engine.issued, address);
            if let Some(tlb) = &mut self.device_tlb {
                tlb.push_ahead(address, translated);
            }
        }
        let ahead = self.device_tlb.as_mut().and_then(DeviceTlb::pop_ahead);
        ahead.unwrap_or_else(|| (self.addresses.draw(self.test), Time::ZERO))
    }

    /// Returns the time, not before `at`, from which the device may use `address`. A device with a TLB requests a
    /// translation that it lacks; any other leaves translation to the host.
    fn translated_at(&mut self, at: Time, address: u64) -> Time {
        let Some(tlb) = &mut self.device_tlb else { return at };
        if let Some(known) = tlb.lookup(address) {
            return known.max(at);
        }
        let link = &self.parameters.link;
        let request = packets::translation_request(link, address);
        let spent = self.non_posted.consume(at, request.credits());
        let transmission = self.up.send(spent, &request);
        let translated = self.host.translate(transmission.arrived, address);
        self.non_posted.schedule_return(translated + self.update, request.credits());
        let known = self.down.send_between(translated, &packets::translation_completion(link, address));
        tlb.insert(address, known);
        known
    }

    fn issue_read(&mut self) {
        let (address, translated) = self.next_transfer();
        let end = address + u64::from(self.test.size_bytes);
        let first_free = self.wait_for_tag();
        let mut at = self.issue(self.engine.read.max(first_free).max(translated));
        self.engine.read = at + Span::from_ns(self.parameters.device.read_interval_ns);
        let mut next = address;
        while next < end {
            at = at.max(self.wait_for_tag());
            next = self.send_read(at, next, end);
        }
        self.engine.issued = at;
    }

    fn issue_write(&mut self) -> Time {
        let (address, translated) = self.next_transfer();
        let at = self.issue(self.engine.write.max(translated));
        let left = self.send_write(at, address);
        let device = &self.parameters.device;
        let next = left + Span::from_ns(device.write_gap_ns);
        self.engine.write = next.max(at + Span::from_ns(device.write_interval_ns));
        left
    }

    // --- packets ---------------------------------------------------------------------------------------------------

    /// Returns the time from which the next tag is free, if the event that frees it has happened.
    fn tag_free(&self) -> Option<Time> {
        self.tags.front().map(|(free, _)| *free)
    }

    /// Processes events until a tag is free.
    fn wait_for_tag(&mut self) -> Time {
        loop {
            if let Some(free) = self.tag_free() {
                return free;
            }
            assert!(self.step(), "all tags are in use and no read is in flight");
        }
    }

    /// Sends the packets of a write and returns the time at which the last one left.
    fn send_write(&mut self, at: Time, address: u64) -> Time {
        let link = &self.parameters.link;
        let gap = Span::from_ns(self.parameters.device.packet_gap_ns);
        let mps = link.mps_bytes.bytes();
        let mut ready = at;
        let mut left = at;
        let mut done_bytes = 0;
        while done_bytes < self.test.size_bytes {
            let extent =
                Extent { address: address + u64::from(done_bytes), bytes: mps.min(self.test.size_bytes - done_bytes) };
            let packet = packets::write(link, extent.address, extent.bytes);
            let spent = self.posted.consume(ready, packet.credits());
            let transmission = self.up.send(spent, &packet);
            let done = self.host.write(transmission.arrived, extent);
            self.posted.schedule_return(done + self.update, packet.credits());
            left = transmission.left;
            ready = left + gap;
            done_bytes += extent.bytes;
        }
        left
    }

    /// Sends the request for as much of `begin..end` as MRRS permits, with the next tag, and returns where the next
    /// request begins.
    fn send_read(&mut self, at: Time, begin: u64, end: u64) -> u64 {
        let Some((_, tag)) = self.tags.pop_front() else { unreachable!("the caller waited for a tag") };
        let link = &self.parameters.link;
        let end = end.min(begin + u64::from(link.mrrs_bytes.bytes()));
        let extent = Extent { address: begin, bytes: (end - begin) as u32 };
        let packet = packets::read(link, begin, extent.bytes, tag);
        let spent = self.non_posted.consume(at, packet.credits());
        let transmission = self.up.send(spent, &packet);
        let plan = self.host.read(transmission.arrived, extent, self.interface == Interface::Dma);
        self.non_posted.schedule_return(plan.dequeued + self.update, packet.credits());
        let is_combined = extent.bytes >= self.parameters.root_complex.combine_from_bytes;
        let read = Read { plan, begin, next: begin, end, is_combined };
        self.reads[usize::from(tag)] = read;
        self.queue.schedule(read.ready(self.rcb_end(&read)), CompletionReady { tag });
        end
    }

    /// Returns the end of the smallest completion that may be sent next.
    fn rcb_end(&self, read: &Read) -> u64 {
        let rcb = u64::from(self.parameters.link.rcb_bytes.bytes());
        ((read.next / rcb + 1) * rcb).min(read.end)
    }

    /// Processes the next event; returns whether there was one.
    fn step(&mut self) -> bool {
        let Some((at, &CompletionReady { tag })) = self.queue.peek() else { return false };
        let mut read = self.reads[usize::from(tag)];
        let end = self.completion_end(&read, at.max(self.down.free_at()));
        let link = &self.parameters.link;
        let (bytes, remaining) = ((end - read.next) as u32, (read.end - read.next) as u32);
        let packet = packets::completion(link, read.next, bytes, remaining, tag);
        let spent = self.completion.consume(at, packet.credits());
        let transmission = self.down.send(spent, &packet);
        self.completion.schedule_return(transmission.arrived + self.update, packet.credits());
        read.next = end;
        if read.next == read.end {
            self.queue.next_event();
            self.last_arrived = transmission.arrived;
            let free = transmission.arrived + Span::from_ns(self.parameters.device.tag_ns);
            self.tags.push_back((free, tag));
        } else {
            self.queue.replace_next(read.ready(self.rcb_end(&read)).max(at), CompletionReady { tag });
        }
        self.reads[usize::from(tag)] = read;
        true
    }

    /// Returns the end of the completion that leaves at `leaves`. It includes further lines that are available by then,
    /// if lines may share a completion.
    fn completion_end(&self, read: &Read, leaves: Time) -> u64 {
        let mut end = self.rcb_end(read);
        let mps = u64::from(self.parameters.link.mps_bytes.bytes());
        while read.is_combined && end < read.end && !end.is_multiple_of(mps) {
            let longer = self.rcb_end(&Read { next: end, ..*read });
            if read.ready(longer) > leaves {
                break;
            }
            end = longer;
        }
        end
    }
}

impl Read {
    /// Returns the time at which all data before `end` is available.
    fn ready(&self, end: u64) -> Time {
        self.plan.ready(((end - 1) / LINE_BYTES - self.begin / LINE_BYTES) as u32)
    }
}
