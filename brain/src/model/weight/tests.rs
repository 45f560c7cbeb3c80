use super::*;
use crate::model::{checkpoint::Checkpoint, names::Unused, plan::Moe};

use crate::model::forms::{self, ALL, Stored, Written, quantise};

fn noise(i: usize) -> f32 {
    let x = (i as u32).wrapping_mul(2_654_435_761) >> 8;
    (x as f32 / (1 << 23) as f32 - 1.0) * 0.05
}

fn values(count: usize) -> Vec<f32> {
    (0..count).map(noise).collect()
}

fn unused(tensors: &[Stored]) -> Unused {
    let bytes = Vec::leak(forms::file(tensors));
    Unused::new(&Checkpoint::embedded("test", bytes).unwrap()).unwrap()
}

fn read(tensors: &[Stored], rows: usize, cols: usize) -> Result<Weight, NameError> {
    let mut unused = unused(tensors);
    let weight = linear(&mut unused, "m", [rows, cols])?;
    unused.finish()?;
    weight.check_values()?;
    Ok(weight)
}

fn failure(tensors: &[Stored], rows: usize, cols: usize) -> String {
    read(tensors, rows, cols).unwrap_err().to_string()
}

#[test]
fn every_form_reads_as_it_was_written() {
    // 200 x 300: ragged blocks of 128, of 32 and of 16.
    let (rows, cols) = (200, 300);
    for form in ALL {
        let matrix = quantise("m", &values(rows * cols), rows, cols, form);
        let weight = read(&matrix.tensors, rows, cols).unwrap();
        assert_eq!((weight.rows(), weight.cols()), (rows, cols), "{form:?}");
        let got = weight.to_vec();
        for (i, (a, b)) in got.iter().zip(&matrix.values).enumerate() {
            assert_eq!(
                a.to_bits(),
                b.to_bits(),
                "{form:?}: element {i}: {a} and {b}"
            );
        }
        // What came out is near what went in: a scale used the wrong way round is far off.
        let error: f32 = got
            .iter()
            .zip(values(rows * cols))
            .map(|(a, b)| (a - b).powi(2))
            .sum();
        let size: f32 = values(rows * cols).iter().map(|x| x * x).sum();
        assert!(
            (error / size).sqrt() < 0.12,
            "{form:?}: {}",
            (error / size).sqrt()
        );
    }
}

#[test]
fn forms_are_told_apart_by_what_the_file_holds() {
    let form = |written| {
        let matrix = quantise("m", &values(64 * 256), 64, 256, written);
        read(&matrix.tensors, 64, 256).unwrap().form().to_string()
    };
    let names = ALL.map(form);
    assert_eq!(
        names.map(|n| n.to_owned()),
        [
            "bf16",
            "fp16",
            "fp32",
            "nvfp4",
            "nvfp4",
            "fp8-tensor",
            "fp8-row",
            "fp8-row",
            "fp8-block",
            "fp8-block",
            "fp8-block",
            "int4-g32",
            "int4-g128"
        ]
        .map(str::to_owned)
    );
}

/// The tensor `m.{what}` of a quantised matrix, for a test to damage.
fn damaged(form: Written, what: &str, damage: impl FnOnce(&mut Stored)) -> String {
    let mut matrix = quantise("m", &values(64 * 256), 64, 256, form);
    let name = format!("m.{what}");
    damage(matrix.tensors.iter_mut().find(|t| t.name == name).unwrap());
    let message = failure(&matrix.tensors, 64, 256);
    assert!(message.contains(&name), "{message}");
    assert!(message.contains("(in test)"), "{message}");
    message
}

