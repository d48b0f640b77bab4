//! Descriptors: what each of the program's stands for, those of the library that the program must not see, and which of
//! them a program started by `exec` receives.

pub mod hidden;
pub mod successor;
pub mod table;
