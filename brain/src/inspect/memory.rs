//! What a model's keys and values take, and how many sequences a device's memory holds.

use serde::Serialize;

use crate::{
    model::{
        kv_dtype::KvDtype,
        plan::{Kind, KvSource, Plan},
    },
    size::show,
};

/// Slots of a cache page.
const PAGE: u64 = 16;
/// Rows that a sequence computes beside its window while it decodes: the last token and drafts.
const ROWS: u64 = 17;

/// The forms that are planned with, larger first.
const FORMS: [KvDtype; 2] = [KvDtype::Bf16, KvDtype::Fp8];

/// The cache of all layers of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvGroup {
    /// `full_attention` or `sliding_attention`.
    pub kind: &'static str,
    /// Layers that own a cache.
    pub layers: usize,
    /// Of these, layers that store values only and form the keys from them.
    pub values_only: usize,
    /// Elements of the keys and values of a token.
    pub elements: u64,
    /// Elements that are stored of them.
    pub stored_elements: u64,
    /// Slots that a sequence of any length keeps; none where every token is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<u64>,
    /// Bytes of a token in bf16.
    pub bytes_bf16: u64,
    /// Bytes of a token in FP8.
    pub bytes_fp8: u64,
}

impl KvGroup {
    fn new(plan: &Plan, kind: Kind) -> Self {
        let (mut layers, mut values_only, mut elements, mut stored) = (0, 0, 0, 0);
        for layer in plan.layers.iter().filter(|l| l.kind == kind) {
            let KvSource::Own { values_only: alone } = layer.kv else {
                continue;
            };
            let width = (layer.kv_heads * layer.head_dim) as u64;
            layers += 1;
            values_only += usize::from(alone);
            elements += 2 * width;
            stored += if alone { width } else { 2 * width };
        }
        let slots = (kind == Kind::Sliding).then(|| {
            // A window need not begin at the start of a page.
            (plan.window as u64 - 1 + ROWS).next_multiple_of(PAGE) + PAGE
        });
        Self {
            kind: kind.name(),
            layers,
            values_only,
            elements,
            stored_elements: stored,
            slots,
            bytes_bf16: stored * KvDtype::Bf16.bytes() as u64,
            bytes_fp8: stored * KvDtype::Fp8.bytes() as u64,
        }
    }

    /// Bytes of a token.
    pub fn per_token(&self, form: KvDtype) -> u64 {
        self.stored_elements * form.bytes() as u64
    }
}

/// The cache of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kv {
    /// Layers that keep every token.
    pub full: KvGroup,
    /// Layers that keep a window.
    pub sliding: KvGroup,
}

impl Kv {
    /// Of a model.
    pub fn of(plan: &Plan) -> Self {
        Self {
            full: KvGroup::new(plan, Kind::Full),
            sliding: KvGroup::new(plan, Kind::Sliding),
        }
    }

    /// What a sequence keeps whatever its length, once it is longer than the window.
    pub fn fixed(&self, form: KvDtype) -> u64 {
        self.sliding.slots.unwrap_or(0) * self.sliding.per_token(form)
    }

    /// What a sequence of `tokens` takes.
    pub fn sequence(&self, tokens: u64, form: KvDtype) -> u64 {
        let full = tokens.next_multiple_of(PAGE) * self.full.per_token(form);
        let slots = self.sliding.slots.unwrap_or(0);
        let kept = slots.min(tokens.next_multiple_of(PAGE) + PAGE);
        full.saturating_add(kept * self.sliding.per_token(form))
    }
}

/// What is asked of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Its memory, in bytes.
    pub memory: u64,
    /// The share of it that weights and cache may take.
    pub utilization: f64,
    /// Tokens of a sequence.
    pub tokens: u64,
}

/// What fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// The device's memory.
    pub memory: u64,
    /// The share that is planned with.
    pub utilization: f64,
    /// What that is.
    pub usable: u64,
    /// The model's weights as they are stored.
    pub weights: u64,
    /// The drafter's.
    pub drafter: u64,
    /// What is left for keys and values; negative when the weights alone are too large.
    pub left: i64,
    /// Tokens of a sequence.
    pub tokens: u64,
    /// By form of the cache.
    pub fits: Vec<Fit>,
}

