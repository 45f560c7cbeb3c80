//! What a model is made of: every text tensor that its plan asks for, by name and shape.
//!
//! The loader takes tensors one by one and stops at the first that is wrong. Whoever wants the
//! whole picture (what is missing, how large it will be, what can be quantised) starts from here.

use super::plan::{DraftHead, DraftPlan, KvSource, Moe, Plan};

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The table of token embeddings.
    Embedding,
    /// The table of per-layer embeddings.
    PerLayerTable,
    /// The output head, where it is not the embedding.
    Head,
    /// Projections of attention.
    Attention,
    /// The dense feed-forward block.
    Dense,
    /// The experts.
    Experts,
    /// The choice of experts.
    Router,
    /// Projections of the per-layer input.
    PerLayerInput,
    /// Norms and scalars.
    Norm,
    /// Projections between a drafter and its target.
    Bridge,
    /// Clusters of a drafter's vocabulary.
    Clusters,
}

/// How a slot may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// One tensor of plain numbers, named as the slot.
    Plain,
    /// A matrix: `NAME.weight` of plain numbers, or a quantised form beside its scales.
    Matrix,
    /// The matrices of all experts of a layer: `NAME.gate_up_proj` and `NAME.down_proj` for all of
    /// them, or `NAME.7.gate_proj`, `up_proj` and `down_proj` for each.
    Experts(Moe),
    /// Token ids.
    Tokens,
}

/// A place of the model that tensors of a checkpoint fill.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// Name without the decoder's prefix; of a matrix, without `.weight`.
    pub name: String,
    /// Sizes, outermost first; of experts, those of the down projections.
    pub shape: Vec<usize>,
    /// What it is for.
    pub part: Part,
    /// How it may be stored.
    pub storage: Storage,
    /// Whether a checkpoint may lack it.
    pub optional: bool,
}

impl Slot {
    /// Elements.
    pub fn elements(&self) -> u64 {
        let shape: u64 = self.shape.iter().map(|n| *n as u64).product();
        match self.storage {
            // Gate and up are each as large as down.
            Storage::Experts(_) => 3 * shape,
            _ => shape,
        }
    }
}

/// The slots of a model, and prefixes of tensors that files may carry though nothing reads them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// The slots, embedding first, layer by layer.
    pub slots: Vec<Slot>,
    /// Names that begin so may be there and are not used.
    pub unread: Vec<String>,
    /// Layers of the model.
    pub layers: usize,
}

impl Inventory {
    /// What a target is made of.
    pub fn target(plan: &Plan) -> Self {
        let mut inventory = Self::default();
        inventory.matrix("embed_tokens", &[plan.vocab, plan.hidden], Part::Embedding);
        inventory.slots.push(Slot {
            name: "lm_head".into(),
            shape: vec![plan.vocab, plan.hidden],
            part: Part::Head,
            storage: Storage::Matrix,
            optional: true,
        });
        if let Some(p) = plan.per_layer_input {
            let width = plan.layers.len() * p.dim;
            inventory.matrix(
                "embed_tokens_per_layer",
                &[p.vocab, width],
                Part::PerLayerTable,
            );
            inventory.matrix(
                "per_layer_model_projection",
                &[width, plan.hidden],
                Part::PerLayerInput,
            );
            inventory.plain("per_layer_projection_norm.weight", &[p.dim], Part::Norm);
        }
        inventory.layers(plan);
        inventory.plain("norm.weight", &[plan.hidden], Part::Norm);
        inventory
    }

    /// What an assistant is made of.
    pub fn assistant(plan: &DraftPlan) -> Self {
        let text = &plan.text;
        let mut inventory = Self::default();
        let (width, backbone) = (text.hidden, plan.backbone);
        inventory.matrix("pre_projection", &[width, 2 * backbone], Part::Bridge);
        inventory.matrix("post_projection", &[backbone, width], Part::Bridge);
        inventory.matrix("embed_tokens", &[text.vocab, width], Part::Embedding);
        inventory.unread.push("lm_head.".into());
        inventory.layers(text);
        inventory.plain("norm.weight", &[width], Part::Norm);
        match plan.head {
            DraftHead::Dense => inventory.unread.push("masked_embedding.".into()),
            DraftHead::Centroids { count, .. } => {
                inventory.matrix(
                    "masked_embedding.centroids",
                    &[count, width],
                    Part::Clusters,
                );
                inventory.slots.push(Slot {
                    name: "masked_embedding.token_ordering".into(),
                    shape: vec![text.vocab],
                    part: Part::Clusters,
                    storage: Storage::Tokens,
                    optional: false,
                });
            }
        }
        inventory
    }

    fn add(&mut self, name: String, shape: &[usize], part: Part, storage: Storage) {
        self.slots.push(Slot {
            name,
            shape: shape.to_vec(),
            part,
            storage,
            optional: false,
        });
    }

    fn plain(&mut self, name: &str, shape: &[usize], part: Part) {
        self.add(name.to_owned(), shape, part, Storage::Plain);
    }

    fn matrix(&mut self, name: &str, shape: &[usize], part: Part) {
        self.add(name.to_owned(), shape, part, Storage::Matrix);
    }

