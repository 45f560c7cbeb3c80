//! Encodes weights as NVFP4: E2M1 codes, an E4M3 scale for every 16, one factor for all.
//!
//! The plain choice of a scale, which just holds the block's largest weight, is rarely the best:
//! E2M1 has no 5, and its steps near 6 are coarse. Every scale from two E4M3 codes below it to six
//! above (there the largest weight becomes a 4) is tried, and the one with the least squared error
//! taken. A wider search finds nothing better.

use super::{e4m3, error::ErrorSum};

/// Weights that share a scale.
pub const BLOCK: usize = 16;
/// Blocks that are encoded side by side, one in each lane of a vector register.
const LANES: usize = 16;
/// Weights of so many blocks.
const GROUP: usize = BLOCK * LANES;
/// The largest E2M1 number.
const LARGEST: f32 = 6.0;
/// Scales that are tried, in codes from the plain one; of equally good ones the first is taken.
const OFFSETS: [i32; 9] = [0, -1, 1, 5, 4, 6, 3, -2, 2];
/// Keeps the factor's reciprocal, and that of the smallest scale, in range.
const SMALLEST_FACTOR: f32 = 1e-30;

/// The factor of a matrix, or of several that share one, whose largest weight is `largest`.
pub fn factor(largest: f32) -> f32 {
    match largest {
        0.0 => 1.0,
        _ => (largest / (LARGEST * e4m3::MAX)).max(SMALLEST_FACTOR),
    }
}

/// Encodes whole blocks. `codes` gets a byte for two weights, the first in the low four bits,
/// `scales` a byte for 16.
pub fn encode(weights: &[f32], factor: f32, codes: &mut [u8], scales: &mut [u8]) -> ErrorSum {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
    {
        // SAFETY: the instructions were found just now.
        #[allow(unsafe_code, reason = "vector kernel")]
        return unsafe { encode_avx512(weights, factor, codes, scales) };
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the instructions were found just now.
        #[allow(unsafe_code, reason = "vector kernel")]
        return unsafe { encode_avx2(weights, factor, codes, scales) };
    }
    encode_portable(weights, factor, codes, scales)
}

/// The same code in wider registers: the same bits, since nothing is fused or reordered.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
fn encode_avx512(weights: &[f32], factor: f32, codes: &mut [u8], scales: &mut [u8]) -> ErrorSum {
    encode_portable(weights, factor, codes, scales)
}

/// Likewise.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_avx2(weights: &[f32], factor: f32, codes: &mut [u8], scales: &mut [u8]) -> ErrorSum {
    encode_portable(weights, factor, codes, scales)
}

#[inline(always)]
fn encode_portable(weights: &[f32], factor: f32, codes: &mut [u8], scales: &mut [u8]) -> ErrorSum {
    let mut sum = ErrorSum {
        elements: weights.len() as u64,
        ..ErrorSum::default()
    };
    let groups = weights
        .chunks(GROUP)
        .zip(codes.chunks_mut(GROUP / 2))
        .zip(scales.chunks_mut(LANES));
    for ((weights, codes), scales) in groups {
        let mut padded = [0.0; GROUP];
        let mut all_codes = [0; GROUP / 2];
        let mut all_scales = [0; LANES];
        // A last group may be short; zeros beside it change no sum.
        padded[..weights.len()].copy_from_slice(weights);
        group(&padded, factor, &mut all_codes, &mut all_scales, &mut sum);
        codes.copy_from_slice(&all_codes[..codes.len()]);
        scales.copy_from_slice(&all_scales[..scales.len()]);
    }
    sum
}

type Lanes = [f32; LANES];

/// Rounds to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even codes.
#[inline(always)]
fn round(x: f32) -> f32 {
    let x = x.min(LARGEST);
    // The step is half the power of two below x, at least 0.5. Adding 2^23 steps rounds to one.
    let power = x.max(1.0).to_bits() & 0x7f80_0000;
    let steps = f32::from_bits(power + (22 << 23));
    (x + steps) - steps
}

/// The code of a number that [`round`] returns.
#[inline(always)]
fn code(x: f32) -> u32 {
    let small = (2.0 * x) as u32;
    let large = (x.to_bits() >> 22).wrapping_sub(252);
    if x < 1.0 { small } else { large }
}

