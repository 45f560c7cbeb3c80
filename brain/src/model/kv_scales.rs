//! Calibrated scales of an FP8 cache, which quantised checkpoints carry under several names.
//!
//! A key is stored as `e4m3(k / key)` and read back times `key`; values likewise.

use super::{
    checkpoint::{Dtype, Tensor},
    names::{NameError, Unused},
    weight::codes::{E4M3_MAX, element},
};

/// What a layer's FP8 cache divides by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// For keys, after norm and rotary embedding.
    pub key: f32,
    /// For values.
    pub value: f32,
}

impl Default for KvScales {
    /// Keys and values are normed per head: without calibration they fit E4M3 as they are.
    fn default() -> Self {
        Self {
            key: 1.0,
            value: 1.0,
        }
    }
}

/// The scales of a layer, as the file has them.
#[derive(Clone, Debug, Default)]
pub struct KvScaleTensors {
    key: Option<Tensor>,
    value: Option<Tensor>,
}

/// Where they are looked for, `x` being `k` or `v`: ModelOpt, compressed-tensors, other exports.
const PLACES: [&str; 4] = [
    "self_attn.x_proj.x_scale",
    "self_attn.x_scale",
    "self_attn.attn.x_scale",
    "attn.x_scale",
];

/// One for both, in older files.
const SHARED: [&str; 3] = [
    "self_attn.kv_scale",
    "self_attn.attn.kv_scale",
    "attn.kv_scale",
];

impl KvScaleTensors {
    /// Uses up the scales of a layer under whatever name.
    pub(super) fn take(unused: &mut Unused, layer: usize) -> Result<Self, NameError> {
        let mut find = |name: &str| match unused.take_any(&format!("layers.{layer}.{name}")) {
            Some(t) if !is_float(t.dtype()) => {
                Err(NameError::dtype(&t, "one fp32, bf16 or fp16 number"))
            }
            Some(t) if t.shape().iter().any(|n| *n != 1) => Err(NameError::shape(&t, vec![1])),
            found => Ok(found),
        };
        let mut first = |names: &[String]| {
            for name in names {
                if let Some(tensor) = find(name)? {
                    return Ok(Some(tensor));
                }
            }
            Ok(None)
        };
        let spelled = |x: &str| PLACES.map(|place| place.replace('x', x));
        let key = first(&spelled("k"))?;
        let value = first(&spelled("v"))?;
        let shared = first(&SHARED.map(str::to_owned))?;
        Ok(Self {
            key: key.or_else(|| shared.clone()),
            value: value.or(shared),
        })
    }

    /// How many of the two the file has.
    pub fn count(&self) -> usize {
        usize::from(self.key.is_some()) + usize::from(self.value.is_some())
    }

    /// The same if they are positive finite numbers.
    pub(super) fn checked(self) -> Result<Self, NameError> {
        self.values().map(|_| self)
    }

    fn values(&self) -> Result<(f32, f32), NameError> {
        let read = |tensor: &Option<Tensor>| match tensor {
            None => Ok(1.0),
            Some(t) => match element(t, 0) {
                scale if scale > 0.0 && scale.is_finite() => Ok(scale),
                scale => Err(NameError::value(
                    t,
                    format!("the scale is {scale}, not a positive finite number"),
                )),
            },
        };
        Ok((read(&self.key)?, read(&self.value)?))
    }

    /// The scales to use. `values_only`: keys are formed from the stored values, so that a key's
    /// scale has no use, and a value's must not be one that was made for something smaller.
    pub(super) fn resolve(
        &self,
        head_dim: usize,
        values_only: bool,
    ) -> Result<KvScales, NameError> {
        let (key, value) = self.values()?;
        // A value has a mean square of 1 over its head, so that no element is above this.
        let largest = (head_dim as f32).sqrt();
        Ok(match values_only {
            false => KvScales { key, value },
            true if E4M3_MAX * value >= largest => KvScales { key: 1.0, value },
            true => KvScales::default(),
        })
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}
