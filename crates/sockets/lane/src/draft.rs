//! Records that are assembled in place from several pieces: a header, then bytes that lie in another window.

use crate::batch::LINE_WORDS;
use crate::producer::Cursor;
use crate::record::{HEADER_BYTES, INLINE_BYTES, SLOT_BYTES};
use crate::words::{WORD_BYTES, WORDWISE_BYTES_MAX};
use crate::{Chunk, Consumer, Corrupt, Producer};
use fabric::{Coherence, Inbound, Outbound};
use volmem::sync::Ordering;

/// A span of bytes in a window that a peer may change at any time. The bytes can only be copied.
#[derive(Debug)]
pub struct Span<'a, I> {
    inbound: &'a I,
    offset: usize,
    len_bytes: usize,
}

impl<I> Clone for Span<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for Span<'_, I> {}

impl<I: Inbound> Span<'_, I> {
    /// Returns the length of the span.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the `len_bytes` of the span from `skip_bytes` on.
    ///
    /// # Panics
    /// If the span has fewer bytes.
    pub fn part(&self, skip_bytes: usize, len_bytes: usize) -> Self {
        let fits = skip_bytes <= self.len_bytes && len_bytes <= self.len_bytes - skip_bytes;
        assert!(fits, "part {skip_bytes}+{len_bytes} of {} bytes", self.len_bytes);
        Self { inbound: self.inbound, offset: self.offset + skip_bytes, len_bytes }
    }

    /// Returns the bytes as words if they are at most [`WORDWISE_BYTES_MAX`] and start at a word boundary. The last
    /// word includes bytes behind the span.
    #[inline(always)] // Keeps the words in registers.
    fn words(&self) -> Option<[u64; WORDWISE_BYTES_MAX / WORD_BYTES]> {
        let has_any = (1..=WORDWISE_BYTES_MAX).contains(&self.len_bytes) && self.offset.is_multiple_of(WORD_BYTES);
        let word = |index: usize| match index * WORD_BYTES < self.len_bytes {
            true => self.inbound.load_u64(self.offset + index * WORD_BYTES, Ordering::Relaxed),
            false => 0,
        };
        has_any.then(|| std::array::from_fn(word))
    }

    /// Copies the first bytes of the span until `destination` is full.
    ///
    /// # Panics
    /// If the span is shorter than `destination`.
    pub fn read(&self, destination: &mut [u8]) {
        let first = self.part(0, destination.len());
        first.inbound.read(first.offset, destination);
    }
}

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Returns the bytes of a peeked chunk, to be copied elsewhere.
    ///
    /// # Panics
    /// If the chunk is not inside the window.
    pub fn span(&self, chunk: Chunk) -> Span<'_, I> {
        self.pointer(chunk);
        Span { inbound: self.inbound(), offset: chunk.offset, len_bytes: chunk.len_bytes }
    }
}

/// A record that is being assembled in the lane's ring. It is not visible before [`Draft::publish`], and never if
/// the draft is dropped.
///
/// On memory that is not coherent, a record of one line is assembled in the draft and stored as that line, so that it
/// crosses the link in one packet.
#[derive(Debug)]
pub struct Draft<'a, O, I> {
    producer: &'a mut Producer<O, I>,
    cursor: Cursor,
    start: usize,
    room_bytes: usize,
    len_bytes: usize,
    line: [u8; SLOT_BYTES],
    is_one_line: bool,
}

