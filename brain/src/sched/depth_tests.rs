//! The choice of a depth against drafters and machines of every kind, none of which it knows.

use std::time::Duration;

use super::{super::cost::Drafted, *};

const LONE: Batch = Batch {
    sequences: 1,
    context: 1000,
};

/// How a machine wavers. Whatever it does, it does not know about drafts.
#[derive(Clone, Copy, Debug)]
enum Noise {
    /// Not at all.
    None,
    /// Every step a little.
    Steady(f64),
    /// One step in five is held up, three to ten times as long.
    Spikes,
    /// Now free, now busy with something else for a while, and then twice as slow.
    Busy,
}

/// A drafter and a device as they really are.
#[derive(Clone, Copy, Debug)]
struct Truth {
    /// Chance of a right draft when those before it are right.
    right: f64,
    /// Cost of a draft in shares of a step without drafts.
    slope: f64,
    noise: Noise,
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64
    }
}

impl Noise {
    fn factor(self, round: usize, numbers: &mut Numbers) -> f64 {
        match self {
            Noise::None => 1.0,
            Noise::Steady(share) => 1.0 + share * (numbers.next() - 0.5),
            Noise::Spikes if numbers.next() < 0.2 => 3.0 + 7.0 * numbers.next(),
            Noise::Spikes => 1.0 + 0.05 * numbers.next(),
            Noise::Busy => {
                let busy = round / 170 % 2 == 1;
                if busy {
                    2.0 + 0.3 * numbers.next()
                } else {
                    1.0 + 0.05 * numbers.next()
                }
            }
        }
    }
}

/// Plays rounds of `batch` equal sequences of `length` tokens each; returns the depths chosen and
/// how many undisturbed steps without drafts a round's tokens are worth.
fn play(truth: Truth, batch: Batch, length: usize, rounds: usize) -> (Vec<usize>, f64) {
    let mut everyone = Acceptance::default();
    let mut cost = StepCost::default();
    let (mut chosen, mut numbers) = (Vec::new(), Numbers(9));
    let mut sequences: Vec<(Depth, usize, usize)> = Vec::new();
    sequences.resize_with(batch.sequences, Default::default);
    let (mut tokens, mut time) = (0, 0.0);
    for round in 0..rounds {
        let mut drafted = Drafted::default();
        for (depth, drafts, emitted) in &mut sequences {
            let right = |_: &usize| numbers.next() < truth.right;
            let accepted = (0..*drafts).take_while(right).count();
            depth.observe(*drafts, accepted);
            everyone.observe(*drafts, accepted);
            *emitted += accepted + 1;
            tokens += accepted + 1;
            let left = length.saturating_sub(*emitted + 1);
            let next = depth.choose(&everyone, &cost, batch, left.min(8));
            drafted.made += next;
            drafted.checked += *drafts;
            drafted.accepted += accepted;
            chosen.push(next);
            *drafts = next;
            if *emitted >= length {
                (*depth, *drafts, *emitted) = (Depth::default(), 0, 0);
            }
        }
        let mean = (drafted.made + drafted.checked) as f64 / 2.0;
        // A draft costs a share of a step whatever the batch: the slope is per sequence.
        let step = 1.0 + truth.slope * mean / batch.sequences as f64;
        time += step;
        let measured = step * truth.noise.factor(round, &mut numbers);
        cost.observe(batch, drafted, Duration::from_secs_f64(measured / 1000.0));
    }
    (chosen, time * batch.sequences as f64 / tokens as f64)
}

/// The same for a depth that is always the same.
fn fixed(truth: Truth, depth: usize) -> f64 {
    let mut tokens = 1.0;
    let mut survives = 1.0;
    for _ in 0..depth {
        survives *= truth.right;
        tokens += survives;
    }
    (1.0 + truth.slope * depth as f64) / tokens
}

const STEADY: Noise = Noise::Steady(0.2);

#[test]
fn good_cheap_drafts_go_deep() {
    for noise in [STEADY, Noise::Spikes, Noise::Busy] {
        let truth = Truth {
            right: 0.95,
            slope: 0.05,
            noise,
        };
        let (depths, cost) = play(truth, LONE, 4000, 600);
        let late = &depths[500..];
        assert!(late.iter().sum::<usize>() >= 600, "{noise:?}: {late:?}");
        assert!(cost < 0.25, "{noise:?}: {cost}");
    }
}

