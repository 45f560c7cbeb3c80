//! What the quantised checkpoint will consist of: which tensors are encoded, which are copied, and
//! where every byte of theirs goes. Known before the first weight is read, so that shards can be
//! written out of order and an interrupted run goes on with the very same files.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use super::nvfp4;
use crate::model::{
    audit::{Audit, Filled},
    checkpoint::{Dtype, Tensor},
    inventory::{Part, Storage},
    names::{NameError, text_name},
};

/// What weights are encoded as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Four bits and an E4M3 scale per 16.
    Nvfp4,
    /// Eight bits and a scale per row.
    Fp8,
}

/// What to do, in so far as it changes a byte of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// How weights are encoded.
    pub format: Format,
    /// Whether those of attention are.
    pub attention: bool,
    /// Bytes of a file, unless one tensor alone is larger.
    pub shard_size: u64,
}

/// Rows of a tensor that are encoded as one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Its name, without `.weight`.
    pub module: String,
    /// The tensor, by its place in the list of sources.
    pub source: usize,
    /// The first row, where an expert's matrix is a part of a larger tensor.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// What is done at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A tensor is copied as it is.
    Copy(usize),
    /// Matrices that share a factor are encoded.
    Encode(Vec<Matrix>),
}

/// A tensor of the result, by its place in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Where it begins in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A unit and the tensors it makes: one for a copy; for each matrix codes, scales and, in NVFP4,
/// the factor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// What is done.
    pub unit: Unit,
    /// What comes of it.
    pub outputs: Vec<Output>,
}

/// A file of the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its name.
    pub file: String,
    /// Everything before the first tensor.
    pub header: Vec<u8>,
    /// What fills it.
    pub jobs: Vec<Job>,
    /// Its length.
    pub bytes: u64,
}

/// The whole result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its files.
    pub shards: Vec<Shard>,
    /// Modules that are encoded.
    pub encoded: BTreeSet<String>,
    /// Modules of matrices that could be and are not.
    pub kept: BTreeSet<String>,
}

impl Layout {
    /// Lays out what comes of `sources`, which `audit` found sound. An error means that a tensor
    /// would not be encoded whole.
    pub fn new(sources: &[Tensor], audit: &Audit, recipe: &Recipe) -> Result<Self, NameError> {
        let roles = Roles::of(audit);
        let mut units = Units {
            recipe: *recipe,
            units: Vec::new(),
            groups: BTreeMap::new(),
            encoded: BTreeSet::new(),
            kept: BTreeSet::new(),
        };
        for (i, tensor) in sources.iter().enumerate() {
            units.add(i, tensor, &roles)?;
        }
        let jobs = units.units.into_iter().map(|unit| {
            let outputs = outputs(&unit, sources, recipe.format);
            Job { unit, outputs }
        });
        Ok(Self {
            shards: shards(jobs, recipe.shard_size),
            encoded: units.encoded,
            kept: units.kept,
        })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes).sum()
    }

    /// The index that says which tensor is in which file, if there are several.
    pub fn index(&self) -> Option<serde_json::Value> {
        if self.shards.len() < 2 {
            return None;
        }
        let tensors = || {
            self.shards
                .iter()
                .flat_map(|s| s.jobs.iter().map(move |j| (s, j)))
        };
        let size: u64 = tensors()
            .flat_map(|(_, j)| j.outputs.iter().map(|o| o.bytes))
            .sum();
        let map: Map<_, _> = tensors()
            .flat_map(|(s, j)| j.outputs.iter().map(|o| (o.name.clone(), json!(s.file))))
            .collect();
        Some(json!({"metadata": {"total_size": size}, "weight_map": map}))
    }
}

/// What the text tensors are for, by their names in the files.
struct Roles(BTreeMap<String, Purpose>);

/// What a tensor is for.
struct Purpose {
    part: Part,
    role: Role,
    /// Whether its rows divide into blocks.
    whole: bool,
}

/// What a tensor holds. Modules are named as the slot is, whatever spelling the file has.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Role {
    /// The matrix of this module.
    Matrix(String),
    /// All experts' gate and up rows, of the experts of this module.
    GateUp(String),
    /// All experts' down projections.
    Down(String),
    /// Nothing that can be encoded.
    Other,
}

