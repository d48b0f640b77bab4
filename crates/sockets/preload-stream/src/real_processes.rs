//! libc's functions about processes that only this library calls; see `real`.

use std::ffi::c_int;

real! {
    fork() -> c_int;
    quick_exit(status: c_int) -> ();
}
