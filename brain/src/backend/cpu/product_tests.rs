//! Products against their definition, and those of quantised weights against plain twins.

use super::{
    Level,
    arranged::Arranged,
    matrix::Matrix,
    memory::Buf,
    pool::Pool,
    product::{Mode, product, row_product},
};
use crate::{
    model::{
        checkpoint::Checkpoint,
        names::Unused,
        weight::{
            Form, Nvfp4, Weight,
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

/// The elements of a row without their scales, and the scales of their groups.
fn elements(w: &Weight, row: usize) -> Vec<(f32, f32)> {
    let cols = w.cols();
    let mut plain = vec![0.0; cols];
    w.read_row(row, &mut plain);
    let element = |k: usize| match w {
        Weight::Float(_) => (plain[k], 1.0),
        Weight::Fp8(w) => {
            let code = E4M3[usize::from(w.codes()[row * cols + k])];
            (code, w.scale_of(row, k / w.group()))
        }
        Weight::Nvfp4(w) => {
            let code = E2M1[usize::from(nibble(&w.codes()[row * cols / 2..], k))];
            let scale = w.scales()[row * w.blocks() + k / Nvfp4::BLOCK];
            (code, E4M3[usize::from(scale)])
        }
        Weight::Int4(w) => {
            let code = nibble(&w.codes()[row * w.row_bytes()..], k);
            (f32::from(code) - 8.0, w.scale_of(row, k / w.group()))
        }
    };
    (0..cols).map(element).collect()
}

/// The inputs that lane `lane` of sixteen takes of so many, in turn.
fn taken(w: &Weight, bf16: bool, inputs: usize, lane: usize) -> Vec<usize> {
    let singles = !bf16 || matches!(w.form(), Form::F16 | Form::F32);
    let all: Vec<usize> = match (singles, w) {
        (true, _) => (lane..inputs).step_by(16).collect(),
        (_, Weight::Nvfp4(_)) => (0..inputs)
            .step_by(256)
            .flat_map(|deal| {
                let block = deal + 16 * lane;
                (0..8).flat_map(move |step| {
                    let low = block + 8 * (step / 4) + step % 4;
                    [low + 4, low]
                })
            })
            .collect(),
        _ => (2 * lane..inputs.next_multiple_of(32))
            .step_by(32)
            .flat_map(|low| [low + 1, low])
            .collect(),
    };
    all.into_iter().filter(|k| *k < inputs).collect()
}

/// Whether products read a form only as fp32 numbers that were made of it.
fn is_made(w: &Weight, bf16: bool) -> bool {
    let step = if bf16 { 32 } else { 16 };
    matches!(w, Weight::Int4(w) if w.group() < w.cols() && !w.group().is_multiple_of(step))
}

/// Outputs of a row of a weight, for rows of inputs, as `product` defines them.
fn definition(w: &Weight, row: usize, bf16: bool, inputs: &[&[f32]]) -> Vec<f32> {
    if is_made(w, bf16) {
        let mut numbers = vec![0.0; w.cols()];
        w.read_row(row, &mut numbers);
        let output = |x: &&[f32]| {
            let lane = |lane: usize| {
                let inputs = (lane..numbers.len()).step_by(16);
                inputs.fold(0.0, |sum, k| x[k].mul_add(numbers[k], sum))
            };
            tree(std::array::from_fn(lane))
        };
        return inputs.iter().map(output).collect();
    }
    let all = elements(w, row);
    let group = match w {
        Weight::Nvfp4(_) if bf16 => 256,
        Weight::Nvfp4(_) => 16,
        Weight::Fp8(w) => w.group(),
        Weight::Int4(w) => w.group(),
        Weight::Float(_) => w.cols(),
    };
    let several = group < w.cols() || matches!(w, Weight::Nvfp4(_));
    let groups = || all.chunks(group);
    let lanes: Vec<Vec<Vec<usize>>> = (0..16)
        .map(|lane| groups().map(|g| taken(w, bf16, g.len(), lane)).collect())
        .collect();
    let end = match (w, several) {
        (Weight::Nvfp4(w), _) => w.global(),
        (_, true) => 1.0,
        (_, false) => all[0].1,
    };
    let output = |x: &&[f32]| {
        let lane = |lane: usize| {
            let mut total = 0.0f32;
            for ((part, x), taken) in groups().zip(x.chunks(group)).zip(&lanes[lane]) {
                let sum = taken
                    .iter()
                    .fold(0.0, |sum, k| x[*k].mul_add(part[*k].0, sum));
                let scale = match (several, taken.first()) {
                    (false, _) => return sum,
                    (true, Some(k)) => part[*k].1,
                    (true, None) => 0.0,
                };
                total = scale.mul_add(sum, total);
            }
            total
        };
        tree(std::array::from_fn(lane)) * end
    };
    inputs.iter().map(output).collect()
}

fn tree(lanes: [f32; 16]) -> f32 {
    let mut sums = lanes.to_vec();
    for half in [8, 4, 2, 1] {
        sums = (0..half).map(|i| sums[i] + sums[i + half]).collect();
    }
    sums[0]
}

fn run(matrix: &Matrix, x: &Buf, rows: usize, level: Level, threads: usize) -> Vec<Vec<u32>> {
    let pool = Pool::new(threads).unwrap();
    let mode = Mode {
        level,
        round: false,
    };
    let mut arranged = Arranged::default();
    arranged.make_room(rows, matrix);
    let mut out = Buf::new(rows, matrix.outputs());
    product(&pool, mode, rows, x, matrix, &mut arranged, &mut out);
    let bits = |i: usize| out.row(i).iter().map(|x| x.to_bits()).collect();
    (0..rows).map(bits).collect()
}

/// Every output is what the definition says, whatever the shape, rows, level or threads.
#[test]
fn a_product_is_its_definition() {
    // Ragged in every way: outputs, steps, stretches, groups, blocks and what is dealt out.
    for (outputs, cols) in [(1, 2), (21, 1290), (70, 300)] {
        let x = inputs(60, cols);
        let rows: Vec<&[f32]> = (0..60).map(|i| &x.row(i)[..cols]).collect();
        for (form, bf16) in ALL.into_iter().flat_map(|f| [(f, true), (f, false)]) {
            let (w, _) = random(outputs, cols, form);
            let matrix = Matrix::new(&[&w], bf16);
            let some: Vec<u32> = (0..outputs as u32).rev().step_by(3).collect();
            let reversed = Matrix::of_rows(&w, &some, bf16);
            let defined: Vec<Vec<f32>> = (0..outputs)
                .map(|n| definition(&w, n, bf16, &rows))
                .collect();
            let row = |i: usize| defined.iter().map(|output| output[i].to_bits()).collect();
            let expected: Vec<Vec<u32>> = (0..rows.len()).map(row).collect();
            for level in levels() {
                for (rows, threads) in [
                    (1, 1),
                    (2, 2),
                    (3, 2),
                    (4, 1),
                    (5, 1),
                    (6, 2),
                    (13, 3),
                    (60, 2),
                ] {
                    let got = run(&matrix, &x, rows, level, threads);
                    assert!(got == expected[..rows], "{form:?} {bf16} {level:?} {rows}");
                }
                let mut arranged = Arranged::default();
                arranged.make_room(1, &reversed);
                let mode = Mode {
                    level,
                    round: false,
                };
                let mut out = vec![0.0; some.len() - some.len() / 2];
                let first = some.len() / 2;
                row_product(mode, x.row(0), &reversed, first, &mut arranged, &mut out);
                let got: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                let wanted = some[first..].iter().map(|n| expected[0][*n as usize]);
                assert!(
                    got == wanted.collect::<Vec<_>>(),
                    "{form:?} {bf16} {level:?}: one row"
                );
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
    for (form, bf16) in ALL.into_iter().flat_map(|f| [(f, true), (f, false)]) {
        let (w, values) = random(outputs, cols, form);
        let (twin, _) = weight(&values, outputs, cols, Written::F32);
        let of = |w: &Weight| run(&Matrix::new(&[w], bf16), &x, rows, Level::detect(), 1);
        let (got, want) = (of(&w), of(&twin));
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
    ] {
        let mut values: Vec<f32> = (0..outputs * cols)
            .map(|i| largest * noise(i + 9))
            .collect();
        values[17] = largest;
        let (w, values) = weight(&values, outputs, cols, form);
        let (twin, _) = weight(&values, outputs, cols, Written::F32);
        for level in levels() {
            let of = |w: &Weight| run(&Matrix::new(&[w], false), &x, rows, level, 1);
            assert!(of(&w) == of(&twin), "{form:?} {level:?}");
        }
    }
}

/// The bf16 instruction takes subnormals for zero, and so does everybody else.
#[test]
fn subnormal_weights_are_zero_at_every_level() {
    let numbers = [1e-39f32, 3.0, -1e-40, f32::from_bits(0x007f_0000), -2.0];
    let values: Vec<f32> = numbers.iter().cycle().take(33 * 70).copied().collect();
    let (w, values) = weight(&values, 33, 70, Written::Bf16);
    assert!(values.iter().any(|x| x.is_subnormal()));
    let matrix = Matrix::new(&[&w], true);
    for rows in [1, 7] {
        let mut x = Buf::new(rows, 70);
        // Large enough to make a normal number of a subnormal one, were it taken as it is.
        (0..rows).for_each(|i| x.row_mut(i).fill(2f32.powi(100)));
        for level in levels() {
            let got = run(&matrix, &x, rows, level, 1);
            for (n, row) in values.chunks(70).enumerate() {
                let normal = row.iter().filter(|x| x.is_normal());
                let expected = normal.sum::<f32>() * 2f32.powi(100);
                for row in &got {
                    assert_eq!(f32::from_bits(row[n]), expected, "{level:?} {n}");
                }
            }
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
                let stacked = run(&Matrix::new(&all, bf16), &x, rows, level, 2);
                let alone: Vec<_> = all
                    .iter()
                    .map(|w| run(&Matrix::new(&[w], bf16), &x, rows, level, 1))
                    .collect();
                for i in 0..rows {
                    let joined: Vec<u32> = alone.iter().flat_map(|part| part[i].clone()).collect();
                    assert!(stacked[i] == joined, "{bf16} {level:?} row {i} of {rows}");
                }
            }
        }
    }
}
