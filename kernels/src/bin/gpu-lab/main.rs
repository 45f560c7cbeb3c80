//! Runs every kernel on the card: right against fp64, the same bits however many rows, and how
//! fast against the floor. `tests/gpu/run.sh` builds and calls it.

#![allow(unsafe_code, reason = "kernel launches")]
#![allow(clippy::print_stdout, reason = "a command-line program")]

mod attention;
mod data;
mod heads;
mod linear;
mod report;
mod ring;
mod rows;
mod sample;
mod tiles;
mod time;
mod weights;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use marathon_kernels::{
    IMAGES, Image,
    device::{Device, DeviceError},
};
use report::Report;

/// What is run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Every check.
    Check,
    /// Every kernel once on small shapes, for the sanitizer.
    Small,
    /// The smallest ring between barriers, for racecheck.
    Ring,
    /// Timings.
    Time,
}

fn main() -> ExitCode {
    let mut part = None;
    let mut out = PathBuf::from("gpu-lab.json");
    let mut only = Vec::new();
    let mut images = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), args.next()) {
            ("--part", Some(name)) => match name.as_str() {
                "check" => part = Some(Part::Check),
                "small" => part = Some(Part::Small),
                "ring" => part = Some(Part::Ring),
                "time" => part = Some(Part::Time),
                _ => return usage(),
            },
            ("--out", Some(path)) => out = path.into(),
            ("--images", Some(path)) => images = Some(PathBuf::from(path)),
            ("--only", Some(names)) => only = names.split(',').map(str::to_owned).collect(),
            _ => return usage(),
        }
    }
    let Some(part) = part else { return usage() };
    match run(part, &out, only, images.as_deref()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            println!("gpu-lab: {error}");
            ExitCode::from(2)
        }
    }
}

fn usage() -> ExitCode {
    println!(
        "usage: gpu-lab --part check|small|ring|time [--only NAME,…] [--images FOLDER] [--out FILE]"
    );
    ExitCode::from(64)
}

/// The built-in images, each replaced by FOLDER/UNIT.fatbin where there is one: a kernel that was
/// compiled by itself is tried without building the program.
fn newer_images(folder: Option<&Path>) -> Vec<Image> {
    let newer = |image: &Image| {
        let file = folder?.join(format!("{}.fatbin", image.unit));
        let fatbin = std::fs::read(&file).ok()?;
        println!("kernels of {}", file.display());
        Some(Image {
            unit: image.unit,
            fatbin: fatbin.leak(),
        })
    };
    IMAGES.iter().map(|i| newer(i).unwrap_or(*i)).collect()
}

fn run(
    part: Part,
    out: &Path,
    only: Vec<String>,
    images: Option<&Path>,
) -> Result<bool, DeviceError> {
    let begin = Instant::now();
    let device = Device::open_with(0, &newer_images(images))?;
    println!(
        "{}, {} multiprocessors, driver for CUDA {}.{}, {} kernels loaded in {:.2} s",
        device.name,
        device.sms,
        device.driver / 1000,
        device.driver % 1000 / 10,
        device.kernels().count(),
        begin.elapsed().as_secs_f64()
    );
    let mut report = Report::new(&device, only);
    match part {
        Part::Check | Part::Small => {
            let small = part == Part::Small;
            linear::check(&device, &mut report, small)?;
            attention::check(&device, &mut report, small)?;
            tiles::check(&device, &mut report, small)?;
            heads::check(&device, &mut report)?;
            rows::check(&device, &mut report)?;
            sample::check(&device, &mut report, small)?;
        }
        Part::Ring => ring::check(&device, &mut report)?,
        Part::Time => time::all(&device, &mut report)?,
    }
    report.finish(out, begin.elapsed());
    Ok(report.good())
}