impl Roles {
    fn of(audit: &Audit) -> Self {
        let mut roles = BTreeMap::new();
        for filled in &audit.filled {
            let part = filled.slot.part;
            // The experts of a layer are encoded all or not at all, as readers expect them.
            let whole = filled
                .weights
                .iter()
                .all(|w| w.cols().is_multiple_of(nvfp4::BLOCK));
            for (i, weight) in filled.weights.iter().enumerate() {
                for tensor in weight.tensors() {
                    let role = role(filled, i, tensor.name());
                    let purpose = Purpose { part, role, whole };
                    roles.insert(tensor.name().to_owned(), purpose);
                }
            }
        }
        Self(roles)
    }
}

/// What the tensor `name` of a slot's weight `i` holds.
fn role(filled: &Filled, i: usize, name: &str) -> Role {
    let inner = text_name(name).unwrap_or(name);
    let prefix = name.strip_suffix(inner).unwrap_or_default();
    let module = format!("{prefix}{}", filled.slot.name);
    match filled.slot.storage {
        Storage::Matrix => Role::Matrix(module),
        // Of stacks every expert has a part of two tensors, else it has three of its own.
        Storage::Experts(moe) if filled.weights.len() == 2 * moe.experts => match i % 2 {
            0 => Role::GateUp(module),
            _ => Role::Down(module),
        },
        Storage::Experts(_) => {
            let matrix = ["gate_proj", "up_proj", "down_proj"][i % 3];
            Role::Matrix(format!("{module}.{}.{matrix}", i / 3))
        }
        Storage::Plain | Storage::Tokens => Role::Other,
    }
}

struct Units {
    recipe: Recipe,
    units: Vec<Unit>,
    /// The unit of every group of matrices that share a factor.
    groups: BTreeMap<String, usize>,
    encoded: BTreeSet<String>,
    kept: BTreeSet<String>,
}

impl Units {
    fn add(&mut self, source: usize, tensor: &Tensor, roles: &Roles) -> Result<(), NameError> {
        let purpose = roles.0.get(tensor.name());
        let purpose = purpose.filter(|p| p.role != Role::Other);
        let Some(purpose) = purpose.filter(|p| self.encodes(p.part, p.whole)) else {
            let counted = |p: &Purpose| !matches!(p.part, Part::Embedding | Part::PerLayerTable);
            if purpose.is_some_and(counted) {
                let name = tensor.name();
                let module = name.strip_suffix(".weight").unwrap_or(name);
                self.kept.insert(module.to_owned());
            }
            self.units.push(Unit::Copy(source));
            return Ok(());
        };
        let matrices = matrices(source, tensor, &purpose.role);
        let encoded: usize = matrices.iter().map(|m| m.rows * m.cols).sum();
        if encoded != tensor.shape().iter().product::<usize>() {
            let problem = format!(
                "its shape {:?} is not that of what it stands for: not all of it would be encoded",
                tensor.shape()
            );
            return Err(NameError::value(tensor, problem));
        }
        for matrix in matrices {
            self.encode(matrix);
        }
        Ok(())
    }

    fn encodes(&self, part: Part, whole: bool) -> bool {
        let wanted = match part {
            Part::Dense | Part::Experts => true,
            Part::Attention => self.recipe.attention,
            _ => false,
        };
        wanted && (whole || self.recipe.format == Format::Fp8)
    }

    /// Other engines compute query, key and value, and gate and up, as one matrix each with one
    /// factor: they get a common one.
    fn encode(&mut self, matrix: Matrix) {
        self.encoded.insert(matrix.module.clone());
        let (parent, last) = matrix
            .module
            .rsplit_once('.')
            .unwrap_or(("", &matrix.module));
        let group = match (self.recipe.format, last) {
            (Format::Nvfp4, "q_proj" | "k_proj" | "v_proj") => format!("{parent}.qkv"),
            (Format::Nvfp4, "gate_proj" | "up_proj") => format!("{parent}.gate_up"),
            _ => matrix.module.clone(),
        };
        match self.groups.get(&group) {
            Some(unit) => {
                if let Unit::Encode(matrices) = &mut self.units[*unit] {
                    matrices.push(matrix);
                }
            }
            None => {
                self.groups.insert(group, self.units.len());
                self.units.push(Unit::Encode(vec![matrix]));
            }
        }
    }
}

