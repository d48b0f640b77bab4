//! Stack frames of the library: threads of programs may have stacks of 16 KiB (`PTHREAD_STACK_MIN`), of which a call
//! of the C library itself takes a half.
#![cfg(target_arch = "x86_64")]

use std::process::Command;
use std::time::Duration;

use system_tests::Process;
use system_tests::paths::{library, tool};

const DISASSEMBLY_LIMIT: Duration = Duration::from_secs(120);
/// An array of 1 KiB, and the other variables of a function.
const FRAME_BYTES_MAX: u64 = 1024 + 128;
const FUNCTIONS_MIN: usize = 500;
/// Names in the functions of the standard library that print a backtrace. Only a panic calls them, and it ends the
/// process.
const OF_PANICS: [&str; 5] = ["gimli", "addr2line", "backtrace_rs", "std::backtrace", "std::sys::backtrace"];

/// A function and the bytes by which it lowers the stack pointer for its variables.
struct Function<'a> {
    name: &'a str,
    frame_bytes: u64,
}

/// Reads the frames in the output of `objdump --disassemble`.
fn functions(disassembly: &str) -> Vec<Function<'_>> {
    let mut functions: Vec<Function<'_>> = Vec::new();
    // A frame of several pages is entered page by page, so that the guard page is not skipped.
    let mut lowered_bytes = 0;
    for line in disassembly.lines() {
        if let Some(name) = line.strip_suffix(">:").and_then(|head| head.split_once('<')) {
            functions.push(Function { name: name.1, frame_bytes: 0 });
            lowered_bytes = 0;
            continue;
        }
        let (Some(function), Some((_, instruction))) = (functions.last_mut(), line.split_once('\t')) else { continue };
        let (operation, operands) = instruction.split_once(' ').unwrap_or((instruction, ""));
        match (operation, operands.trim()) {
            ("sub", operands) if operands.ends_with(",%rsp") => lowered_bytes += immediate(operands, "$", ",%rsp"),
            // The end of a loop over pages, whose body lowers the stack pointer by the first one.
            ("lea", operands) if operands.starts_with('-') && operands.ends_with("(%rsp),%r11") => {
                lowered_bytes += immediate(operands, "-", "(%rsp),%r11").saturating_sub(4096);
            }
            ("add", operands) if operands.ends_with(",%rsp") => lowered_bytes = 0,
            ("ret", _) => lowered_bytes = 0,
            _ => continue,
        }
        function.frame_bytes = function.frame_bytes.max(lowered_bytes);
    }
    functions
}

/// Returns a hexadecimal number between `prefix` and `suffix`. For any other operand, such as a register of a variable
/// length, returns what no limit allows.
fn immediate(operands: &str, prefix: &str, suffix: &str) -> u64 {
    let digits = operands.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix)?.strip_prefix("0x"));
    digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(u64::MAX / 1024)
}

#[test]
fn no_function_of_the_library_has_more_than_an_array_of_1_kib_on_the_stack() {
    let mut command = Command::new(tool("objdump"));
    command.args(["--disassemble", "--demangle", "--no-show-raw-insn"]).arg(library());
    let disassembly = Process::start(&mut command).wait(DISASSEMBLY_LIMIT).must_succeed().stdout;
    let (of_panics, others): (Vec<Function<'_>>, Vec<Function<'_>>) =
        functions(&disassembly).into_iter().partition(|function| OF_PANICS.iter().any(|of| function.name.contains(of)));
    assert!(others.len() >= FUNCTIONS_MIN, "{} functions: has the library been stripped?", others.len());
    // Otherwise large frames are not recognised.
    assert!(of_panics.iter().any(|function| function.frame_bytes >= 4096), "no large frame in the standard library");
    let large: Vec<String> = others
        .iter()
        .filter(|function| function.frame_bytes > FRAME_BYTES_MAX)
        .map(|function| format!("{} bytes: {}", function.frame_bytes, function.name))
        .collect();
    assert!(large.is_empty(), "frames of more than {FRAME_BYTES_MAX} bytes:\n{}", large.join("\n"));
}

#[test]
fn a_frame_of_several_pages_is_the_sum_of_its_steps() {
    let disassembly = "\
0000000000001000 <small>:
    1000:\tsub    $0x28,%rsp
    1004:\tadd    $0x28,%rsp
    1008:\tret
0000000000002000 <steps>:
    2000:\tsub    $0x1000,%rsp
    2007:\tmovq   $0x0,(%rsp)
    200f:\tsub    $0x340,%rsp
0000000000003000 <loop>:
    3000:\tlea    -0x4000(%rsp),%r11
    3008:\tsub    $0x1000,%rsp
    3010:\tcmp    %r11,%rsp
    3013:\tjne    3008 <loop+0x8>
    3015:\tsub    $0x18,%rsp
0000000000004000 <variable>:
    4000:\tsub    %rax,%rsp
";
    let found: Vec<(&str, u64)> = functions(disassembly).iter().map(|one| (one.name, one.frame_bytes)).collect();
    assert_eq!(found[..3], [("small", 0x28), ("steps", 0x1340), ("loop", 0x4018)]);
    assert!(found[3].1 > u64::from(u32::MAX), "{found:?}");
}