#[test]
fn bad_scales_are_named() {
    for bad in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
        for (form, what) in [
            (Written::Fp8Tensor, "weight_scale"),
            (Written::Fp8Row, "weight_scale"),
            (Written::Fp8Block4d, "weight_scale"),
            (Written::Nvfp4, "weight_scale_2"),
            (Written::Nvfp4Packed, "weight_global_scale"),
        ] {
            let message = damaged(form, what, |t| {
                let end = t.data.len() - 4;
                t.data[end..].copy_from_slice(&bad.to_le_bytes());
            });
            assert!(
                message.contains("not a positive finite number"),
                "{message}"
            );
        }
        damaged(Written::Int4(32), "weight_scale", |t| {
            t.data[..2].copy_from_slice(&half::bf16::from_f32(bad).to_le_bytes());
        });
    }
    for code in [0x7f, 0xff, 0xb8] {
        damaged(Written::Nvfp4, "weight_scale", |t| t.data[33] = code);
    }
    // A hole where scales should be; a single zero is a block too small for E4M3.
    damaged(Written::Nvfp4, "weight_scale", |t| t.data.fill(0));
    let mut matrix = quantise("m", &values(64 * 256), 64, 256, Written::Nvfp4);
    matrix.tensors[1].data[7] = 0;
    read(&matrix.tensors, 64, 256).unwrap();
    damaged(Written::Fp8Row, "weight", |t| t.data[100] = 0xff);
}

#[test]
fn wrong_shapes_and_types_are_named() {
    for (form, what, shape) in [
        (Written::Nvfp4, "weight", vec![128, 64]),
        (Written::Nvfp4, "weight_scale", vec![32, 32]),
        (Written::Nvfp4, "weight_scale_2", vec![1, 1, 1]),
        (Written::Fp8Row, "weight_scale", vec![8, 8]),
        (Written::Fp8Block, "weight_scale", vec![2, 1]),
        (Written::Int4(32), "weight_packed", vec![32, 64]),
        (Written::Int4(32), "weight_scale", vec![8, 64]),
    ] {
        if what == "weight_scale_2" {
            // Any shape of one element will do.
            let mut matrix = quantise("m", &values(64 * 256), 64, 256, form);
            matrix.tensors[2].shape = shape;
            read(&matrix.tensors, 64, 256).unwrap();
            continue;
        }
        damaged(form, what, |t| t.shape = shape);
    }
    damaged(Written::Nvfp4, "weight_scale", |t| t.dtype = Dtype::U8);
    damaged(Written::Nvfp4, "weight_scale_2", |t| t.dtype = Dtype::I32);
    damaged(Written::Fp8Tensor, "weight", |t| t.dtype = Dtype::F8_E5M2);
    damaged(Written::Fp8Tensor, "weight_scale", |t| t.dtype = Dtype::U32);
    damaged(Written::Int4(32), "weight_shape", |t| t.data[0] = 63);
    damaged(Written::Bf16, "weight", |t| t.dtype = Dtype::I16);
}

#[test]
fn a_part_too_few_or_too_many_is_named() {
    for (form, missing, named) in [
        (Written::Nvfp4, "weight", "m.weight is missing"),
        (Written::Nvfp4, "weight_scale", "no weight_scale"),
        (
            Written::Nvfp4,
            "weight_scale_2",
            "weight_scale_2 or weight_global_scale",
        ),
        (Written::Fp8Row, "weight_scale", "no weight_scale"),
        (Written::Int4(32), "weight_scale", "no weight_scale"),
    ] {
        let mut matrix = quantise("m", &values(64 * 256), 64, 256, form);
        matrix.tensors.retain(|t| t.name != format!("m.{missing}"));
        let message = failure(&matrix.tensors, 64, 256);
        assert!(message.contains(named), "{message}");
    }
    let mut both = quantise("m", &values(64 * 256), 64, 256, Written::Bf16).tensors;
    let fp8 = quantise("m", &values(64 * 256), 64, 256, Written::Fp8Row).tensors;
    both.push(fp8[1].clone());
    let message = failure(&both, 64, 256);
    assert!(message.contains("m.weight_scale"), "{message}");
    let mut second = fp8;
    second.push(quantise("m", &values(64 * 256), 64, 256, Written::Nvfp4).tensors[2].clone());
    let message = failure(&second, 64, 256);
    assert!(message.contains("no second scale"), "{message}");
}

const MOE: Moe = Moe {
    experts: 3,
    top_k: 2,
    intermediate: 96,
};
const HIDDEN: usize = 160;

