//! Encodes weights as E4M3 with one scale for every row.

use super::{e4m3, error::ErrorSum};

/// Keeps a scale's reciprocal in range.
const SMALLEST_SCALE: f32 = 1e-30;

/// Encodes a row; the result is its scale.
pub fn encode(row: &[f32], codes: &mut [u8], sum: &mut ErrorSum) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
    {
        // SAFETY: the instructions were found just now.
        #[allow(unsafe_code, reason = "vector kernel")]
        return unsafe { encode_avx512(row, codes, sum) };
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the instructions were found just now.
        #[allow(unsafe_code, reason = "vector kernel")]
        return unsafe { encode_avx2(row, codes, sum) };
    }
    encode_portable(row, codes, sum)
}

/// The same code in wider registers: the same bits, since nothing is fused or reordered.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
fn encode_avx512(row: &[f32], codes: &mut [u8], sum: &mut ErrorSum) -> f32 {
    encode_portable(row, codes, sum)
}

/// Likewise.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_avx2(row: &[f32], codes: &mut [u8], sum: &mut ErrorSum) -> f32 {
    encode_portable(row, codes, sum)
}

#[inline(always)]
fn encode_portable(row: &[f32], codes: &mut [u8], sum: &mut ErrorSum) -> f32 {
    let largest = row.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = match largest {
        0.0 => 1.0,
        _ => (largest / e4m3::MAX).max(SMALLEST_SCALE),
    };
    let inverse = 1.0 / scale;
    // Summed in units of the scale, whose squares fit fp32 whatever the weights are.
    let unit = f64::from(scale).powi(2);
    for (codes, weights) in codes.chunks_mut(LANES).zip(row.chunks(LANES)) {
        let (mut signal, mut error) = ([0.0f32; LANES], [0.0f32; LANES]);
        let mut worst = [0.0f32; LANES];
        for (lane, (out, x)) in codes.iter_mut().zip(weights).enumerate() {
            let size = x.abs() * inverse;
            let code = e4m3::encode(size);
            let change = size - e4m3::decode(code);
            *out = (x.to_bits() >> 24 & 0x80 | code) as u8;
            signal[lane] = size * size;
            error[lane] = change * change;
            worst[lane] = change.abs();
        }
        let error = unit * f64::from(error.iter().sum::<f32>());
        sum.signal += unit * f64::from(signal.iter().sum::<f32>());
        sum.error += error;
        sum.plain += error;
        sum.worst = worst.iter().fold(sum.worst, |m, w| m.max(*w * scale));
    }
    sum.elements += row.len() as u64;
    sum.largest = sum.largest.max(largest);
    scale
}

/// Weights whose sums are taken side by side.
const LANES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weight::codes::E4M3;

    #[test]
    fn a_row_is_held_by_its_scale() {
        let row: Vec<f32> = (0..150).map(|i| (i as f32 - 75.0) * 0.013).collect();
        let mut codes = vec![0; row.len()];
        let mut sum = ErrorSum::default();
        let scale = encode(&row, &mut codes, &mut sum);
        assert_eq!(scale, 75.0 * 0.013 / 448.0);
        let error: f64 = codes
            .iter()
            .zip(&row)
            .map(|(c, x)| f64::from(E4M3[usize::from(*c)] * scale - x).powi(2))
            .sum();
        assert!((sum.error / error - 1.0).abs() < 1e-4);
        assert!(sum.relative_rms() < 0.03 && sum.elements == 150);
    }

    #[test]
    fn wider_registers_give_the_same_bits() {
        let row = crate::quantize::testing::gaussian(1003, 2);
        let mut both = [vec![0; row.len()], vec![1; row.len()]];
        let (mut one, mut two) = (ErrorSum::default(), ErrorSum::default());
        let scale = encode(&row, &mut both[0], &mut one);
        assert_eq!(scale, encode_portable(&row, &mut both[1], &mut two));
        assert_eq!((&both[0], one), (&both[1], two));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            let mut narrow = (vec![1; row.len()], ErrorSum::default());
            // SAFETY: the instructions were found just now.
            #[allow(unsafe_code, reason = "vector kernel")]
            let found = unsafe { encode_avx2(&row, &mut narrow.0, &mut narrow.1) };
            assert_eq!((found, &narrow.0, narrow.1), (scale, &both[0], one));
        }
    }

    #[test]
    fn zeros_have_a_scale_too() {
        let mut sum = ErrorSum::default();
        assert_eq!(encode(&[0.0; 8], &mut [1; 8], &mut sum), 1.0);
        assert_eq!(sum.error, 0.0);
        let mut codes = [0; 2];
        let scale = encode(&[1e-38, -1e-38], &mut codes, &mut sum);
        assert!(scale > 0.0 && (1.0 / scale).is_finite());
    }
}
