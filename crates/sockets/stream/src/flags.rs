//! The `MSG_` flags of a call.

/// The `MSG_` flags of a call that have a meaning for bytes in a lane.
///
/// One word, and not a value for each: it passes through the path of short messages in a register.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessageFlags(i32);

const OUT_OF_STREAM: i32 = libc::MSG_OOB | libc::MSG_ERRQUEUE;
/// No flag of the kernel's: the call is the kernel's.
const KERNEL_ONLY: i32 = 1 << 30;
/// Those with which a call does not just move the bytes of the stream.
const NOT_SIMPLE: i32 = libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_TRUNC | OUT_OF_STREAM | KERNEL_ONLY;
const KNOWN: i32 = NOT_SIMPLE | libc::MSG_DONTWAIT;

impl MessageFlags {
    /// `MSG_PEEK`.
    pub const PEEK: Self = Self(libc::MSG_PEEK);
    /// `MSG_DONTWAIT`.
    pub const DONT_WAIT: Self = Self(libc::MSG_DONTWAIT);

    /// Returns the flags of a C call. Those without meaning for a stream are ignored, as TCP does. `MSG_MORE` is a hint
    /// about packets, which a lane does not have.
    #[inline(always)]
    pub fn from_bits(bits: i32) -> Self {
        Self(bits & KNOWN & !KERNEL_ONLY)
    }

    /// Returns the flags of a call that is the kernel's.
    #[must_use]
    pub fn of_kernel(self) -> Self {
        Self(self.0 | KERNEL_ONLY)
    }

    /// Returns whether a call moves bytes of the stream, as many as there are.
    #[inline(always)]
    pub fn is_simple(self) -> bool {
        self.0 & NOT_SIMPLE == 0
    }

    /// `MSG_DONTWAIT`.
    pub fn dont_wait(self) -> bool {
        self.0 & libc::MSG_DONTWAIT != 0
    }

    /// `MSG_PEEK`.
    pub fn peek(self) -> bool {
        self.0 & libc::MSG_PEEK != 0
    }

    /// `MSG_WAITALL`.
    pub fn wait_all(self) -> bool {
        self.0 & libc::MSG_WAITALL != 0
    }

    /// `MSG_TRUNC`: count the bytes, do not copy them.
    pub fn discard(self) -> bool {
        self.0 & libc::MSG_TRUNC != 0
    }

    /// The call is about data outside the stream (`MSG_OOB`, `MSG_ERRQUEUE`).
    pub fn out_of_stream(self) -> bool {
        self.0 & OUT_OF_STREAM != 0
    }

    /// The call is the kernel's.
    pub fn kernel_only(self) -> bool {
        self.0 & KERNEL_ONLY != 0
    }
}