/// Every expert of a layer, the values of gate, up and down behind one another.
fn read_experts(tensors: &[Stored]) -> Vec<Vec<f32>> {
    let mut unused = unused(tensors);
    let found = experts(&mut unused, "layers.0.experts", &MOE, HIDDEN).unwrap();
    unused.finish().unwrap();
    let all = |e: &crate::model::weights::ExpertWeights| {
        let parts = e.gate_up.iter().chain([&e.down]);
        parts.flat_map(Weight::to_vec).collect()
    };
    found.iter().map(all).collect()
}

#[test]
fn experts_one_by_one_in_every_form() {
    let wide = MOE.intermediate;
    for form in ALL {
        for path in ["layers.0.experts", "layers.0.moe.experts"] {
            let (mut tensors, mut expected) = (Vec::new(), Vec::new());
            for e in 0..MOE.experts {
                let mut all = Vec::new();
                for (name, rows, cols) in [
                    ("gate_proj", wide, HIDDEN),
                    ("up_proj", wide, HIDDEN),
                    ("down_proj", HIDDEN, wide),
                ] {
                    let numbers: Vec<f32> = (0..rows * cols)
                        .map(|i| noise(i + 7 * e + name.len()) * (e + 1) as f32)
                        .collect();
                    let base = format!("{path}.{e}.{name}");
                    let matrix = quantise(&base, &numbers, rows, cols, form);
                    tensors.extend(matrix.tensors);
                    all.extend(matrix.values);
                }
                expected.push(all);
            }
            assert_eq!(read_experts(&tensors), expected, "{form:?} {path}");
        }
    }
}

/// Puts the tensors of the experts' matrices on top of one another, as stacks are stored.
fn stacked(
    base: &str,
    rows: usize,
    cols: usize,
    form: Written,
    dot: &str,
) -> (Vec<Stored>, Vec<Vec<f32>>) {
    let matrices: Vec<_> = (0..MOE.experts)
        .map(|e| {
            let numbers: Vec<f32> = (0..rows * cols)
                .map(|i| noise(i + e) * (e + 1) as f32)
                .collect();
            quantise("x", &numbers, rows, cols, form)
        })
        .collect();
    let tensors = (0..matrices[0].tensors.len())
        .filter(|t| !matrices[0].tensors[*t].name.ends_with("shape"))
        .map(|t| {
            let first = &matrices[0].tensors[t];
            let what = first.name.strip_prefix("x.").unwrap();
            let name = match what {
                "weight" => base.to_owned(),
                _ => format!("{base}{dot}{what}"),
            };
            Stored {
                name,
                dtype: first.dtype,
                shape: [&[MOE.experts], first.shape.as_slice()].concat(),
                data: matrices
                    .iter()
                    .flat_map(|m| m.tensors[t].data.clone())
                    .collect(),
            }
        })
        .collect();
    (tensors, matrices.into_iter().map(|m| m.values).collect())
}

#[test]
fn experts_in_stacks_in_every_form() {
    let wide = MOE.intermediate;
    for form in ALL {
        for dot in [".", "_"] {
            let base = "layers.0.experts.";
            let (mut tensors, up) =
                stacked(&format!("{base}gate_up_proj"), 2 * wide, HIDDEN, form, dot);
            let (rest, down) = stacked(&format!("{base}down_proj"), HIDDEN, wide, form, dot);
            tensors.extend(rest);
            let expected: Vec<Vec<f32>> = up
                .iter()
                .zip(&down)
                .map(|(a, b)| [a.as_slice(), b].concat())
                .collect();
            assert_eq!(read_experts(&tensors), expected, "{form:?} {dot}");
        }
    }
    let (tensors, _) = stacked(
        "layers.0.experts.gate_up_proj",
        2 * wide,
        HIDDEN,
        Written::Bf16,
        "_",
    );
    let mut fewer = unused(&tensors);
    let moe = Moe { experts: 4, ..MOE };
    let error = experts(&mut fewer, "layers.0.experts", &moe, HIDDEN)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("layers.0.experts.gate_up_proj has shape"),
        "{error}"
    );
}