    fn layers(&mut self, plan: &Plan) {
        self.layers = plan.layers.len();
        for i in 0..plan.layers.len() {
            self.attention(plan, i);
            self.feed_forward(plan, i);
        }
    }

    fn attention(&mut self, plan: &Plan, i: usize) {
        let layer = &plan.layers[i];
        let hidden = plan.hidden;
        let q = plan.heads * layer.head_dim;
        let kv = layer.kv_heads * layer.head_dim;
        let name = |part: &str| format!("layers.{i}.self_attn.{part}");
        self.matrix(&name("q_proj"), &[q, hidden], Part::Attention);
        self.matrix(&name("o_proj"), &[hidden, q], Part::Attention);
        self.plain(&name("q_norm.weight"), &[layer.head_dim], Part::Norm);
        if let KvSource::Own { values_only } = layer.kv {
            self.matrix(&name("k_proj"), &[kv, hidden], Part::Attention);
            self.plain(&name("k_norm.weight"), &[layer.head_dim], Part::Norm);
            if !values_only {
                self.matrix(&name("v_proj"), &[kv, hidden], Part::Attention);
            }
        } else {
            for part in ["k_proj.", "v_proj.", "k_norm.", "v_norm."] {
                self.unread.push(name(part));
            }
        }
    }

    fn feed_forward(&mut self, plan: &Plan, i: usize) {
        let (hidden, wide) = (plan.hidden, plan.layers[i].intermediate);
        let name = |part: &str| format!("layers.{i}.{part}");
        for norm in [
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "pre_feedforward_layernorm.weight",
            "post_feedforward_layernorm.weight",
        ] {
            self.plain(&name(norm), &[hidden], Part::Norm);
        }
        self.matrix(&name("mlp.gate_proj"), &[wide, hidden], Part::Dense);
        self.matrix(&name("mlp.up_proj"), &[wide, hidden], Part::Dense);
        self.matrix(&name("mlp.down_proj"), &[hidden, wide], Part::Dense);
        self.plain(&name("layer_scalar"), &[1], Part::Norm);
        if let Some(p) = plan.per_layer_input {
            let part = Part::PerLayerInput;
            self.matrix(&name("per_layer_input_gate"), &[p.dim, hidden], part);
            self.matrix(&name("per_layer_projection"), &[hidden, p.dim], part);
            let norm = name("post_per_layer_input_norm.weight");
            self.plain(&norm, &[hidden], Part::Norm);
        }
        if let Some(m) = plan.moe {
            self.matrix(&name("router.proj"), &[m.experts, hidden], Part::Router);
            self.plain(&name("router.scale"), &[hidden], Part::Router);
            let scale = name("router.per_expert_scale");
            self.plain(&scale, &[m.experts], Part::Router);
            let shape = [m.experts, hidden, m.intermediate];
            self.add(name("experts"), &shape, Part::Experts, Storage::Experts(m));
            for norm in [
                "pre_feedforward_layernorm_2.weight",
                "post_feedforward_layernorm_1.weight",
                "post_feedforward_layernorm_2.weight",
            ] {
                self.plain(&name(norm), &[hidden], Part::Norm);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::model::{checkpoint::Checkpoint, config, names::text_name};

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/goldens")
            .join(name)
    }

    /// Names and shapes of a checkpoint of plain numbers.
    fn tensors(dir: &Path) -> Vec<(String, Vec<usize>)> {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let mut all: Vec<_> = checkpoint
            .tensors()
            .filter_map(|t| Some((text_name(t.name())?.to_owned(), t.shape().to_vec())))
            .collect();
        all.sort();
        all
    }

    fn names(inventory: &Inventory) -> Vec<(String, Vec<usize>)> {
        let slots = inventory.slots.iter().filter(|s| !s.optional);
        let mut all: Vec<_> = slots
            .flat_map(|s| match s.storage {
                Storage::Matrix => vec![(format!("{}.weight", s.name), s.shape.clone())],
                Storage::Experts(m) => {
                    let hidden = s.shape[1];
                    let wide = vec![m.experts, 2 * m.intermediate, hidden];
                    vec![
                        (format!("{}.gate_up_proj", s.name), wide),
                        (format!("{}.down_proj", s.name), s.shape.clone()),
                    ]
                }
                _ => vec![(s.name.clone(), s.shape.clone())],
            })
            .collect();
        all.sort();
        all
    }

    #[test]
    fn every_variant_is_made_of_exactly_its_tensors() {
        for name in ["e2b", "e4b", "12b", "26b", "31b", "all"] {
            let dir = golden(name);
            let plan = config::parse_target(&std::fs::read(dir.join("config.json")).unwrap());
            assert_eq!(
                names(&Inventory::target(&plan.unwrap())),
                tensors(&dir),
                "{name}"
            );
            let dir = dir.join("assistant");
            let plan = config::parse_assistant(&std::fs::read(dir.join("config.json")).unwrap());
            assert_eq!(
                names(&Inventory::assistant(&plan.unwrap())),
                tensors(&dir),
                "{name}"
            );
        }
    }
}
