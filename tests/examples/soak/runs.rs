//! The runs: agents of several turns, each a function of its number, and what an undisturbed brain
//! answers them.

use marathon_proto::brain::{GenerationSpec, Sampling};
use marathon_tests::{Brain, BrainOptions, generate, spec};

/// Tokens of an answer.
const ANSWER: u32 = 48;
const TURNS: usize = 6;

/// One turn.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// What is asked: the whole prompt.
    pub(crate) spec: GenerationSpec,
    /// What an undisturbed brain answers.
    pub(crate) answer: Vec<u32>,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
}

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Its turns, each prompt the one before with its answer and something more.
    pub(crate) turns: Vec<Turn>,
}

impl Run {
    /// Tokens of all its answers.
    pub(crate) fn tokens(&self) -> usize {
        self.turns.iter().map(|turn| turn.answer.len()).sum()
    }
}

/// Random numbers of a seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    /// Numbers of this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// True once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Computes every run on a brain of its own: no drafter, memory enough, nothing in its way.
pub(crate) async fn undisturbed(runs: u64, seed: u64) -> Vec<Run> {
    let flags = ["--device", "cpu", "--drafter", "none"];
    let brain = Brain::start(BrainOptions {
        flags: flags.map(str::to_owned).to_vec(),
        ..BrainOptions::default()
    });
    let mut client = brain.client();
    let mut done = Vec::new();
    for number in 0..runs {
        let mut chance = Chance::new(seed.wrapping_mul(1 << 20) + number);
        // Every third run begins with the same instructions.
        let common = if number % 3 == 0 { 160 } else { 0 };
        let mut prompt: Vec<u32> = (0..common).map(|at| 200 + at * 7 % 600).collect();
        let own = 40 + chance.below(700);
        prompt.extend((0..own).map(|_| 200 + chance.below(700) as u32));
        let mut turns = Vec::new();
        for turn in 0..TURNS {
            let sampling = Sampling {
                temperature: Some(if number % 2 == 0 { 0.0 } else { 1.5 }),
                seed: Some(number * 100 + turn as u64),
                frequency_penalty: Some(if number % 5 == 0 { 0.5 } else { 0.0 }),
                max_tokens: Some(ANSWER),
                ignore_eos: Some(true),
                ..Sampling::default()
            };
            let spec = GenerationSpec {
                run_id: format!("run {number}"),
                ..spec(&prompt, sampling)
            };
            let id = format!("{number}-{turn}");
            let answer = generate(&mut client, &id, Some(spec.clone()), 0).await;
            let answer = answer.expect("an undisturbed answer").ids;
            let length = prompt.len();
            prompt.extend(&answer);
            let more = 5 + chance.below(60);
            prompt.extend((0..more).map(|_| 200 + chance.below(700) as u32));
            turns.push(Turn {
                spec,
                answer,
                prompt: length,
            });
        }
        done.push(Run { turns });
    }
    done
}
