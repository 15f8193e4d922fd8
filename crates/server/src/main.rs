//! The program `pillarbox`.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sets the stack size of threads that libraries start. lapin decodes and drops nested header tables recursively, on its own
/// thread: with the default stack of 2 MiB, one message with deeply nested headers (they may have 128 KiB) would crash the
/// process, and again after every restart. Only this variable changes the stack size, and only before the first thread starts.
const STACK_VARIABLE: &str = "RUST_MIN_STACK";
/// The kernel allocates only the pages that are used. An unoptimised build needs about ten times as much stack.
const STACK_BYTES: usize = if cfg!(debug_assertions) { 512 * 1024 * 1024 } else { 64 * 1024 * 1024 };

fn main() -> ExitCode {
    if env::var_os(STACK_VARIABLE).is_none() {
        let error = restart_with_stack_size();
        eprintln!("cannot set {STACK_VARIABLE}, continuing without it: {error}");
    }
    server::run()
}

/// Replaces this process by itself with the variable set. Returns only on failure.
fn restart_with_stack_size() -> std::io::Error {
    let program = match env::current_exe() {
        Ok(program) => program,
        Err(error) => return error,
    };
    let mut args = env::args_os();
    let mut command = Command::new(&program);
    command
        .arg0(args.next().unwrap_or_else(|| program.into_os_string()))
        .args(args)
        .env(STACK_VARIABLE, STACK_BYTES.to_string());
    command.exec()
}
