/* Lanes for C: a bidirectional byte stream between two processes of one machine through shared memory, optionally
 * without copies.
 *
 * A pair is a memfd. Create it, pass the descriptor to the other process (with fork, or with SCM_RIGHTS over a UNIX
 * socket), and let each process attach one side, 0 or 1. Each side reads the bytes that the other writes, in order.
 * Each direction ends independently.
 *
 * Units and limits. Lengths are in bytes, times in milliseconds. Bytes travel in records of at most
 * CROSSLANE_LANE_RECORD_BYTES_MAX in contiguous memory, which is the maximum that one reserve or peek returns. Buffers
 * that are passed to write or read must lie outside the pair's memory.
 *
 * Errors. On failure a function returns a negative errno and changes nothing:
 *   -EINVAL     an argument is invalid: NULL, a length or a side out of range, more than was reserved or peeked
 *   -EAGAIN     nothing to read, or no room, now: wait
 *   -EPIPE      a write after crosslane_lane_finish
 *   -EPROTO     the peer, or the segment it made, violates the protocol: close the lane; bytes read before are valid
 * or the errno that the kernel returned for a descriptor or for memory (-EBADF, -EMFILE, -ENOMEM, ...). No function
 * sets errno.
 *
 * Trust. Whatever one side writes to the pair's memory, it cannot make calls of the other side crash, hang or access
 * memory outside the pair. It can change bytes while they are peeked: if the peer is not trusted, copy first, then
 * check. These functions do not detect the death of the peer; use the descriptor of the rendezvous (a socket) or a
 * pidfd for that.
 *
 * Threads. At any time one thread may be in a writing call (write, reserve, commit, finish, and every function with
 * CROSSLANE_LANE_OUT), and one in a reading call (read, peek, consume, unread, and every function with
 * CROSSLANE_LANE_IN); they may be different threads. Close a handle only when no other thread is in a call. One
 * process attaches a side; after fork, either the parent or the child may continue to use a handle.
 *
 * Link with -lcrosslane_lane, or with libcrosslane_lane.a and -lgcc_s -lm. */
#ifndef CROSSLANE_LANE_H
#define CROSSLANE_LANE_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of the longest record. */
#define CROSSLANE_LANE_RECORD_BYTES_MAX 16368

/* Minimum and maximum bytes of each direction's ring. */
#define CROSSLANE_LANE_RING_BYTES_MIN 512
#define CROSSLANE_LANE_RING_BYTES_MAX 1073741824

/* Directions, as bits of an event mask: reading and writing. */
#define CROSSLANE_LANE_IN 1
#define CROSSLANE_LANE_OUT 2

/* An attached side of a pair. */
typedef struct crosslane_lane crosslane_lane;

/* Creates a pair with a ring of ring_bytes, a power of two, in each direction. Memory is allocated when it is first
 * touched; a pair that has carried only small messages touches 4 KiB of each ring. Returns the descriptor of a sealed,
 * close-on-exec memfd; close(2) it when both sides are attached. */
int crosslane_lane_create(size_t ring_bytes);

/* Maps the pair of memfd and stores a handle of its side (0 or 1) in *lane. The caller still owns the descriptor.
 * Returns 0. */
int crosslane_lane_attach(int memfd, int side, crosslane_lane **lane);

/* Unmaps the pair and frees the handle; pointers from reserve and peek become invalid. The peer is not notified: call
 * crosslane_lane_finish first. Returns 0. */
int crosslane_lane_close(crosslane_lane *lane);

/* Copies up to len bytes into the lane. Returns their number, at least 1 (0 only for a len of 0). */
ssize_t crosslane_lane_write(crosslane_lane *lane, const void *bytes, size_t len);

/* Copies up to len bytes (at least 1) out of the lane. Returns their number; 0 is the end of the stream. */
ssize_t crosslane_lane_read(crosslane_lane *lane, void *bytes, size_t len);

/* Writing in place: stores in *at the address at which up to len_max bytes (at least 1) may be written, and returns how
 * many, which may be fewer. The memory must only be written. The reservation lasts until the next write, reserve or
 * commit. */
ssize_t crosslane_lane_reserve(crosslane_lane *lane, size_t len_max, void **at);

/* Sends the first len bytes of the reservation; a len of 0 cancels it. Returns 0. */
int crosslane_lane_commit(crosslane_lane *lane, size_t len);

/* Reading in place: stores in *at the address of the next unread bytes, and returns their number; 0 is the end of the
 * stream. The bytes stay there until they are consumed. */
ssize_t crosslane_lane_peek(crosslane_lane *lane, const void **at);

/* Consumes the first len bytes that were peeked and are not yet consumed. Returns 0. */
int crosslane_lane_consume(crosslane_lane *lane, size_t len);

/* Returns the number of unread bytes in the lane now. */
ssize_t crosslane_lane_unread(crosslane_lane *lane);

/* Ends the stream: the peer reads the remaining bytes, then 0. Idempotent. Returns 0. */
int crosslane_lane_finish(crosslane_lane *lane);

/* Returns which of events are ready now. CROSSLANE_LANE_IN: there are unread bytes or the end of the stream;
 * CROSSLANE_LANE_OUT: a quarter of the ring is free. */
int crosslane_lane_ready(crosslane_lane *lane, int events);

/* Waits until one of events is ready, for at most timeout_ms (-1: without limit), and returns which; 0 is a timeout.
 * Spins briefly, then yields, then polls about a thousand times a second. To block in the kernel instead, use a
 * doorbell of your own (an eventfd, a socket) and the three functions below. */
int crosslane_lane_wait(crosslane_lane *lane, int events, int timeout_ms);

/* Asks the peer to ring the doorbell once one of events may be ready. Afterwards poll once more
 * (crosslane_lane_ready), and block on the doorbell only if nothing is ready; otherwise call
 * crosslane_lane_cancel_sleep. The doorbell must remember a ring that precedes the wait, as an eventfd does. The peer
 * rings once per announcement: announce again before each wait. Both functions return 0. */
int crosslane_lane_announce_sleep(crosslane_lane *lane, int events);
int crosslane_lane_cancel_sleep(crosslane_lane *lane, int events);

/* To be called after writing (CROSSLANE_LANE_OUT: write, commit, finish) and after reading (CROSSLANE_LANE_IN: read,
 * consume). Returns 1 if the peer has announced that it sleeps for that event: ring its doorbell now. Otherwise
 * returns 0. */
int crosslane_lane_take_wake_request(crosslane_lane *lane, int events);

#ifdef __cplusplus
}
#endif

#endif
