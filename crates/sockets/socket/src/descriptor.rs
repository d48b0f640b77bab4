//! Descriptors: the object behind each one, the hidden descriptors of the library, and which descriptors a program
//! started by `exec` inherits.

pub mod hidden;
pub mod received;
pub mod successor;
pub mod table;
