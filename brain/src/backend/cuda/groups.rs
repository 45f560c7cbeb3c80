//! How rows are cut into pieces for attention: spans of a few rows of one sequence, and groups of
//! spans that one launch computes. No cut changes a bit.

use marathon_kernels::abi::splits_of_row;

use crate::backend::arena::{RowSet, Span};

/// Rows of a span at most. Attention cuts a span's query vectors into blocks of as many as fit, so a
/// long span of a prompt leaves no block half empty.
const SPAN: usize = 64;

/// Keys of a split of sliding layers.
const SLIDING_SPLIT: usize = 128;

/// Spans that one launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Group {
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) first_span: usize,
    pub(super) spans: usize,
    /// Rows of its tallest span.
    pub(super) height: usize,
    /// Splits that a span sees at most, rounded up: full, sliding.
    pub(super) splits: [usize; 2],
    /// The run that its rows are of.
    pub(super) run: Option<usize>,
}

/// More rows of one sequence than a span has: a kernel for many rows may take them all at once, in
/// place of the groups that are of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Run {
    pub(super) seq: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// Keys in front of these positions are seen, by its first row and by its last.
    pub(super) ends: [usize; 2],
}

impl Run {
    /// The positions that its rows see, of the last `window` or of all.
    pub(super) fn keys(&self, window: Option<usize>) -> std::ops::Range<usize> {
        let first = window.map_or(0, |window| self.ends[0].saturating_sub(window));
        first..self.ends[1]
    }
}

/// How a step's rows are cut.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Cut {
    pub(super) groups: Vec<Group>,
    pub(super) runs: Vec<Run>,
}

/// Splits that the rows of a span see at most, whose ends are in `first ..= last`: full, sliding.
///
/// The windows of all rows together are counted as the most splits that they can touch, wherever they
/// lie, so that launches of a growing sequence repeat.
pub(super) fn splits(first: usize, last: usize, window: usize) -> [usize; 2] {
    let sliding = match first > window {
        true => (window + last - first) / SLIDING_SPLIT + 2,
        false => splits_of_row(0, last, true),
    };
    [splits_of_row(0, last, false), sliding]
}

/// A number of splits rounded up so that few different ones are left: launches of a growing
/// sequence repeat. Blocks beyond a row's own splits leave at once.
pub(super) fn bucket(splits: usize) -> usize {
    let step = (splits.next_power_of_two() / 4).max(1);
    splits.next_multiple_of(step)
}

