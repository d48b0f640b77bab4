//! Calls that create processes or run programs. What another program will hold goes back to TCP first.

use crate::errno::keeping_errno;
use crate::real;
use libc::FILE;
use socket::process::sandbox;
use socket::process::settings::settings;
use std::ffi::{c_char, c_int, c_long, c_void};
use stream::{lifecycle, process};

/// `vfork` returns twice into the caller's frame, so that it can only be jumped to.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn vfork() -> c_int {
    core::arch::naked_asm!(
        "sub rsp, 8",
        "call {note}",
        "call {address}",
        "add rsp, 8",
        "jmp rax",
        note = sym before_vfork,
        address = sym real::vfork_address,
    )
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn vfork() -> c_int {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, -16]!",
        "bl {note}",
        "bl {address}",
        "mov x16, x0",
        "ldp x29, x30, [sp], 16",
        "br x16",
        note = sym before_vfork,
        address = sym real::vfork_address,
    )
}

extern "C" fn before_vfork() {
    keeping_errno(process::before_vfork);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn chroot(path: *const c_char) -> c_int {
    let is_prepared = keeping_errno(process::before_change_of_root);
    // SAFETY: the C program's call requires this pointer to be valid as its manual page says.
    let result = unsafe { real::chroot(path) };
    if result < 0 && is_prepared {
        keeping_errno(process::after_failed_change_of_root);
    }
    result
}

/// Forks, and runs the handlers that libc runs around `fork`.
pub fn fork_with_handlers(fork: impl FnOnce() -> c_long) -> c_long {
    if settings().off {
        return fork();
    }
    process::before_fork();
    let pid = fork();
    match pid {
        0 => process::after_fork_in_child(),
        1.. => keeping_errno(process::after_fork_in_parent),
        _ => keeping_errno(|| {
            process::after_fork_in_parent();
            process::after_failed_fork();
        }),
    }
    pid
}

/// libc runs the handlers of this library, which do not learn whether the call has failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    // SAFETY: the call takes no arguments.
    let pid = unsafe { real::fork() };
    if pid < 0 {
        keeping_errno(process::after_failed_fork);
    }
    pid
}

/// `fork` without the program's handlers; those of this library run nevertheless.
#[unsafe(export_name = "_Fork")]
pub unsafe extern "C" fn bare_fork() -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    fork_with_handlers(|| unsafe { real::bare_fork() }.into()) as c_int
}

/// What the child of a `clone` that copies memory runs.
struct Start {
    run: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
}

extern "C" fn start_child(start: *mut c_void) -> c_int {
    if !settings().off {
        process::after_fork_in_child();
    }
    // SAFETY: `clone` passes a pointer to its local `Start`, of which the child has a copy.
    let start = unsafe { &*start.cast::<Start>() };
    (start.run)(start.argument)
}

/// libc's `clone`, which is variadic: all its arguments are where this definition finds them. A child with a copy of
/// the memory is treated like one of `fork`, and one that shares the memory like one of `vfork` or a thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    run: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: *mut c_int,
    tls: *mut c_void,
    child_tid: *mut c_int,
) -> c_int {
    if flags & libc::CLONE_VM != 0 {
        if flags & libc::CLONE_THREAD == 0 {
            keeping_errno(process::before_exec);
        }
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::clone(run, stack, flags, argument, parent_tid, tls, child_tid) };
    }
    if flags & libc::CLONE_FILES != 0 {
        keeping_errno(process::before_sharing_descriptors);
    }
    let mut start = Start { run, argument };
    let start = (&raw mut start).cast();
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let clone = || unsafe { real::clone(start_child, stack, flags, start, parent_tid, tls, child_tid) };
    fork_with_handlers(|| clone().into()) as c_int
}

/// libc's `prctl`, which is variadic: all its arguments are in registers. Prepares for a system call filter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, second: usize, third: usize, fourth: usize, fifth: usize) -> c_int {
    if sandbox::is_filter_by_prctl(option) {
        keeping_errno(process::confine);
    }
    let arguments = [option as usize, second, third, fourth, fifth];
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { socket::process::system::call_kernel(libc::SYS_prctl, arguments) as c_int }
}