/// Encodes [`LANES`] blocks. Errors are summed in units of the factor, whose squares fit fp32
/// whatever the weights are.
#[inline(always)]
fn group(
    weights: &[f32; GROUP],
    factor: f32,
    codes: &mut [u8; GROUP / 2],
    scales: &mut [u8; LANES],
    sum: &mut ErrorSum,
) {
    let inverse = 1.0 / factor;
    // Element k of every block side by side.
    let mut sizes = [[0.0f32; LANES]; BLOCK];
    for (lane, block) in weights.chunks_exact(BLOCK).enumerate() {
        for (k, x) in block.iter().enumerate() {
            sizes[k][lane] = x.abs() * inverse;
        }
    }
    let (mut largest, mut signal): (Lanes, Lanes) = Default::default();
    for row in &sizes {
        for lane in 0..LANES {
            largest[lane] = largest[lane].max(row[lane]);
            signal[lane] += row[lane] * row[lane];
        }
    }
    let chosen = choose(&sizes, &largest);
    let mut worst: Lanes = [0.0; LANES];
    let mut nibbles = [[0u32; LANES]; BLOCK];
    for (row, nibbles) in sizes.iter().zip(&mut nibbles) {
        for lane in 0..LANES {
            let rounded = round(row[lane] * chosen.inverses[lane]);
            let change = (row[lane] - rounded * chosen.scales[lane]).abs();
            worst[lane] = worst[lane].max(change);
            nibbles[lane] = code(rounded);
        }
    }
    for (lane, block) in weights.chunks_exact(BLOCK).enumerate() {
        scales[lane] = chosen.codes[lane] as u8;
        let bytes = &mut codes[lane * BLOCK / 2..(lane + 1) * BLOCK / 2];
        for (i, (byte, pair)) in bytes.iter_mut().zip(block.chunks_exact(2)).enumerate() {
            let sign = |x: f32| x.to_bits() >> 28 & 8;
            let low = nibbles[2 * i][lane] | sign(pair[0]);
            let high = nibbles[2 * i + 1][lane] | sign(pair[1]);
            *byte = (low | high << 4) as u8;
        }
    }
    let unit = f64::from(factor).powi(2);
    for lane in 0..LANES {
        sum.signal += unit * f64::from(signal[lane]);
        sum.error += unit * f64::from(chosen.error[lane]);
        sum.plain += unit * f64::from(chosen.plain[lane]);
        sum.worst = sum.worst.max(worst[lane] * factor);
        sum.largest = sum.largest.max(largest[lane] * factor);
    }
}

/// The best scale of every block.
struct Chosen {
    codes: [u32; LANES],
    scales: Lanes,
    inverses: Lanes,
    /// Squared error with it.
    error: Lanes,
    /// Squared error with the scale that just holds the largest weight.
    plain: Lanes,
}