impl MemoryPlan {
    /// What keeps the model from being served so, if anything does. `asked`: the length was asked
    /// for, else a shorter one will do.
    pub fn shortage(&self, asked: bool) -> Option<String> {
        let left = show(self.left.unsigned_abs());
        if self.left < 0 {
            return Some(format!(
                "has weights for which the device has {left} too little"
            ));
        }
        let (served, wanted): (fn(&Fit) -> bool, String) = match asked {
            true => (
                |fit| fit.sequences > 0,
                format!("one of {} tokens", self.tokens),
            ),
            false => (|fit| fit.longest > 0, "any sequence".to_owned()),
        };
        if self.fits.iter().any(served) {
            return None;
        }
        Some(format!(
            "leaves {left} beside its weights, too little for {wanted}"
        ))
    }
}

/// What fits with one form of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// How the cache is stored.
    pub kv: KvDtype,
    /// Bytes of a sequence of the asked length.
    pub sequence: u64,
    /// Such sequences at a time.
    pub sequences: u64,
    /// Tokens of the longest sequence that fits alone, at most what the model was made for.
    pub longest: u64,
}

/// Divides a device's memory between weights and cache.
pub fn plan(request: &Request, kv: &Kv, weights: u64, drafter: u64, longest: u64) -> MemoryPlan {
    let usable = (request.memory as f64 * request.utilization) as u64;
    let left = usable as i64 - weights as i64 - drafter as i64;
    let room = left.max(0) as u64;
    let fits = FORMS.map(|form| {
        let sequence = kv.sequence(request.tokens, form);
        // The largest number of tokens whose sequence fits: sequences grow with their length.
        let (mut low, mut high) = (0, longest);
        while low < high {
            let middle = (low + high).div_ceil(2);
            match kv.sequence(middle, form) <= room {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        Fit {
            kv: form,
            sequence,
            sequences: room.checked_div(sequence).unwrap_or(0),
            longest: low,
        }
    });
    MemoryPlan {
        memory: request.memory,
        utilization: request.utilization,
        usable,
        weights,
        drafter,
        left,
        tokens: request.tokens,
        fits: fits.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::parse_target;

    /// The largest model: 50 sliding layers of 16 heads, 10 full ones of 4 that store values only.
    fn large() -> Plan {
        parse_target(
            br#"{"model_type":"gemma4_text","vocab_size":262144,"hidden_size":5376,
                "intermediate_size":21504,"num_hidden_layers":60,"num_attention_heads":32,
                "num_key_value_heads":16,"num_global_key_value_heads":4,"head_dim":256,
                "attention_k_eq_v":true,"sliding_window":1024,"max_position_embeddings":262144}"#,
        )
        .unwrap()
    }

    #[test]
    fn a_cache_is_counted_by_kind_of_layer() {
        let kv = Kv::of(&large());
        assert_eq!((kv.full.layers, kv.full.values_only), (10, 10));
        assert_eq!(
            (kv.full.elements, kv.full.stored_elements),
            (40_960, 20_480)
        );
        assert_eq!((kv.sliding.layers, kv.sliding.values_only), (50, 0));
        assert_eq!(kv.sliding.elements, 409_600);
        // 1023 keys before the token, 17 rows, and a page because windows begin anywhere.
        assert_eq!(kv.sliding.slots, Some(1056));
        assert_eq!(kv.fixed(KvDtype::Bf16), 1056 * 819_200);
        let (one, two) = (
            kv.sequence(4096, KvDtype::Bf16),
            kv.sequence(4112, KvDtype::Bf16),
        );
        assert_eq!(two - one, 16 * 40_960);
        assert_eq!(kv.sequence(4096, KvDtype::Fp8) * 2, one);
        assert!(kv.sequence(16, KvDtype::Bf16) < kv.fixed(KvDtype::Bf16));
    }

    #[test]
    fn what_fits_is_what_is_left_by_the_weights() {
        let kv = Kv::of(&large());
        let request = Request {
            memory: 80 << 30,
            utilization: 0.5,
            tokens: 32_768,
        };
        let plan = super::plan(&request, &kv, 20 << 30, 1 << 30, 262_144);
        assert_eq!((plan.usable, plan.left), (40 << 30, 19 << 30));
        for fit in &plan.fits {
            assert_eq!(fit.sequence, kv.sequence(32_768, fit.kv));
            assert_eq!(fit.sequences, (19 << 30) / fit.sequence);
            assert_eq!(fit.longest, 262_144, "{fit:?}");
        }
        let small = super::plan(&request, &kv, 37 << 30, 0, 262_144);
        let fit = &small.fits[0];
        assert!(kv.sequence(fit.longest, fit.kv) <= 3 << 30);
        assert!(kv.sequence(fit.longest + 1, fit.kv) > 3 << 30);
        let none = super::plan(&request, &kv, 50 << 30, 0, 262_144);
        assert_eq!(none.left, -(10 << 30));
        assert!(none.fits.iter().all(|f| f.sequences == 0 && f.longest == 0));
    }
}