/// The arguments or the environment of a program in C.
type Strings = *const *mut c_char;

unsafe extern "C" {
    static environ: Strings;
}

macro_rules! spawns {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            pid: *mut c_int,
            path: *const c_char,
            actions: *const c_void,
            attributes: *const c_void,
            arguments: Strings,
            environment: Strings,
        ) -> c_int {
            keeping_errno(process::before_exec);
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            unsafe { real::$name(pid, path, actions, attributes, arguments, environment) }
        }
    )*};
}

spawns! { posix_spawn posix_spawnp pidfd_spawn pidfd_spawnp }

/// libc's function makes this system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    process::before_exit();
    loop {
        // SAFETY: the call takes an integer, and does not return.
        unsafe { socket::process::system::raw_syscall(libc::SYS_exit_group, [status as usize]) };
    }
}

/// The handlers that libc runs may still use connections: this process then holds them again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quick_exit(status: c_int) -> ! {
    process::before_exit();
    // SAFETY: the call takes an integer.
    unsafe { real::quick_exit(status) };
    // SAFETY: libc's function does not return; this is for the compiler.
    unsafe { _exit(status) }
}

#[unsafe(export_name = "_Exit")]
pub unsafe extern "C" fn exit_at_once(status: c_int) -> ! {
    // SAFETY: the call takes an integer.
    unsafe { _exit(status) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, new: c_int) -> c_int {
    keeping_errno(|| lifecycle::before_passing(fd));
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, new) }
}

/// Runs another program in this process. The call returns if that fails.
fn run_program(call: impl FnOnce() -> c_int) -> c_int {
    keeping_errno(process::before_program);
    let result = call();
    keeping_errno(process::after_failed_program);
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    run_program(|| unsafe { real::execve(path, arguments, environment) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(name: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    run_program(|| unsafe { real::execvpe(name, arguments, environment) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    dir: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    run_program(|| unsafe { real::execveat(dir, path, arguments, environment, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    run_program(|| unsafe { real::fexecve(fd, arguments, environment) })
}

/// Returns the environment, which follows the null pointer at the end of `execle`'s arguments.
unsafe fn environment_behind(arguments: Strings) -> Strings {
    let mut end = arguments;
    // SAFETY: the C program's arguments end with a null pointer, and a pointer to the environment follows.
    unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        end.add(1).cast::<Strings>().read()
    }
}

unsafe extern "C" fn execle_with(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { execve(path, arguments, environment_behind(arguments)) }
}

/// Defines functions whose arguments are listed one by one. The arguments in registers are pushed in front of those on
/// the stack, in place of the return address, so that all of them form an array.
#[cfg(target_arch = "x86_64")]
macro_rules! listed {
    ($($name:ident by $with:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {with}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                with = sym $with,
            )
        }
    )*};
}

/// As on x86-64. The frame's 24 unused bytes put the arguments in registers right in front of those on the stack.
#[cfg(target_arch = "aarch64")]
macro_rules! listed {
    ($($name:ident by $with:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "sub sp, sp, 80",
                "stp x29, x30, [sp]",
                "mov x29, sp",
                "stp x1, x2, [sp, 24]",
                "stp x3, x4, [sp, 40]",
                "stp x5, x6, [sp, 56]",
                "str x7, [sp, 72]",
                "add x1, sp, 24",
                "bl {with}",
                "ldp x29, x30, [sp]",
                "add sp, sp, 80",
                "ret",
                with = sym $with,
            )
        }
    )*};
}

listed! {
    execl by execv;
    execlp by execvp;
    execle by execle_with;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn system(command: *const c_char) -> c_int {
    keeping_errno(process::before_exec);
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { real::system(command) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    keeping_errno(process::before_exec);
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { real::popen(command, mode) }
}

aliases! {
    execv(path: *const c_char, arguments: Strings) -> c_int = execve(path, arguments, environ);
    execvp(name: *const c_char, arguments: Strings) -> c_int = execvpe(name, arguments, environ);
}
