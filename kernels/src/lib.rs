//! Compute kernels for the GPU, compiled at build time and carried inside the program.
//!
//! `cuda/` holds one unit per family of operations; each becomes an [`Image`] with machine code
//! for Hopper and Blackwell. [`abi`] holds the parameter block of every kernel. [`device`] loads
//! and launches them, [`graph`] records launches, [`host`] moves data, [`mark`] tells when it has arrived.

pub mod abi;
pub mod device;
pub mod graph;
pub mod host;
pub mod mark;

/// A unit's machine code for every target.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Name of the unit: `cuda/NAME.cu`.
    pub unit: &'static str,
    /// The fatbin that the driver loads; empty when built without nvcc.
    pub fatbin: &'static [u8],
}

/// Every unit's image.
pub static IMAGES: &[Image] = &include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Compute capabilities that the images have code for.
pub const TARGETS: &[(u32, u32)] = &[(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)];

/// Whether the program was built with kernels.
pub fn present() -> bool {
    IMAGES.iter().all(|image| !image.fatbin.is_empty())
}

/// The image of a unit.
pub fn image(unit: &str) -> Option<&'static Image> {
    IMAGES.iter().find(|image| image.unit == unit)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    #[test]
    fn every_source_is_a_unit() {
        let sources: BTreeSet<String> =
            fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda"))
                .unwrap()
                .filter_map(|entry| {
                    let name = entry.unwrap().file_name().into_string().unwrap();
                    Some(name.strip_suffix(".cu")?.to_owned())
                })
                .collect();
        let units: BTreeSet<String> = super::IMAGES.iter().map(|i| i.unit.to_owned()).collect();
        assert_eq!(sources, units);
    }
}
