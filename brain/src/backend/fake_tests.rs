//! What the fake device promises to the tests that run on it.

use std::sync::Arc;

use super::*;
use crate::sched::types::{BlockTables, SeqId};

fn rows(tokens: Vec<TokenId>, start: usize, generated: u32, drafts: usize) -> SeqStep {
    let prompt_len = start + tokens.len() - drafts - generated as usize;
    SeqStep {
        seq: SeqId(0),
        tokens,
        start,
        tables: BlockTables {
            full: vec![BlockId(3), BlockId(1)],
            sliding: vec![BlockId(0), BlockId(5)],
            sliding_first: 0,
        },
        sample: Some(SampleStep {
            drafts,
            params: Arc::new(SamplingParams::greedy(8)),
            generated,
            history: Vec::new(),
            prompt_len,
            next_drafts: 2,
            masks: Vec::new(),
        }),
    }
}

fn run(fake: &mut FakeExecutor, rows: SeqStep) -> Result<SeqOutput, ExecError> {
    fake.run(&Step { seqs: vec![rows] })
        .map(|mut output| output.seqs.remove(0))
}

#[test]
fn rounds_emit_what_the_definition_says() {
    let mut fake = FakeExecutor::new(FakeOptions {
        right: 1.0,
        ..FakeOptions::default()
    });
    let expected: Vec<_> = fake
        .expected(&[7, 8, 9], &SamplingParams::greedy(5))
        .into_iter()
        .map(|token| token.id)
        .collect();
    let first = run(&mut fake, rows(vec![7, 8, 9], 0, 0, 0)).unwrap();
    assert_eq!(first.tokens[0].id, expected[0]);
    assert_eq!(first.drafts, expected[1..3]);
    let inputs = vec![expected[0], expected[1], expected[2] + 1];
    let second = run(&mut fake, rows(inputs, 3, 1, 2)).unwrap();
    let ids: Vec<_> = second.tokens.iter().map(|token| token.id).collect();
    assert_eq!(ids, expected[1..3]);
}

#[test]
fn the_slot_of_a_rejected_draft_is_dead() {
    let mut fake = FakeExecutor::new(FakeOptions::default());
    let first = run(&mut fake, rows(vec![7, 8, 9], 0, 0, 0)).unwrap().tokens[0].id;
    let wrong_drafts = vec![first, 999, 999];
    assert_eq!(
        run(&mut fake, rows(wrong_drafts, 3, 1, 2))
            .unwrap()
            .tokens
            .len(),
        1
    );
    let error = run(&mut fake, rows(vec![1], 5, 2, 0)).unwrap_err();
    assert!(
        error.reason.contains("position 4 of the full group"),
        "{error}"
    );
}

#[test]
fn a_block_in_two_hands_and_a_missing_block_are_errors() {
    let mut fake = FakeExecutor::new(FakeOptions::default());
    let step = Step {
        seqs: vec![rows(vec![7], 0, 0, 0), rows(vec![7], 0, 0, 0)],
    };
    assert!(fake.run(&step).unwrap_err().reason.contains("two places"));
    let mut short = rows(vec![1; 20], 0, 0, 0);
    short.tables.sliding.pop();
    assert!(
        run(&mut fake, short)
            .unwrap_err()
            .reason
            .contains("no sliding block")
    );
}

#[test]
fn slots_in_fp8_take_half_the_bytes_and_give_other_tokens() {
    let prompt = [7, 8, 9];
    let params = SamplingParams::greedy(5);
    let ids = |fake: &FakeExecutor| -> Vec<TokenId> {
        let expected = fake.expected(&prompt, &params);
        expected.iter().map(|token| token.id).collect()
    };
    let plain = FakeExecutor::new(FakeOptions::default());
    let options = FakeOptions {
        kv: KvDtype::Fp8,
        ..FakeOptions::default()
    };
    let mut fake = FakeExecutor::new(options.clone());
    assert_ne!(ids(&fake), ids(&plain));
    let first = run(&mut fake, rows(prompt.to_vec(), 0, 0, 0)).unwrap();
    assert_eq!(first.tokens[0].id, ids(&fake)[0]);
    let tables = rows(prompt.to_vec(), 0, 0, 0).tables;
    let mut other = FakeExecutor::new(options);
    for (group, blocks) in [
        (Group::Full, &tables.full),
        (Group::Sliding, &tables.sliding),
    ] {
        let mut bytes = Vec::new();
        fake.save_blocks(group, blocks, &mut bytes).unwrap();
        assert_eq!(bytes.len(), blocks.len() * 16 * SLOT_BYTES / 2);
        other.load_blocks(group, blocks, &bytes).unwrap();
    }
    // Goes on from what was saved, empty slots included.
    let next = rows(vec![first.tokens[0].id], 3, 1, 0);
    assert_eq!(run(&mut other, next).unwrap().tokens[0].id, ids(&fake)[1]);
}
