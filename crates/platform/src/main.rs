use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// lapin reads on a thread that it starts itself, and calls itself for every table within a table, as does whoever drops
/// what was read: with the usual stack of 2 MiB, one message whose headers nest deep enough (they may have 128 KiB) would end
/// the process, again at every start. The stack of a thread that others start is set by this variable alone, before the first.
const STACK_VARIABLE: &str = "RUST_MIN_STACK";
/// It is taken from memory only as far as it is used; an unoptimised build uses ten times as much.
const STACK_BYTES: usize = if cfg!(debug_assertions) { 512 * 1024 * 1024 } else { 64 * 1024 * 1024 };

fn main() -> ExitCode {
    if env::var_os(STACK_VARIABLE).is_none() {
        let error = begin_again();
        eprintln!("cannot set {STACK_VARIABLE}, going on without it: {error}");
    }
    pillarbox::run()
}

/// The same process, with the variable. Returns only if it fails.
fn begin_again() -> std::io::Error {
    let program = match env::current_exe() {
        Ok(program) => program,
        Err(error) => return error,
    };
    let mut args = env::args_os();
    let mut again = Command::new(&program);
    again
        .arg0(args.next().unwrap_or_else(|| program.into_os_string()))
        .args(args)
        .env(STACK_VARIABLE, STACK_BYTES.to_string());
    again.exec()
}
