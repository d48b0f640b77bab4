//! The `MSG_` flags of a call.

/// The `MSG_` flags of a call that have a meaning for bytes in a lane.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessageFlags {
    /// `MSG_DONTWAIT`.
    pub dont_wait: bool,
    /// `MSG_PEEK`.
    pub peek: bool,
    /// `MSG_WAITALL`.
    pub wait_all: bool,
    /// `MSG_TRUNC`: count the bytes, do not copy them.
    pub discard: bool,
    /// The call is about data outside the stream (`MSG_OOB`, `MSG_ERRQUEUE`).
    pub out_of_stream: bool,
    /// The call is the kernel's.
    pub kernel_only: bool,
}

impl MessageFlags {
    /// Returns whether a call moves bytes of the stream, as many as there are.
    #[inline]
    pub fn is_simple(self) -> bool {
        !(self.peek | self.wait_all | self.discard | self.out_of_stream | self.kernel_only)
    }

    /// Returns the flags of a C call. Those without meaning for a stream are ignored, as TCP does. `MSG_MORE` is a hint
    /// about packets, which a lane does not have.
    #[inline]
    pub fn from_bits(bits: i32) -> Self {
        Self {
            dont_wait: bits & libc::MSG_DONTWAIT != 0,
            peek: bits & libc::MSG_PEEK != 0,
            wait_all: bits & libc::MSG_WAITALL != 0,
            discard: bits & libc::MSG_TRUNC != 0,
            out_of_stream: bits & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0,
            kernel_only: false,
        }
    }
}
