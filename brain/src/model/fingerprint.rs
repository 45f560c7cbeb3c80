//! What tokens are a function of, as one hash: every byte of the text weights, the numbers of the
//! configuration, and the recipe by which a back end computes.

use std::fmt;

use twox_hash::XxHash3_128;

use super::{
    checkpoint::Tensor,
    names::text_name,
    plan::{KvSource, Plan, Rope},
};

/// Equal fingerprints give equal tokens for equal requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hash of a target's weights and numbers, without a back end's recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The fingerprint of this model computed by `recipe`.
    pub fn with_recipe(&self, recipe: &str) -> Fingerprint {
        let mut hash = blake3::Hasher::new_derive_key("marathon brain fingerprint v1");
        hash.update(&self.0);
        part(&mut hash, recipe.as_bytes());
        Fingerprint(*hash.finalize().as_bytes())
    }
}

/// Hash of a tensor's bytes, added piece by piece.
///
/// XXH3 runs at the speed of memory, which no cryptographic hash does, and a load has to be as fast as
/// the disk. It tells apart files that differ by accident; whoever may write the weights needs no
/// collision to change what the model says.
#[derive(Default)]
pub(super) struct BytesHash(XxHash3_128);

impl BytesHash {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(super) fn finish(&self) -> u128 {
        self.0.finish_128()
    }
}

/// Digest of the text tensors, each with the [hash of its bytes](BytesHash), and of a plan's
/// [`numbers`].
///
/// Their order does not matter, nor which file they are in.
pub(super) fn digest(hashed: Vec<(&Tensor, u128)>, numbers: &str) -> Digest {
    let name = |t: &Tensor| text_name(t.name()).unwrap_or(t.name()).to_owned();
    let mut hashed: Vec<_> = hashed.into_iter().map(|(t, h)| (name(t), t, h)).collect();
    hashed.sort_by(|a, b| a.0.cmp(&b.0));
    let mut hash = blake3::Hasher::new_derive_key("marathon brain model digest v2");
    for (name, tensor, bytes) in &hashed {
        part(&mut hash, name.as_bytes());
        part(
            &mut hash,
            format!("{:?} {:?}", tensor.dtype(), tensor.shape()).as_bytes(),
        );
        hash.update(&bytes.to_le_bytes());
    }
    part(&mut hash, numbers.as_bytes());
    Digest(*hash.finalize().as_bytes())
}

/// Adds bytes with their length, so that two lists of parts never look the same.
fn part(hash: &mut blake3::Hasher, bytes: &[u8]) {
    hash.update(&(bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Every number of the plan that enters the arithmetic. What is written here is a format: a
/// changed line is another fingerprint for every model.
pub fn numbers(plan: &Plan) -> String {
    let rope = |r: &Rope| format!("{}/{}/{}", r.theta, r.partial, r.factor);
    let mut text = format!(
        "hidden {} heads {} vocab {} window {} eps {} softcap {:?} rope {} {}\n",
        plan.hidden,
        plan.heads,
        plan.vocab,
        plan.window,
        plan.eps,
        plan.softcap,
        rope(&plan.rope_sliding),
        rope(&plan.rope_full),
    );
    if let Some(p) = plan.per_layer_input {
        text += &format!("per-layer {} {}\n", p.dim, p.vocab);
    }
    if let Some(m) = plan.moe {
        text += &format!("experts {} {} {}\n", m.experts, m.top_k, m.intermediate);
    }
    for layer in &plan.layers {
        let kv = match layer.kv {
            KvSource::Own { values_only } => format!("own {values_only}"),
            KvSource::Shared { owner } => format!("of {owner}"),
            KvSource::Target => "target".to_owned(),
        };
        let kind = layer.kind.name();
        let (dim, heads, wide) = (layer.head_dim, layer.kv_heads, layer.intermediate);
        text += &format!("{kind} {dim} {heads} {kv} {wide}\n");
    }
    text
}
