//! Compiles every unit of `cuda/` into one fatbin for all targets and writes the table of images.
//!
//! nvcc is found through `MARATHON_NVCC` (the program, or the folder that holds it), else on
//! `PATH`. Without one the images are empty: the workspace builds anywhere, and the program says
//! at start that it has no kernels. `MARATHON_CUDA_ARCHS` (like `90a,120a`) limits the targets while
//! one works on a kernel; a program meant for others is built without it.
#![allow(
    clippy::print_stdout,
    reason = "cargo reads a build script's standard output"
)]

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// A unit: `cuda/NAME.cu`. Each becomes an image of the same name.
const UNITS: &[&str] = &[
    "linear",
    "linear_large",
    "attention",
    "attention_tiles",
    "pack",
    "norm",
    "heads",
    "rows",
    "experts",
    "expert_norms",
    "clusters",
    "plain",
    "round",
    "sample",
    "yardstick",
    "faults",
    "ring",
];

/// Exact targets, no PTX: a missing image is a clear error, never a slow surprise.
const TARGETS: &[&str] = &["90a", "100a", "103a", "120a", "121a"];

/// `-fmad=false`: a fused multiply-add stands only where the source says so, in every instance of a
/// template alike.
const FLAGS: &[&str] = &[
    "-O3",
    "-std=c++17",
    "-fmad=false",
    "-fatbin",
    "--compress-mode=size",
];

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-env-changed=MARATHON_NVCC");
    println!("cargo::rerun-if-env-changed=MARATHON_CUDA_ARCHS");
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| missing("OUT_DIR"))?);
    let root = PathBuf::from(
        env::var_os("CARGO_MANIFEST_DIR").ok_or_else(|| missing("CARGO_MANIFEST_DIR"))?,
    );
    match find_nvcc() {
        Some(nvcc) => compile_all(&nvcc, &root.join("cuda"), &out)?,
        None => {
            println!(
                "cargo::warning=no nvcc on PATH or in MARATHON_NVCC: built without GPU kernels"
            );
            for unit in UNITS {
                fs::write(image_path(&out, unit), b"")?;
            }
        }
    }
    write_table(&out)
}

fn missing(variable: &str) -> io::Error {
    io::Error::other(format!("{variable} is not set; run this through cargo"))
}

fn image_path(out: &Path, unit: &str) -> PathBuf {
    out.join(format!("{unit}.fatbin"))
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(place) = env::var_os("MARATHON_NVCC").filter(|p| !p.is_empty()) {
        let place = PathBuf::from(place);
        let program = if place.is_dir() {
            place.join("nvcc")
        } else {
            place
        };
        if !program.is_file() {
            println!(
                "cargo::warning=MARATHON_NVCC names no file: {}",
                program.display()
            );
        }
        return program.is_file().then_some(program);
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|dir| dir.join("nvcc"))
        .find(|p| p.is_file())
}

/// Units in parallel, as many at a time as cargo grants jobs.
fn compile_all(nvcc: &Path, sources: &Path, out: &Path) -> io::Result<()> {
    forget_others(nvcc, out)?;
    let jobs = env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1usize);
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.clamp(1, UNITS.len()))
            .map(|_| {
                scope.spawn(|| {
                    while let Some(unit) = UNITS.get(next.fetch_add(1, Ordering::Relaxed)) {
                        compile(nvcc, sources, unit, out)?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .map_err(|_| io::Error::other("a compile thread panicked"))?
        })
    })
}

fn compile(nvcc: &Path, sources: &Path, unit: &str, out: &Path) -> io::Result<()> {
    let source = sources.join(format!("{unit}.cu"));
    if up_to_date(nvcc, sources, &source, &image_path(out, unit))? {
        return Ok(());
    }
    let mut command = Command::new(nvcc);
    command.args(FLAGS).arg("-I").arg(sources.join("include"));
    for target in targets()? {
        command
            .arg("-gencode")
            .arg(format!("arch=compute_{target},code=sm_{target}"));
    }
    // A build that is stopped leaves no half image under the name that counts.
    let (image, unfinished) = (image_path(out, unit), out.join(format!("{unit}.part")));
    let run = command.arg("-o").arg(&unfinished).arg(&source).output()?;
    if run.status.success() {
        return fs::rename(unfinished, image);
    }
    Err(io::Error::other(format!(
        "{} failed on {}:\n{}",
        nvcc.display(),
        source.display(),
        String::from_utf8_lossy(&run.stderr)
    )))
}

/// The targets that are compiled: all, or those that `MARATHON_CUDA_ARCHS` names.
fn targets() -> io::Result<Vec<&'static str>> {
    let Some(named) = env::var("MARATHON_CUDA_ARCHS")
        .ok()
        .filter(|n| !n.is_empty())
    else {
        return Ok(TARGETS.to_vec());
    };
    named
        .split(',')
        .map(|name| {
            let known = TARGETS.iter().find(|t| **t == name.trim());
            known.copied().ok_or_else(|| {
                io::Error::other(format!(
                    "MARATHON_CUDA_ARCHS names {name}, which is none of {}",
                    TARGETS.join(", ")
                ))
            })
        })
        .collect()
}

/// Removes images that were compiled for other targets, or by another compiler, than are asked for now.
fn forget_others(nvcc: &Path, out: &Path) -> io::Result<()> {
    let version = Command::new(nvcc).arg("--version").output()?.stdout;
    let (record, now) = (
        out.join("made-with"),
        format!(
            "{}\n{}\n{}",
            targets()?.join(","),
            nvcc.display(),
            String::from_utf8_lossy(&version)
        ),
    );
    if fs::read_to_string(&record).is_ok_and(|before| before == now) {
        return Ok(());
    }
    for unit in UNITS {
        let image = image_path(out, unit);
        if image.exists() {
            fs::remove_file(image)?;
        }
    }
    fs::write(record, now)
}

/// Whether an image is newer than everything it is made from: five targets of all units take
/// minutes, and a change is mostly in one.
fn up_to_date(nvcc: &Path, sources: &Path, source: &Path, image: &Path) -> io::Result<bool> {
    let Ok(made) = fs::metadata(image) else {
        return Ok(false);
    };
    if made.len() == 0 {
        return Ok(false);
    }
    let mut inputs = vec![
        nvcc.to_owned(),
        source.to_owned(),
        PathBuf::from("build.rs"),
    ];
    for header in fs::read_dir(sources.join("include"))? {
        inputs.push(header?.path());
    }
    let made = made.modified()?;
    for input in inputs {
        if fs::metadata(&input)?.modified()? >= made {
            return Ok(false);
        }
    }
    Ok(true)
}

fn write_table(out: &Path) -> io::Result<()> {
    let mut table = String::from("[\n");
    for unit in UNITS {
        // Relative to the table itself, so that a build folder may be moved.
        table.push_str(&format!(
            "    Image {{ unit: {unit:?}, fatbin: include_bytes!(\"{unit}.fatbin\") }},\n"
        ));
    }
    table.push_str("]\n");
    fs::write(out.join("images.rs"), table)
}