#[test]
fn middling_drafts_get_a_middling_depth() {
    let truth = Truth {
        right: 0.6,
        slope: 0.15,
        noise: STEADY,
    };
    let (depths, cost) = play(truth, LONE, 4000, 600);
    let mean = depths[500..].iter().sum::<usize>() as f64 / 100.0;
    assert!((1.0..4.5).contains(&mean), "{mean}");
    assert!(cost < 0.8, "{cost}");
}

/// Every mix of acceptance, cost, batch, noise and length.
#[test]
fn drafting_never_costs_and_is_nearly_as_good_as_the_best_fixed_depth() {
    let noises = [Noise::None, Noise::Steady(0.3), Noise::Spikes, Noise::Busy];
    let (mut worst, mut ratios) = (0.0f64, Vec::new());
    for right in [0.0, 0.2, 0.4, 0.6, 0.8, 1.0] {
        for slope in [0.0, 0.02, 0.1, 0.4, 1.0, 4.0] {
            for sequences in [1, 6] {
                for noise in noises {
                    let batch = Batch {
                        sequences,
                        context: 1000,
                    };
                    let truth = Truth {
                        right,
                        slope,
                        noise,
                    };
                    let (_, long) = play(truth, batch, 4000, 4000);
                    let (_, short) = play(truth, batch, 30, 4000);
                    let cost = long.max(short);
                    assert!(cost <= 1.02, "{truth:?}, {sequences} sequences: {cost}");
                    worst = worst.max(cost);
                    let best = (0..=8).map(|depth| fixed(truth, depth));
                    ratios.push(long / best.fold(f64::INFINITY, f64::min));
                }
            }
        }
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    assert!(
        mean <= 1.05,
        "{} mixes: at worst {worst:.4} of the time without drafts, on average {mean:.4} of that with \
         the best fixed depth",
        ratios.len()
    );
}

#[test]
fn drafting_comes_back_when_drafts_become_good() {
    let (mut everyone, mut cost) = (Acceptance::default(), StepCost::default());
    let mut depth = Depth::default();
    let mut drafts = 0;
    let mut play = |right: bool, rounds: usize| {
        for _ in 0..rounds {
            let accepted = if right { drafts } else { 0 };
            depth.observe(drafts, accepted);
            everyone.observe(drafts, accepted);
            let next = depth.choose(&everyone, &cost, LONE, 4);
            let mean = (drafts + next) as f64 / 2.0;
            let drafted = Drafted {
                made: next,
                checked: drafts,
                accepted,
            };
            cost.observe(LONE, drafted, Duration::from_secs_f64(1e-3 + 1e-4 * mean));
            drafts = next;
        }
        drafts
    };
    assert_eq!(play(false, 400), 0);
    assert!(play(true, 20_000) >= 2);
}

fn measured() -> StepCost {
    let mut cost = StepCost::default();
    (0..4).for_each(|_| cost.observe(LONE, Drafted::default(), Duration::from_millis(1)));
    cost
}

#[test]
fn a_sequence_with_bad_drafts_among_good_ones_is_left_alone() {
    let (mut everyone, mut cost) = (Acceptance::default(), measured());
    (0..50).for_each(|_| everyone.observe(4, 4));
    let drafted = Drafted {
        made: 4,
        checked: 4,
        accepted: 4,
    };
    // The first such step might be a probe.
    (0..3).for_each(|_| cost.observe(LONE, drafted, Duration::from_millis(2)));
    let mut bad = Depth::default();
    assert!(bad.choose(&everyone, &cost, LONE, 4) > 0);
    (0..80).for_each(|_| bad.observe(4, 0));
    assert_eq!(bad.choose(&everyone, &cost, LONE, 4), 0);
    (0..RETRY_AFTER).for_each(|_| bad.observe(0, 0));
    assert_eq!(bad.choose(&everyone, &cost, LONE, 4), 1, "tried again");
    bad.observe(1, 0);
    assert_eq!(bad.choose(&everyone, &cost, LONE, 4), 0);
}

#[test]
fn nothing_is_drafted_unmeasured_or_beyond_the_limit() {
    let (everyone, mut cost) = (Acceptance::default(), StepCost::default());
    let depth = Depth::default();
    assert_eq!(depth.choose(&everyone, &cost, LONE, 4), 0);
    (0..9).for_each(|_| cost.observe(LONE, Drafted::default(), Duration::ZERO));
    assert_eq!(
        depth.choose(&everyone, &cost, LONE, 4),
        0,
        "no time is no measurement"
    );
    let cost = measured();
    assert!((1..=4).contains(&depth.choose(&everyone, &cost, LONE, 4)));
    assert_eq!(depth.choose(&everyone, &cost, LONE, 0), 0);
}
