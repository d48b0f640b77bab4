//! Gives the shared library its name at run time. The number changes when a program that was linked with an earlier one
//! would no longer run.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcrosslane_lane.so.0");
}