impl<O: Outbound, I: Inbound> Draft<'_, O, I> {
    /// Returns the number of bytes that may still be appended.
    pub fn room_bytes(&self) -> usize {
        self.room_bytes - self.len_bytes
    }

    /// Prefetches the record's lines for writing, as a hint that the draft will soon be filled. The first line is left
    /// out, because the receiver polls it until the record is published.
    #[inline]
    pub fn prefetch(&self) {
        if self.room_bytes > INLINE_BYTES {
            let rest_bytes = self.room_bytes - INLINE_BYTES;
            self.producer.outbound().prefetch_for_writes(self.start + INLINE_BYTES, rest_bytes);
        }
    }

    /// Appends bytes from the memory of this process.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn append(&mut self, bytes: &[u8]) {
        let skip_bytes = self.claim(bytes.len());
        let (at, outbound) = (self.start + skip_bytes, self.producer.outbound());
        if self.is_one_line {
            self.line[HEADER_BYTES + skip_bytes..][..bytes.len()].copy_from_slice(bytes);
        } else if bytes.len() <= WORDWISE_BYTES_MAX
            && at.is_multiple_of(WORD_BYTES)
            && outbound.coherence() == Coherence::Coherent
        {
            // SAFETY: a slice is readable for its length, which is at most `WORDWISE_BYTES_MAX`. The last word may
            // extend beyond the appended bytes, but not beyond its slot, and the rest of the slot is not written yet.
            unsafe { self.producer.copy_words(at, bytes.as_ptr(), bytes.len()) };
        } else {
            outbound.write(at, bytes);
        }
    }

    /// Appends bytes of another window with a single copy.
    ///
    /// # Panics
    /// If there is no room for them, or both windows are the same memory.
    pub fn append_span<S: Inbound>(&mut self, span: &Span<'_, S>) {
        if span.len_bytes == 0 {
            return;
        }
        let skip_bytes = self.claim(span.len_bytes);
        if self.is_one_line {
            return span.read(&mut self.line[HEADER_BYTES + skip_bytes..][..span.len_bytes]);
        }
        let at = self.start + skip_bytes;
        if let Some(words) = span.words()
            && at.is_multiple_of(WORD_BYTES)
            && self.producer.outbound().coherence() == Coherence::Coherent
        {
            // SAFETY: the words are readable, and hold the span's bytes, which are at most `WORDWISE_BYTES_MAX`. The
            // last word may extend beyond the appended bytes, but not beyond its slot, and the rest of the slot is not
            // written yet.
            return unsafe { self.producer.copy_words(at, words.as_ptr().cast(), span.len_bytes) };
        }
        let source = span.inbound.pointer(span.offset, span.len_bytes);
        if let Some(destination) = self.producer.outbound().pointer(at, span.len_bytes) {
            let apart = source.addr().get().abs_diff(destination.addr().get()) >= span.len_bytes;
            assert!(apart, "a record is copied onto itself");
        }
        // SAFETY: `pointer` has checked that the span lies in its window, so it is readable; the assertion above
        // excludes that a destination with an address overlaps it.
        unsafe { self.producer.outbound().write_from(at, source.as_ptr(), span.len_bytes) };
    }

    /// Publishes the record, and with it all records that were staged before. An empty record is dropped.
    pub fn publish(mut self) {
        if self.put_in_place() {
            self.producer.publish_staged();
        }
    }

    /// Stages the record: it becomes visible with [`Producer::publish_staged`]. An empty record is dropped.
    pub fn stage(mut self) {
        self.put_in_place();
    }

    fn put_in_place(&mut self) -> bool {
        if self.len_bytes == 0 {
            return false;
        }
        if !self.is_one_line {
            let mut head = [0; HEADER_BYTES / WORD_BYTES];
            self.producer.stage(self.cursor, &mut head, self.len_bytes, false);
            return true;
        }
        let (words, _) = self.line.as_chunks();
        let mut line: [u64; LINE_WORDS] = std::array::from_fn(|index| u64::from_ne_bytes(words[index]));
        let words = (HEADER_BYTES + self.len_bytes).div_ceil(WORD_BYTES);
        self.producer.stage(self.cursor, &mut line[..words], self.len_bytes, true);
        true
    }

    /// Reserves room for `len_bytes`; returns the number of bytes before them.
    fn claim(&mut self, len_bytes: usize) -> usize {
        assert!(len_bytes <= self.room_bytes(), "{len_bytes} bytes for a record with room for {}", self.room_bytes());
        self.len_bytes += len_bytes;
        self.len_bytes - len_bytes
    }
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Begins a record of up to `len_bytes_max` bytes. Returns `None` if there is no room now.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    #[inline]
    pub fn draft(&mut self, len_bytes_max: usize) -> Result<Option<Draft<'_, O, I>>, Corrupt> {
        let (cursor, start, room_bytes) = self.locate_record(len_bytes_max)?;
        if room_bytes == 0 {
            return Ok(None);
        }
        let is_one_line = room_bytes <= INLINE_BYTES && self.outbound().coherence() != Coherence::Coherent;
        let line = [0; SLOT_BYTES];
        Ok(Some(Draft { producer: self, cursor, start, room_bytes, len_bytes: 0, line, is_one_line }))
    }

    /// Sends as many bytes of a span as there is room for; returns their number.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    ///
    /// # Panics
    /// If both windows are the same memory.
    #[inline]
    pub fn write_span<S: Inbound>(&mut self, span: &Span<'_, S>) -> Result<usize, Corrupt> {
        let is_sent = span.len_bytes <= INLINE_BYTES && self.has_published_all() && self.write_line_of(span);
        if is_sent { Ok(span.len_bytes) } else { self.write_records_of(span) }
    }

    /// Sends a span of at most [`INLINE_BYTES`] as one line, which nearly always works for a short message. Returns
    /// `false` if nothing was sent.
    #[inline]
    fn write_line_of<S: Inbound>(&mut self, span: &Span<'_, S>) -> bool {
        if let Some(words) = span.words() {
            // SAFETY: the words are readable, and the span is at most as long: `words` returns them only for a span
            // that fits.
            return unsafe { self.write_short_from(words.as_ptr().cast(), span.len_bytes, false) };
        }
        let mut bytes = [0; INLINE_BYTES];
        span.read(&mut bytes[..span.len_bytes]);
        // SAFETY: the array is readable for its length, and the span is at most as long: it was sliced to the span's
        // length above.
        unsafe { self.write_short_from(bytes.as_ptr(), span.len_bytes, false) }
    }

    fn write_records_of<S: Inbound>(&mut self, span: &Span<'_, S>) -> Result<usize, Corrupt> {
        let mut sent_bytes = 0;
        while sent_bytes < span.len_bytes {
            let rest_bytes = span.len_bytes - sent_bytes;
            let Some(mut draft) = self.draft(rest_bytes)? else { break };
            let record_bytes = rest_bytes.min(draft.room_bytes());
            draft.append_span(&span.part(sent_bytes, record_bytes));
            draft.publish();
            sent_bytes += record_bytes;
        }
        Ok(sent_bytes)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::tests::pair;
    use crate::{Layout, Producer};
    use fabric::test_support::counting::CountingMemory;
    use fabric::{MemoryInbound, MemoryOutbound};
    use volmem::Region;

    #[test]
    fn all_lines_of_a_draft_but_the_first_are_fetched_for_writing() {
        let layout = Layout::packed(8, 0);
        let memory = || Region::heap(layout.window_bytes());
        let receivers = CountingMemory::new(memory());
        let (outbound, inbound) = (MemoryOutbound::new(receivers.clone()), MemoryInbound::new(memory()));
        let mut to = Producer::new(outbound, inbound, layout, 7);
        for (len_bytes, fetched) in [(1, 0), (48, 0), (49, 1), (200, 152)] {
            let before = receivers.counts().prefetched_bytes;
            to.draft(len_bytes).unwrap().expect("room").prefetch();
            assert_eq!(receivers.counts().prefetched_bytes - before, fetched, "{len_bytes} B");
        }
    }

    #[test]
    fn miri_a_record_of_several_pieces_is_read_as_one() {
        let (mut from, mut window) = pair(8, 0);
        let (mut to, mut read) = pair(8, 64);
        from.write(b"payload in another window").unwrap();
        let chunk = window.peek().unwrap().expect("a record");
        let mut draft = to.draft(100).unwrap().expect("room");
        assert_eq!(draft.room_bytes(), 100);
        draft.append(b"header: ");
        draft.append_span(&window.span(chunk).part(8, 17));
        assert!(!read.may_have_data());
        draft.publish();
        window.consume(chunk.len_bytes).unwrap();
        let whole = read.peek().unwrap().expect("a record");
        assert_eq!(whole.len_bytes, 25);
        let mut bytes = [0; 25];
        read.span(whole).read(&mut bytes);
        assert_eq!(&bytes, b"header: in another window");
    }

    #[test]
    fn miri_a_short_span_is_read_behind_what_was_staged_before_and_shows_it() {
        let (mut from, mut window) = pair(8, 0);
        let (mut to, mut read) = pair(8, 64);
        for len_bytes in [1, 8, 15, 16, 17, 48, 49] {
            let sent: Vec<u8> = (1..=len_bytes as u8).collect();
            from.write(&sent).unwrap();
            let chunk = window.peek().unwrap().expect("a record");
            let mut draft = to.draft(6).unwrap().expect("room");
            draft.append(b"staged");
            draft.stage();
            for _ in 0..2 {
                assert_eq!(to.write_span(&window.span(chunk)), Ok(len_bytes));
            }
            window.consume(chunk.len_bytes).unwrap();
            let mut bytes = [0; 128];
            let read_bytes = read.read(&mut bytes).unwrap();
            assert_eq!(bytes[..read_bytes], [b"staged", &sent[..], &sent[..]].concat());
        }
    }

    #[test]
    fn miri_a_record_that_is_dropped_or_empty_was_never_there() {
        let (mut to, mut read) = pair(8, 64);
        to.draft(1000).unwrap().expect("room").append(&[7; 500]);
        to.draft(1000).unwrap().expect("room").publish();
        assert!(to.is_drained() && !read.may_have_data());
        to.write(b"next").unwrap();
        let mut bytes = [0; 8];
        assert_eq!(read.read(&mut bytes), Ok(4));
        assert_eq!(&bytes[..4], b"next");
    }

    #[test]
    fn a_long_span_goes_as_far_as_there_is_room() {
        let (mut from, mut window) = pair(64, 0);
        let (mut to, mut read) = pair(8, 0);
        let long: Vec<u8> = (0..2000_u32).map(|index| index as u8).collect();
        assert_eq!(from.write(&long), Ok(2000));
        let mut got = Vec::new();
        while let Some(chunk) = window.peek().unwrap() {
            let sent = to.write_span(&window.span(chunk)).unwrap();
            assert!(sent > 0 && sent <= 8 * crate::SLOT_BYTES);
            window.consume(sent).unwrap();
            let mut bytes = [0; 512];
            let read_bytes = read.read(&mut bytes).unwrap();
            got.extend_from_slice(&bytes[..read_bytes]);
        }
        assert_eq!(got, long);
    }

    #[test]
    #[should_panic(expected = "onto itself")]
    fn a_record_is_not_copied_onto_itself() {
        let (mut to, mut read) = pair(8, 0);
        to.write(&[1; 500]).unwrap();
        let chunk = read.peek().unwrap().expect("a record");
        read.consume(chunk.len_bytes).unwrap();
        to.write_span(&read.span(crate::Chunk { offset: 528, len_bytes: 400 })).unwrap();
    }
}
