//! Products with quantised weights against their definition and against plain twins.

use super::{
    Level,
    memory::Buf,
    panel::{Matrix, PANEL, Words},
    pool::Pool,
    product::{Mode, product, row_product},
};
use crate::{
    model::{
        checkpoint::Checkpoint,
        names::Unused,
        weight::{
            Nvfp4, Weight,
            codes::{E2M1, E4M3, nibble},
            linear,
        },
    },
    sched::math::round_bf16,
};

use crate::model::forms::{self, ALL, Written, quantise};

fn levels() -> impl Iterator<Item = Level> {
    Level::all().into_iter().filter(|l| l.is_available())
}

fn noise(i: usize) -> f32 {
    let x = (i as u32).wrapping_mul(2_654_435_761) >> 8;
    x as f32 / (1 << 23) as f32 - 1.0
}

/// A weight and the numbers it stands for.
fn weight(values: &[f32], rows: usize, cols: usize, form: Written) -> (Weight, Vec<f32>) {
    let matrix = quantise("m", values, rows, cols, form);
    let file = Vec::leak(forms::file(&matrix.tensors));
    let mut unused = Unused::new(&Checkpoint::embedded("test", file).unwrap()).unwrap();
    (
        linear(&mut unused, "m", [rows, cols]).unwrap(),
        matrix.values,
    )
}

fn random(rows: usize, cols: usize, form: Written) -> (Weight, Vec<f32>) {
    let values: Vec<f32> = (0..rows * cols).map(|i| 0.05 * noise(i + 3)).collect();
    weight(&values, rows, cols, form)
}

/// Rows of bf16 numbers, which both recipes take.
fn inputs(rows: usize, cols: usize) -> Buf {
    let mut x = Buf::new(rows, cols);
    for i in 0..rows {
        let row = x.row_mut(i).iter_mut().enumerate();
        row.for_each(|(k, x)| *x = round_bf16(noise(i * 1000 + k)));
    }
    x
}

/// Element `k` of a row without its scale, the scale of its group, and the size of groups.
fn element(w: &Weight, row: usize, k: usize) -> (f32, f32, usize) {
    let cols = w.cols();
    match w {
        Weight::Float(_) => {
            let mut all = vec![0.0; cols];
            w.read_row(row, &mut all);
            (all[k], 1.0, cols)
        }
        Weight::Fp8(w) => {
            let code = E4M3[usize::from(w.codes()[row * cols + k])];
            (code, w.scale_of(row, k / w.group()), w.group())
        }
        Weight::Nvfp4(w) => {
            let code = E2M1[usize::from(nibble(&w.codes()[row * cols / 2..], k))];
            let scale = w.scales()[row * w.blocks() + k / Nvfp4::BLOCK];
            (code * E4M3[usize::from(scale)], w.global(), cols)
        }
        Weight::Int4(w) => {
            let code = nibble(&w.codes()[row * w.row_bytes()..], k);
            let scale = w.scale_of(row, k / w.group());
            (f32::from(code) - 8.0, scale, w.group())
        }
    }
}

/// An output as `coded` defines it.
fn definition(w: &Weight, row: usize, x: &[f32]) -> f32 {
    let all: Vec<_> = (0..w.cols()).map(|k| element(w, row, k)).collect();
    let group = all[0].2;
    let mut total = 0.0f32;
    for (part, x) in all.chunks(group).zip(x.chunks(group)) {
        let chain = |sum: f32, (w, x): (&(f32, f32, usize), &f32)| x.mul_add(w.0, sum);
        let sum = part.iter().zip(x).fold(0.0, chain);
        total = part[0].1.mul_add(sum, total);
    }
    total
}

fn run(matrix: &Matrix, x: &Buf, rows: usize, level: Level, threads: usize) -> Vec<Vec<u32>> {
    let pool = Pool::new(threads).unwrap();
    let mode = Mode {
        level,
        round: false,
    };
    let mut words = Words::new(rows, matrix.inputs());
    let mut out = Buf::new(rows, matrix.outputs());
    product(&pool, mode, rows, x, matrix, &mut words, &mut out);
    let bits = |i: usize| out.row(i).iter().map(|x| x.to_bits()).collect();
    (0..rows).map(bits).collect()
}

fn pack(parts: &[&Weight], bf16: bool) -> Matrix {
    Matrix::pack(&Pool::new(2).unwrap(), parts, bf16)
}

