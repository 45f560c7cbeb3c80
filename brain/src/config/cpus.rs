//! Cores by their numbers, as `0-3,8`.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Reads a list of cores and of ranges of them. None is named twice, and each is one that this
/// process may run on.
///
/// # Errors
/// What is wrong with the list, to stand behind the setting's name.
pub(super) fn parse(text: &str) -> Result<Vec<usize>, String> {
    let mut cores = Vec::new();
    let parts = text.split(',').map(str::trim);
    for part in parts.filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            let number: Option<usize> = text.trim().parse().ok();
            number.filter(|n| *n < CpuSet::MAX_CPU)
        };
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => cores.extend(first..=last),
            _ => return Err(format!("{part:?} is neither a core nor a range like 0-3")),
        }
    }
    let allowed =
        sched_getaffinity(None).map_err(|error| format!("cannot ask for cores: {error}"))?;
    for (i, core) in cores.iter().enumerate() {
        if cores[..i].contains(core) {
            return Err(format!("core {core} is named twice"));
        }
        if !allowed.is_set(*core) {
            return Err(format!(
                "core {core} is not there, or not for this process; `taskset -cp $$` lists those that are"
            ));
        }
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_of_cores_that_are_there() {
        let allowed = sched_getaffinity(None).unwrap();
        let here = (0..CpuSet::MAX_CPU)
            .find(|core| allowed.is_set(*core))
            .unwrap();
        assert!(parse("").unwrap().is_empty());
        assert_eq!(parse(&format!(" {here} ,")).unwrap(), [here]);
        assert_eq!(parse(&format!("{here}-{here}")).unwrap(), [here]);
        for (text, problem) in [
            ("x", "\"x\" is neither"),
            ("3-1", "\"3-1\" is neither"),
            ("0-99999999999", "is neither"),
            ("-1", "is neither"),
            ("1023", "core 1023 is not there"),
            (&format!("{here},{here}"), "named twice"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
