/* Lanes for C: a two-way byte stream between two processes of one machine, through shared memory, without copies if
 * you like.
 *
 * A pair is a memfd. Create it, hand the descriptor to the other process (fork, or SCM_RIGHTS over a UNIX socket),
 * and let each process attach one side, 0 or 1. What one side writes the other reads, in order; each direction ends
 * on its own.
 *
 * Shapes and units. Lengths are bytes, times milliseconds. Bytes travel in records of at most
 * CROSSLANE_LANE_RECORD_BYTES_MAX in contiguous memory: that is the most that one reserve or peek can show.
 *
 * Errors. Functions answer a negative errno and touch nothing then:
 *   -EINVAL     an argument is wrong: NULL, a length or a side out of range, more than was reserved or peeked
 *   -EAGAIN     nothing to read, or no room, now: wait
 *   -EPIPE      written after crosslane_lane_finish
 *   -EPROTO     the peer, or the segment it made, breaks the protocol: close the lane; what was read before is good
 * and what the kernel says of a descriptor or of memory (-EBADF, -EMFILE, -ENOMEM, ...). None of them sets errno.
 *
 * Trust. Neither side can make the other's calls crash, hang or touch memory outside the pair, whatever it writes
 * there. It can change bytes while they are peeked: copy first, then check, when the peer is not trusted. Nothing
 * here notices that the peer has died; the descriptor you met by (a socket, a pidfd) does.
 *
 * Threads. One thread at a time may call what writes (write, reserve, commit, finish, and everything with
 * CROSSLANE_LANE_OUT), one what reads (read, peek, consume, unread, and everything with CROSSLANE_LANE_IN); the two
 * may be different threads. Close when nobody else calls. One process attaches a side; after fork, either parent or
 * child goes on with a handle.
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

/* Bytes of each direction's ring, at least and at most. */
#define CROSSLANE_LANE_RING_BYTES_MIN 512
#define CROSSLANE_LANE_RING_BYTES_MAX 1073741824

/* Directions, as bits: reading and writing. */
#define CROSSLANE_LANE_IN 1
#define CROSSLANE_LANE_OUT 2

/* One side of a pair, attached. */
typedef struct crosslane_lane crosslane_lane;

/* Makes a pair with a ring of ring_bytes each way, a power of two. Memory is taken as it is touched; a pair that has
 * carried only small messages touches 4 KiB of each ring. Answers the descriptor of a sealed memfd, close-on-exec;
 * close(2) it when both sides are attached. */
int crosslane_lane_create(size_t ring_bytes);

/* Maps the pair behind memfd and stores a handle of its side (0 or 1) in *lane. The descriptor stays yours. */
int crosslane_lane_attach(int memfd, int side, crosslane_lane **lane);

/* Unmaps and frees; pointers from reserve and peek are void. The peer notices nothing: finish first. */
int crosslane_lane_close(crosslane_lane *lane);

/* Copies up to len bytes into the lane. Answers how many, at least 1 (0 only for a len of 0). */
ssize_t crosslane_lane_write(crosslane_lane *lane, const void *bytes, size_t len);

/* Copies up to len bytes (at least 1) out of the lane. Answers how many; 0 is the end: the peer has finished. */
ssize_t crosslane_lane_read(crosslane_lane *lane, void *bytes, size_t len);

/* Writing in place: stores in *at where up to len_max bytes (at least 1) may be written, and answers how many, which
 * may be fewer. Write only: nothing can be read back. Lasts until the next write, reserve or commit. */
ssize_t crosslane_lane_reserve(crosslane_lane *lane, size_t len_max, void **at);

/* Sends the first len bytes of what was reserved; 0 gives it up. Answers 0. */
int crosslane_lane_commit(crosslane_lane *lane, size_t len);

/* Reading in place: stores in *at where the next unread bytes are, and answers how many; 0 is the end. They stay
 * until consumed. */
ssize_t crosslane_lane_peek(crosslane_lane *lane, const void **at);

/* Gives back the first len bytes of what was peeked and not yet consumed. Answers 0. */
int crosslane_lane_consume(crosslane_lane *lane, size_t len);

/* Unread bytes in the lane now. */
ssize_t crosslane_lane_unread(crosslane_lane *lane);

/* Says that nothing follows: the peer reads what is left, then 0. Answers 0, also when it was said before. */
int crosslane_lane_finish(crosslane_lane *lane);

/* Which of events hold now: CROSSLANE_LANE_IN, there are bytes or the end; CROSSLANE_LANE_OUT, a quarter of the ring
 * is free. */
int crosslane_lane_ready(crosslane_lane *lane, int events);

/* Waits until one of events holds, for timeout_ms (-1: for ever), and answers which; 0 is a timeout. Spins a moment,
 * then yields, then looks now and again, about a thousand times a second. To sleep properly, bring a doorbell (an
 * eventfd, a socket) and use the three functions below. */
int crosslane_lane_wait(crosslane_lane *lane, int events, int timeout_ms);

/* Asks the peer to ring when one of events may hold. Then look once more (crosslane_lane_ready), and sleep on your
 * doorbell only if nothing holds; else take it back with crosslane_lane_cancel_sleep. The doorbell must remember a
 * ring that comes before the wait, as an eventfd does. A ring answers one announcement: announce again before each
 * sleep. Answer 0. */
int crosslane_lane_announce_sleep(crosslane_lane *lane, int events);
int crosslane_lane_cancel_sleep(crosslane_lane *lane, int events);

/* What to call after writing (CROSSLANE_LANE_OUT: write, commit, finish) and after reading (CROSSLANE_LANE_IN: read,
 * consume): answers 1 if the peer has announced that it sleeps for that, and you must ring it now; else 0. */
int crosslane_lane_take_wake_request(crosslane_lane *lane, int events);

#ifdef __cplusplus
}
#endif

#endif