#[test]
fn a_coded_product_is_its_definition() {
    // Ragged in every way: panels, pairs of inputs, stretches, groups and blocks.
    for (outputs, inputs_of) in [(70, 300), (200, 130)] {
        for form in ALL {
            let (w, _) = random(outputs, inputs_of, form);
            let x = inputs(130, inputs_of);
            let expected: Vec<Vec<u32>> = (0..130)
                .map(|i| {
                    (0..outputs)
                        .map(|n| definition(&w, n, x.row(i)).to_bits())
                        .collect()
                })
                .collect();
            for bf16 in [true, false] {
                let matrix = pack(&[&w], bf16);
                for level in levels() {
                    for (rows, threads) in [(1, 1), (3, 2), (5, 1), (13, 3), (130, 2)] {
                        let got = run(&matrix, &x, rows, level, threads);
                        assert!(got == expected[..rows], "{form:?} {bf16} {level:?} {rows}");
                    }
                    let mut words = vec![0; inputs_of.div_ceil(2)];
                    let mut out = vec![0.0; outputs.div_ceil(PANEL) * PANEL];
                    let mode = Mode {
                        level,
                        round: false,
                    };
                    row_product(mode, x.row(0), &matrix, 0, &mut words, &mut out);
                    let got: Vec<u32> = out[..outputs].iter().map(|x| x.to_bits()).collect();
                    assert!(got == expected[0], "{form:?} {bf16} {level:?}: one row");
                }
            }
        }
    }
}

/// Rounded once per product and sum, and once per group: the twin's weights are rounded to fp32
/// instead, so that the two differ by a few units in the last place of the terms.
#[test]
fn every_form_equals_its_dequantised_twin() {
    let (outputs, cols, rows) = (70, 300, 4);
    let x = inputs(rows, cols);
    for form in ALL {
        let (w, values) = random(outputs, cols, form);
        let (twin, _) = weight(&values, outputs, cols, Written::F32);
        let got = run(&pack(&[&w], false), &x, rows, Level::detect(), 1);
        let want = run(&pack(&[&twin], false), &x, rows, Level::detect(), 1);
        for i in 0..rows {
            for n in 0..outputs {
                let row = &values[n * cols..(n + 1) * cols];
                let size: f32 = row.iter().zip(x.row(i)).map(|(w, x)| (w * x).abs()).sum();
                let (a, b) = (f32::from_bits(got[i][n]), f32::from_bits(want[i][n]));
                assert!((a - b).abs() <= 1e-6 * size, "{form:?}: {a} and {b}");
            }
        }
    }
}

/// Where a scale is a power of two it rounds nothing, and the twin has the same bits.
#[test]
fn powers_of_two_as_scales_give_the_twins_bits() {
    let (outputs, cols, rows) = (70, 300, 4);
    let x = inputs(rows, cols);
    for (form, largest) in [
        (Written::Bf16, 1.0),
        (Written::F16, 1.0),
        (Written::Fp8Tensor, 448.0 / 8192.0),
        (Written::Nvfp4, 6.0 * 448.0 / 65536.0),
        (Written::Nvfp4Packed, 6.0 * 448.0 / 65536.0),
    ] {
        let mut values: Vec<f32> = (0..outputs * cols)
            .map(|i| largest * noise(i + 9))
            .collect();
        values[17] = largest;
        let (w, values) = weight(&values, outputs, cols, form);
        let (twin, _) = weight(&values, outputs, cols, Written::F32);
        for level in levels() {
            let got = run(&pack(&[&w], true), &x, rows, level, 1);
            let want = run(&pack(&[&twin], true), &x, rows, level, 1);
            assert!(got == want, "{form:?} {level:?}");
        }
    }
}

#[test]
fn parts_of_different_forms_do_not_touch_one_another() {
    let cols = 96;
    let forms = [
        (Written::Bf16, 40),
        (Written::Fp8Row, 33),
        (Written::Nvfp4, 64),
        (Written::Fp8Tensor, 1),
        (Written::F32, 7),
        (Written::Int4(32), 20),
        (Written::F16, 5),
    ];
    let weights: Vec<Weight> = forms.iter().map(|(f, n)| random(*n, cols, *f).0).collect();
    let all: Vec<&Weight> = weights.iter().collect();
    let x = inputs(9, cols);
    for bf16 in [true, false] {
        for level in levels() {
            for rows in [1, 9] {
                let stacked = run(&pack(&all, bf16), &x, rows, level, 2);
                let alone: Vec<_> = all
                    .iter()
                    .map(|w| run(&pack(&[w], bf16), &x, rows, level, 1))
                    .collect();
                for i in 0..rows {
                    let joined: Vec<u32> = alone.iter().flat_map(|part| part[i].clone()).collect();
                    assert!(stacked[i] == joined, "{bf16} {level:?} row {i} of {rows}");
                }
            }
        }
    }
}