#[inline(always)]
fn choose(sizes: &[Lanes; BLOCK], largest: &Lanes) -> Chosen {
    let mut base = [0i32; LANES];
    for lane in 0..LANES {
        base[lane] = e4m3::encode(largest[lane] * (1.0 / LARGEST)) as i32;
    }
    let mut best = Chosen {
        codes: [1; LANES],
        scales: [0.0; LANES],
        inverses: [0.0; LANES],
        error: [f32::INFINITY; LANES],
        plain: [0.0; LANES],
    };
    for offset in OFFSETS {
        let mut codes = [0u32; LANES];
        let (mut scales, mut inverses): (Lanes, Lanes) = Default::default();
        for lane in 0..LANES {
            // A scale of 0 would lose the block.
            codes[lane] = (base[lane] + offset).clamp(1, e4m3::MAX_CODE as i32) as u32;
            scales[lane] = e4m3::decode(codes[lane]);
            inverses[lane] = 1.0 / scales[lane];
        }
        let mut error: Lanes = [0.0; LANES];
        for row in sizes {
            for lane in 0..LANES {
                let change = row[lane] - round(row[lane] * inverses[lane]) * scales[lane];
                error[lane] += change * change;
            }
        }
        if offset == 0 {
            best.plain = error;
        }
        for lane in 0..LANES {
            let better = error[lane] < best.error[lane];
            let pick = |new: f32, old: f32| if better { new } else { old };
            best.scales[lane] = pick(scales[lane], best.scales[lane]);
            best.inverses[lane] = pick(inverses[lane], best.inverses[lane]);
            best.error[lane] = pick(error[lane], best.error[lane]);
            best.codes[lane] = if better {
                codes[lane]
            } else {
                best.codes[lane]
            };
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::weight::codes::{E2M1, E4M3, nibble},
        quantize::testing::gaussian,
    };

    fn encoded(weights: &[f32]) -> (Vec<u8>, Vec<u8>, f32, ErrorSum) {
        let largest = weights.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let factor = factor(largest);
        let mut codes = vec![0; weights.len() / 2];
        let mut scales = vec![0; weights.len() / BLOCK];
        let sum = encode(weights, factor, &mut codes, &mut scales);
        (codes, scales, factor, sum)
    }

    fn decoded(codes: &[u8], scales: &[u8], factor: f32) -> Vec<f32> {
        (0..codes.len() * 2)
            .map(|i| {
                let scale = E4M3[usize::from(scales[i / BLOCK])];
                E2M1[usize::from(nibble(codes, i))] * scale * factor
            })
            .collect()
    }

    #[test]
    fn rounding_takes_the_nearest_code() {
        for (x, y) in [
            (0.25, 0.0),
            (0.26, 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (1.75, 2.0),
            (2.5, 2.0),
            (3.5, 4.0),
            (5.0, 4.0),
            (5.1, 6.0),
            (7.0, 6.0),
        ] {
            assert_eq!(round(x), y, "{x}");
        }
        for (i, x) in E2M1[..8].iter().enumerate() {
            assert_eq!((round(*x), code(*x)), (*x, i as u32));
        }
    }

    #[test]
    fn the_error_is_the_one_of_what_is_decoded() {
        for length in [16, 256, 16 * 37] {
            let weights = gaussian(length, 3);
            let (codes, scales, factor, sum) = encoded(&weights);
            let error: f64 = decoded(&codes, &scales, factor)
                .iter()
                .zip(&weights)
                .map(|(a, b)| f64::from(a - b).powi(2))
                .sum();
            assert!((sum.error / error - 1.0).abs() < 1e-4, "{length}");
            assert_eq!(sum.elements, length as u64);
        }
    }

    #[test]
    fn wider_registers_give_the_same_bits() {
        let weights = gaussian(16 * 1000, 11);
        let (codes, scales, factor, sum) = encoded(&weights);
        let (mut plain_codes, mut plain_scales) = (codes.clone(), scales.clone());
        plain_codes.fill(0);
        plain_scales.fill(0);
        let plain = encode_portable(&weights, factor, &mut plain_codes, &mut plain_scales);
        assert_eq!((&plain_codes, &plain_scales, plain), (&codes, &scales, sum));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            plain_codes.fill(0);
            plain_scales.fill(0);
            // SAFETY: the instructions were found just now.
            #[allow(unsafe_code, reason = "vector kernel")]
            let narrow =
                unsafe { encode_avx2(&weights, factor, &mut plain_codes, &mut plain_scales) };
            assert_eq!((plain_codes, plain_scales, narrow), (codes, scales, sum));
        }
    }

    #[test]
    fn every_block_has_the_best_of_all_scales() {
        let weights = gaussian(16 * 64, 5);
        let (codes, scales, factor, _) = encoded(&weights);
        let found = decoded(&codes, &scales, factor);
        let error = |weights: &[f32], decode: &dyn Fn(f32) -> f32| -> f64 {
            let each = weights.iter().map(|w| f64::from(w - decode(*w)).powi(2));
            each.sum()
        };
        for (block, found) in weights.chunks(BLOCK).zip(found.chunks(BLOCK)) {
            let mine: f64 = block
                .iter()
                .zip(found)
                .map(|(a, b)| f64::from(a - b).powi(2))
                .sum();
            let best = (1..=e4m3::MAX_CODE)
                .map(|code| {
                    let scale = e4m3::decode(code) * factor;
                    error(block, &|w| (round(w.abs() / scale) * scale).copysign(w))
                })
                .fold(f64::INFINITY, f64::min);
            assert!(mine <= best * 1.001, "{mine} {best}");
        }
    }

    #[test]
    fn the_search_is_worth_its_time() {
        let (.., sum) = encoded(&gaussian(16 * 4096, 7));
        let (searched, plain) = (sum.relative_rms(), sum.plain_relative_rms());
        assert!(searched < 0.083, "{searched}");
        assert!(searched < 0.87 * plain, "{searched} {plain}");
    }

    #[test]
    fn zeros_and_extremes_stay_what_they_are() {
        let mut weights = vec![0.0; 64];
        weights[16] = 3e38;
        weights[17] = -3e38;
        weights[32] = 1e-38;
        weights[48] = -0.0;
        let (codes, scales, factor, sum) = encoded(&weights);
        let found = decoded(&codes, &scales, factor);
        assert!(scales.iter().all(|code| (1..=0x7e).contains(code)));
        assert!(found[0] == 0.0 && (found[16] / 3e38 - 1.0).abs() < 0.01);
        assert!((found[17] / -3e38 - 1.0).abs() < 0.01);
        assert!(sum.error.is_finite() && sum.signal.is_finite());
        let (_, scales, factor, sum) = encoded(&[0.0; 32]);
        assert_eq!((factor, sum.error, sum.relative_rms()), (1.0, 0.0, 0.0));
        assert!(scales.iter().all(|code| *code > 0));
    }
}