/// Cuts rows into spans and these into groups of at most `most` rows.
pub(super) fn group(set: &RowSet, most: usize, window: usize) -> (Vec<Span>, Cut) {
    let mut spans = Vec::with_capacity(set.spans.len());
    let mut runs = Vec::new();
    let mut run_of = Vec::with_capacity(set.spans.len());
    for span in &set.spans {
        let rows = &set.rows[span.start..span.start + span.count];
        let run = (span.count > SPAN).then(|| {
            runs.push(Run {
                seq: span.seq,
                first_row: span.start,
                rows: span.count,
                ends: [rows[0].end, rows[span.count - 1].end],
            });
            runs.len() - 1
        });
        for from in (0..span.count).step_by(SPAN.min(most)) {
            spans.push(Span {
                seq: span.seq,
                start: span.start + from,
                count: (span.count - from).min(SPAN.min(most)),
            });
            run_of.push(run);
        }
    }
    let mut groups: Vec<Group> = Vec::new();
    for (i, span) in spans.iter().enumerate() {
        let rows = &set.rows[span.start..span.start + span.count];
        let seen = splits(rows[0].end, rows[span.count - 1].end, window);
        match groups.last_mut() {
            Some(group) if group.run == run_of[i] && group.rows + span.count <= most => {
                group.rows += span.count;
                group.spans += 1;
                group.height = group.height.max(span.count);
                for (a, b) in group.splits.iter_mut().zip(seen) {
                    *a = (*a).max(b);
                }
            }
            _ => groups.push(Group {
                first_row: span.start,
                rows: span.count,
                first_span: i,
                spans: 1,
                height: span.count,
                splits: seen,
                run: run_of[i],
            }),
        }
    }
    for group in &mut groups {
        group.splits = group.splits.map(bucket);
    }
    (spans, Cut { groups, runs })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::arena::Row;

    fn rows(counts: &[(usize, usize)]) -> RowSet {
        let mut set = RowSet::default();
        for (seq, &(start, count)) in counts.iter().enumerate() {
            set.spans.push(Span {
                seq,
                start: set.rows.len(),
                count,
            });
            set.rows.extend((start..start + count).map(|position| Row {
                token: 0,
                position,
                end: position + 1,
                seq,
            }));
        }
        set
    }

    #[test]
    fn every_row_is_in_one_span_of_one_group() {
        for most in [9, 20, 64] {
            let set = rows(&[(0, 1), (100, 40), (7, 9), (5000, 3)]);
            let (spans, Cut { groups, runs }) = group(&set, most, 512);
            assert!(runs.is_empty());
            let mut next = 0;
            for span in &spans {
                assert_eq!(span.start, next);
                assert!(span.count <= SPAN);
                assert!(
                    set.rows[span.start..span.start + span.count]
                        .iter()
                        .all(|r| r.seq == span.seq)
                );
                next += span.count;
            }
            assert_eq!(next, set.rows.len());
            let (mut row, mut span) = (0, 0);
            for g in &groups {
                assert_eq!((g.first_row, g.first_span), (row, span));
                assert!(g.rows <= most);
                row += g.rows;
                span += g.spans;
            }
            assert_eq!((row, span), (set.rows.len(), spans.len()));
        }
    }

    #[test]
    fn a_group_has_room_for_every_split_of_its_rows() {
        let set = rows(&[(4000, 30), (3, 2)]);
        let (_, Cut { groups, .. }) = group(&set, 64, 512);
        for r in &set.rows {
            let [full, sliding] = splits(r.end, r.end, 512);
            assert!(groups[0].splits[0] >= full && groups[0].splits[1] >= sliding);
        }
    }

    #[test]
    fn there_is_room_for_every_split_that_rows_together_touch() {
        let split = |key: usize| key / SLIDING_SPLIT;
        for window in 1..=1100 {
            for rows in [1, 9, 24, 48, SPAN] {
                for first in window + 1..=window + SLIDING_SPLIT {
                    let last = first + rows - 1;
                    let touched = split(last - 1) - split(first - window) + 1;
                    assert!(
                        splits(first, last, window)[1] >= touched,
                        "{window} {rows} {first}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_run_has_groups_of_its_own() {
        let set = rows(&[(700, 1), (1000, 130), (0, 64), (5, 65)]);
        let (_, cut) = group(&set, 64, 512);
        let [first, second] = &cut.runs[..] else {
            panic!("{:?}", cut.runs);
        };
        assert_eq!((first.seq, first.first_row, first.rows), (1, 1, 130));
        assert_eq!((second.seq, second.first_row, second.rows), (3, 195, 65));
        assert_eq!(first.keys(None), 0..1130);
        assert_eq!(first.keys(Some(512)), 489..1130);
        assert_eq!(second.keys(Some(512)), 0..70);
        let rows_of = |run| -> usize {
            let groups = cut.groups.iter().filter(|g| g.run == run);
            groups.map(|g| g.rows).sum()
        };
        assert_eq!(rows_of(Some(0)), 130);
        assert_eq!(rows_of(Some(1)), 65);
        assert_eq!(rows_of(None), 65);
    }

    #[test]
    fn buckets_are_few_and_never_small() {
        let all: std::collections::BTreeSet<usize> = (1..200).map(bucket).collect();
        assert!((1..200).all(|n| bucket(n) >= n));
        assert!(all.len() < 28, "{all:?}");
    }
}
