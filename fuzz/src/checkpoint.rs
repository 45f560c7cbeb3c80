//! An input as a checkpoint folder: one byte of choices, the length of config.json in two bytes,
//! config.json, and the rest is a safetensors file.
//!
//! Weights are mostly numbers that no check looks at, so an input can leave them out: then the
//! length in front of the header is put in, and zeros behind it as far as the header reaches.

use serde_json::Value;

/// The header's length and the tensors' bytes are made up.
pub const FILLED: u8 = 1;
/// The checkpoint is an assistant, beside a target that is in order.
pub const ASSISTANT: u8 = 2;

/// More zeros than any seed needs.
const MOST: u64 = 2 << 20;

/// The files of a folder.
pub struct Files<'a> {
    /// Whether they are an assistant's.
    pub assistant: bool,
    /// config.json
    pub config: &'a [u8],
    /// model.safetensors
    pub weights: Vec<u8>,
}

impl<'a> Files<'a> {
    /// Splits an input; `None` for one that is too short.
    pub fn read(input: &'a [u8]) -> Option<Self> {
        let (choices, rest) = input.split_first()?;
        let (length, rest) = rest.split_at_checked(2)?;
        let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
        let (config, weights) = rest.split_at(length.min(rest.len()));
        Some(Self {
            assistant: choices & ASSISTANT != 0,
            config,
            weights: if choices & FILLED != 0 {
                filled(weights)
            } else {
                weights.to_vec()
            },
        })
    }
}

/// An input of these files, without the bytes of the tensors.
pub fn write(assistant: bool, config: &[u8], safetensors: &[u8]) -> Vec<u8> {
    let length = safetensors
        .first_chunk::<8>()
        .map_or(0, |length| u64::from_le_bytes(*length) as usize);
    let mut out = vec![FILLED | if assistant { ASSISTANT } else { 0 }];
    out.extend_from_slice(&(config.len() as u16).to_le_bytes());
    out.extend_from_slice(config);
    out.extend_from_slice(&safetensors[8..8 + length]);
    out
}

fn filled(header: &[u8]) -> Vec<u8> {
    let parsed: Value = serde_json::from_slice(header).unwrap_or_default();
    let end = parsed
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64())
        .max()
        .unwrap_or(0);
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header);
    out.resize(out.len() + end.min(MOST) as usize, 0);
    out
}
