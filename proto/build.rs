//! Compiles the .proto files with a pure-Rust compiler, so that no `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=brain");
    let descriptors = protox::compile(["brain/v1/brain.proto"], ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // protox does not write the descriptor set that server reflection serves.
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
