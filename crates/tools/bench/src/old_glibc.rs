//! Lets the command run with glibc 2.34: a function whose symbol has the version of a later glibc is defined here, and
//! the linker prefers it.
#![allow(unsafe_code)] // It has the name of a function in C.

/// `hypotf` of `math.h`, which the library that renders plots calls: the length of a vector.
#[unsafe(no_mangle)]
extern "C" fn hypotf(x: f32, y: f32) -> f32 {
    let (x, y) = (f64::from(x), f64::from(y));
    (x * x + y * y).sqrt() as f32
}
