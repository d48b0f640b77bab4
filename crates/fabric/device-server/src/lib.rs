//! The server behind an ivshmem device: one memory, and doorbells between everybody who is connected.
//!
//! It speaks the protocol of QEMU's `ivshmem-doorbell` device ("Inter-VM Shared Memory device", QEMU's
//! `docs/specs/ivshmem-spec`), over a unix socket, and says all there is to say; clients only listen:
//!
//! | message (8 bytes, little endian) | descriptor | when |
//! |---|---|---|
//! | 0, the protocol's version | - | first |
//! | the client's own id, 0 to 65535 | - | second |
//! | -1 | the memory | third |
//! | another client's id, once a vector | an eventfd that rings it | for each that is there, then for each that comes |
//! | the client's own id, once a vector | an eventfd that rings it | after those that were there |
//! | another client's id | - | that one has gone |
//!
//! Virtual machines and processes of the host are clients alike, so the host can be one more node beside its guests.
//!
//! - **The memory** is a memfd of fixed size: sealed, and there to its last page, so that no client can pull it from
//!   under another one's mapping.
//! - **An id** is the smallest that was not given since somebody is there: nobody ever takes a new client for an old
//!   one, and QEMU's device, which cannot bear an id that comes again, never sees one.
//! - **A client that does not read** fills its own queue, and is dropped when that is full. Others never wait for it.
//! - **A client that dies** is seen at once: the kernel closes its socket.
//! - **The socket** belongs to the user alone (mode 0600), in a directory that nobody else can write. A socket that a
//!   killed server left is replaced, a server that lives is not. Whoever connects all the same is asked for its user.
//!
//! Everything runs in one thread, which sleeps unless somebody comes or goes.

mod clients;
mod error;
mod limits;
mod memory;
mod message;
mod options;
mod outbox;
mod place;
mod server;

pub use clients::CLIENTS_MAX;
pub use error::Error;
pub use memory::{available_bytes, create as create_memory};
pub use options::{Options, SIZE_BYTES_MIN, VECTORS_MAX};
pub use server::{Event, Running, Server};
