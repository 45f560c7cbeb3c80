//! How cached keys and values are stored: what was asked for, and what that is for a model.

use std::{fmt, str::FromStr};

use serde::Serialize;

/// The numbers that a cache is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// Four bytes: what models of fp32 compute in.
    #[serde(rename = "fp32")]
    F32,
    /// Two bytes.
    Bf16,
    /// E4M3, a byte, times a scale of the layer's keys or values.
    Fp8,
}

impl KvDtype {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }

    /// Its name, in fingerprints too.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvChoice {
    /// FP8 where the checkpoint's configuration asks for it, else the numbers it computes in.
    #[default]
    Auto,
    /// bf16, whatever the checkpoint asks for.
    Bf16,
    /// FP8, with the checkpoint's scales, or 1 where it has none.
    Fp8,
}

impl FromStr for KvChoice {
    type Err = String;

    /// By the names that vLLM has for them.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "fp8" | "fp8_e4m3" => Ok(Self::Fp8),
            other => Err(format!(
                "{other:.40?} is not one of auto, bf16 (bfloat16), fp8 (fp8_e4m3)"
            )),
        }
    }
}

impl KvChoice {
    /// What it is for a model that computes in `own` and whose configuration asks for FP8 or not.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn resolve(self, own: KvDtype, asks_for_fp8: bool) -> Result<KvDtype, String> {
        match self {
            Self::Fp8 => Ok(KvDtype::Fp8),
            Self::Auto if asks_for_fp8 => Ok(KvDtype::Fp8),
            Self::Auto => Ok(own),
            Self::Bf16 if own == KvDtype::Bf16 => Ok(own),
            Self::Bf16 => Err(format!(
                "bf16: this checkpoint is computed in {own}; give auto or fp8"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_vllms() {
        for (text, choice) in [
            ("auto", KvChoice::Auto),
            ("bf16", KvChoice::Bf16),
            ("bfloat16", KvChoice::Bf16),
            ("fp8", KvChoice::Fp8),
            ("fp8_e4m3", KvChoice::Fp8),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        for text in ["", "FP8", "fp8_e5m2", "int8", "nvfp4"] {
            let error = text.parse::<KvChoice>().unwrap_err();
            assert!(error.contains("fp8_e4m3"), "{error}");
        }
    }

    #[test]
    fn auto_is_what_the_checkpoint_wants() {
        for own in [KvDtype::F32, KvDtype::Bf16] {
            assert_eq!(KvChoice::Auto.resolve(own, false), Ok(own));
            assert_eq!(KvChoice::Auto.resolve(own, true), Ok(KvDtype::Fp8));
            assert_eq!(KvChoice::Fp8.resolve(own, false), Ok(KvDtype::Fp8));
        }
        let asked = KvChoice::Bf16.resolve(KvDtype::Bf16, true);
        assert_eq!(asked, Ok(KvDtype::Bf16));
        let error = KvChoice::Bf16.resolve(KvDtype::F32, false).unwrap_err();
        assert!(error.contains("computed in fp32"), "{error}");
    }
}
