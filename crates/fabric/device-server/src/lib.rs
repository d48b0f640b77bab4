//! An ivshmem server: one shared memory, and doorbells between all connected clients.
//!
//! It implements the protocol of QEMU's `ivshmem-doorbell` device ("Inter-VM Shared Memory device", QEMU's
//! `docs/specs/ivshmem-spec`) over a unix socket. Only the server sends:
//!
//! | message (8 bytes, little endian) | descriptor | when |
//! |---|---|---|
//! | 0, the protocol version | - | first |
//! | the client's own ID, 0 to 65535 | - | second |
//! | -1 | the memory | third |
//! | another client's ID, once per vector | an eventfd that interrupts it | for each client, later for each new one |
//! | the client's own ID, once per vector | an eventfd that interrupts it | after the connected clients |
//! | another client's ID | - | that client has disconnected |
//!
//! Virtual machines and processes of the host are clients alike, so the host can be another node beside its guests.
//!
//! - **The memory** is a sealed memfd of fixed size whose pages are all allocated, so that no client can truncate it
//!   under another client's mapping.
//! - **An ID** is the smallest one that was not assigned since the server last had no clients. So no client takes a new
//!   client for an old one, and QEMU's device, which cannot handle a reused ID, never sees one.
//! - **A client that does not read** fills its own queue, and is dropped when the queue is full. Other clients never
//!   wait for it.
//! - **A client that is killed** is noticed immediately, because the kernel closes its socket.
//! - **The socket** is accessible to the user alone (mode 0600), in a directory that no one else can write to. A socket
//!   that a killed server left behind is replaced; the socket of a running server is not. The user of every client is
//!   checked as well.
//!
//! The server is one thread, which blocks until a client connects, disconnects or can take more messages.

mod clients;
mod descriptor_limit;
mod error;
mod limits;
mod listener;
mod memory;
mod message;
mod options;
mod send_queue;
mod server;

pub use error::Error;
pub use limits::{CLIENTS_MAX, SIZE_BYTES_MIN, VECTORS_MAX};
pub use memory::{available_bytes, create as create_memory};
pub use options::Options;
pub use server::{Event, Server, ServerThread};
