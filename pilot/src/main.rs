//! The `pilot` program.

fn main() -> std::process::ExitCode {
    pilot::commands::main()
}