/// The matrices that a tensor holds.
fn matrices(source: usize, tensor: &Tensor, role: &Role) -> Vec<Matrix> {
    let matrix = |module: String, first_row: usize, rows: usize, cols: usize| Matrix {
        module,
        source,
        first_row,
        rows,
        cols,
    };
    match (role, tensor.shape()) {
        (Role::Matrix(module), &[rows, cols]) => vec![matrix(module.clone(), 0, rows, cols)],
        // `…experts.gate_up_proj` becomes `…experts.7.gate_proj` and `…experts.7.up_proj`.
        (Role::GateUp(module), &[experts, both, cols]) => (0..experts)
            .flat_map(|e| {
                let (first, rows) = (e * both, both / 2);
                [("gate_proj", first), ("up_proj", first + rows)]
                    .map(|(name, first)| matrix(format!("{module}.{e}.{name}"), first, rows, cols))
            })
            .collect(),
        (Role::Down(module), &[experts, rows, cols]) => (0..experts)
            .map(|e| matrix(format!("{module}.{e}.down_proj"), e * rows, rows, cols))
            .collect(),
        _ => Vec::new(),
    }
}

/// The tensors that a unit makes, not placed yet.
fn outputs(unit: &Unit, sources: &[Tensor], format: Format) -> Vec<Output> {
    let output = |name: String, dtype: Dtype, shape: Vec<usize>| {
        let bits = shape.iter().product::<usize>() * dtype.bitsize();
        Output {
            name,
            dtype,
            shape,
            offset: 0,
            bytes: (bits / 8) as u64,
        }
    };
    match unit {
        Unit::Copy(source) => {
            let t = &sources[*source];
            vec![output(t.name().to_owned(), t.dtype(), t.shape().to_vec())]
        }
        Unit::Encode(matrices) => matrices
            .iter()
            .flat_map(|m| {
                let name = |what: &str| format!("{}.{what}", m.module);
                let (rows, cols) = (m.rows, m.cols);
                match format {
                    Format::Nvfp4 => vec![
                        output(name("weight"), Dtype::U8, vec![rows, cols / 2]),
                        output(
                            name("weight_scale"),
                            Dtype::F8_E4M3,
                            vec![rows, cols / nvfp4::BLOCK],
                        ),
                        output(name("weight_scale_2"), Dtype::F32, vec![]),
                    ],
                    Format::Fp8 => vec![
                        output(name("weight"), Dtype::F8_E4M3, vec![rows, cols]),
                        output(name("weight_scale"), Dtype::F32, vec![rows]),
                    ],
                }
            })
            .collect(),
    }
}

fn shards(jobs: impl Iterator<Item = Job>, size: u64) -> Vec<Shard> {
    let mut filled: Vec<(Vec<Job>, u64)> = Vec::new();
    for job in jobs {
        let bytes: u64 = job.outputs.iter().map(|o| o.bytes).sum();
        match filled.last_mut() {
            Some((jobs, sum)) if *sum + bytes <= size => {
                jobs.push(job);
                *sum += bytes;
            }
            _ => filled.push((vec![job], bytes)),
        }
    }
    let count = filled.len();
    let shards = filled.into_iter().enumerate().map(|(i, (jobs, _))| {
        let file = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        place(file, jobs)
    });
    shards.collect()
}

/// Gives every tensor of a file its place: those of wide elements first, so that each begins at a
/// multiple of its element, which other readers need.
fn place(file: String, mut jobs: Vec<Job>) -> Shard {
    let mut order: Vec<(usize, usize)> = jobs
        .iter()
        .enumerate()
        .flat_map(|(j, job)| (0..job.outputs.len()).map(move |o| (j, o)))
        .collect();
    order.sort_by_key(|(j, o)| std::cmp::Reverse(jobs[*j].outputs[*o].dtype.bitsize()));
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for (j, o) in &order {
        let output = &mut jobs[*j].outputs[*o];
        output.offset = end;
        end += output.bytes;
        let described = json!({
            "dtype": output.dtype,
            "shape": output.shape,
            "data_offsets": [output.offset, end],
        });
        header.insert(output.name.clone(), described);
    }
    let mut text = serde_json::Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let header = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
    let start = header.len() as u64;
    for output in jobs.iter_mut().flat_map(|j| &mut j.outputs) {
        output.offset += start;
    }
    Shard {
        file,
        header,
        jobs,
        bytes: start + end,
    }
}
